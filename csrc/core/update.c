/*
 * The sharded update: each rank updates its pieces of the master weights, publishes its segments of the parameters and
 * collects the others'. Every rank has entered its step when this begins, so no weight changes under a reader.
 */
#include <stdlib.h>
#include <string.h>

#include "core/engine_state.h"
#include "core/work.h"

static void adam(const ss_engine *e, const ss_update *u, int32_t i, float *master, void *low, int64_t at)
{
    const ss_param *p = &e->params[i];
    const ss_options *o = &u->options[u->group[i]];
    int32_t b = e->layout.placements[i].bucket;
    ss_adam_args args = {.param = master,
                         .low = low,
                         .low_dtype = p->spec.param_dtype,
                         .grad = ss_piece_grad(e, i),
                         .grad_scale = (float)p->scale,
                         .exp_avg = u->state[0][b] + at,
                         .exp_avg_sq = u->state[1][b] + at,
                         .max_exp_avg_sq = o->amsgrad ? u->state[2][b] + at : NULL,
                         .lr = o->lr,
                         .beta1 = o->beta1,
                         .beta2 = o->beta2,
                         .eps = o->eps,
                         .weight_decay = o->weight_decay,
                         .step = (double)u->steps[i],
                         .decoupled = o->decoupled,
                         .maximize = o->maximize,
                         .tail = ss_adam_tail(p->spec.numel, p->piece.in_param, p->piece.numel)};
    e->kernels->adam(&args, p->piece.numel);
}

static void sgd(const ss_engine *e, const ss_update *u, int32_t i, float *master, void *low, int64_t at)
{
    const ss_param *p = &e->params[i];
    const ss_options *o = &u->options[u->group[i]];
    int32_t b = e->layout.placements[i].bucket;
    ss_sgd_args args = {.param = master,
                        .low = low,
                        .low_dtype = p->spec.param_dtype,
                        .grad = ss_piece_grad(e, i),
                        .grad_scale = (float)p->scale,
                        .momentum_buffer = o->momentum != 0.0 ? u->state[0][b] + at : NULL,
                        .lr = o->lr,
                        .momentum = o->momentum,
                        .dampening = o->dampening,
                        .weight_decay = o->weight_decay,
                        .nesterov = o->nesterov,
                        .maximize = o->maximize,
                        .first = u->steps[i] <= 1.0f};
    e->kernels->sgd(&args, p->piece.numel);
}

static void *piece_param(const ss_engine *e, int32_t i)
{
    int32_t b = e->layout.placements[i].bucket;
    int64_t element = e->rank * e->layout.buckets[b].segment + e->params[i].piece.in_segment;
    return e->buckets[b].param + element * (int64_t)ss_dtype_size(e->layout.buckets[b].param_dtype);
}

static ss_code publish(ss_engine *e, int32_t b, ss_error *err)
{
    e->buckets[b].published = true;
    return e->transport->ops->publish(e->transport, SS_PLANE_PARAM, b, err);
}

/* Where the update writes: FP32 masters, and the parameter beside them where it is of low precision. */
typedef struct {
    float *master;
    void *low;
} weights;

static weights weights_of(const ss_engine *e, int32_t i)
{
    const ss_bucket *bucket = &e->buckets[e->layout.placements[i].bucket];
    if (bucket->master == NULL) {
        return (weights){piece_param(e, i), NULL};
    }
    return (weights){bucket->master + e->params[i].piece.in_segment, piece_param(e, i)};
}

static bool is_updated(const ss_engine *e, const ss_update *u, int32_t i)
{
    return e->params[i].state == SS_HELD && u->group[i] >= 0;
}

static bool counts_steps(const ss_update *u, int32_t i)
{
    return u->rule == SS_RULE_ADAM || u->options[u->group[i]].momentum != 0.0;
}

static void update_on_host(const ss_engine *e, const ss_update *u, int32_t b)
{
    SS_EACH_MEMBER(e, b, i) {
        if (!is_updated(e, u, i)) {
            continue;
        }
        int64_t at = e->params[i].piece.in_segment;
        weights w = weights_of(e, i);
        u->steps[i] += counts_steps(u, i);
        if (e->params[i].piece.numel == 0) {
            continue;
        }
        if (u->rule == SS_RULE_ADAM) {
            adam(e, u, i, w.master, w.low, at);
        } else {
            sgd(e, u, i, w.master, w.low, at);
        }
    }
}

static ss_cuda_piece device_piece(const ss_engine *e, const ss_update *u, int32_t i)
{
    const ss_param *p = &e->params[i];
    const ss_options *o = &u->options[u->group[i]];
    int32_t b = e->layout.placements[i].bucket;
    weights w = weights_of(e, i);
    int slots = u->rule == SS_RULE_ADAM ? 2 + (o->amsgrad != 0) : o->momentum != 0.0;
    ss_cuda_piece piece = {.n = p->piece.numel,
                           .param = w.master,
                           .low = w.low,
                           .low_dtype = p->spec.param_dtype,
                           .grad = ss_piece_grad(e, i),
                           .grad_dtype = SS_F32,
                           .grad_scale = p->scale,
                           .step = counts_steps(u, i) ? &u->steps[i] : NULL,
                           .tail = (int32_t)ss_adam_tail(p->spec.numel, p->piece.in_param, p->piece.numel),
                           .options = u->group[i]};
    for (int k = 0; k < slots; k++) {
        piece.state[k] = u->state[k][b] + p->piece.in_segment;
    }
    return piece;
}

/* The device counts steps itself. */
static ss_code update_on_device(ss_engine *e, const ss_update *u, int32_t b, ss_error *err)
{
    int32_t n = 0, n_options = 0;
    ss_cuda_piece *pieces = calloc((size_t)e->layout.buckets[b].n_members, sizeof *pieces);
    ss_cuda_options *options = NULL;
    ss_code code = SS_OK;
    SS_EACH_MEMBER(e, b, i) {
        n_options = u->group[i] >= n_options ? u->group[i] + 1 : n_options;
    }
    options = calloc((size_t)n_options + 1, sizeof *options);
    if (pieces == NULL || options == NULL) {
        code = ss_fail(err, SS_ERR_NO_MEMORY, "no memory for the update of bucket %d", b);
        goto out;
    }
    for (int32_t k = 0; k < n_options; k++) {
        const ss_options *o = &u->options[k];
        options[k] = (ss_cuda_options){.lr = o->lr,
                                       .beta1 = o->beta1,
                                       .beta2 = o->beta2,
                                       .eps = o->eps,
                                       .weight_decay = o->weight_decay,
                                       .momentum = o->momentum,
                                       .dampening = o->dampening,
                                       .decoupled = o->decoupled,
                                       .nesterov = o->nesterov,
                                       .maximize = o->maximize};
    }
    SS_EACH_MEMBER(e, b, i) {
        if (is_updated(e, u, i)) {
            pieces[n++] = device_piece(e, u, i);
        }
    }
    ss_cuda_update update = {
        .size = sizeof update, .n_pieces = n, .n_options = n_options, .pieces = pieces, .options = options,
        .clip = e->clip_coefficient, .skip = e->clip_skip};
    code = ss_work_update(e, u->rule, &update, err);
out:
    free(pieces);
    free(options);
    return code;
}

static bool any_updated(const ss_engine *e, const ss_update *u, int32_t b)
{
    SS_EACH_MEMBER(e, b, i) {
        if (is_updated(e, u, i)) {
            return true;
        }
    }
    return false;
}

ss_code ss_engine_update(ss_engine *e, const ss_update *u, ss_error *err)
{
    pthread_mutex_lock(&e->lock);
    double begin = ss_now();
    ss_code code = ss_check_usable(e, err);
    for (int32_t b = 0; code == SS_OK && b < e->layout.n_buckets; b++) {
        if (!any_updated(e, u, b)) {
            continue;
        }
        void *span = ss_span_begin(e, "shardstep::update", b);
        if (e->device == NULL) {
            update_on_host(e, u, b);
        } else {
            code = update_on_device(e, u, b, err);
        }
        ss_span_end(e, span);
        if (code == SS_OK) {
            code = publish(e, b, err);
        }
    }
    e->stats.update_seconds += ss_now() - begin;
    if (code != SS_OK) {
        code = ss_broke(e, code, "the update", err);
    }
    pthread_mutex_unlock(&e->lock);
    return code;
}

static float *piece_master(const ss_engine *e, int32_t i)
{
    return e->buckets[e->layout.placements[i].bucket].master + e->params[i].piece.in_segment;
}

static bool has_master(const ss_engine *e, int32_t i)
{
    int32_t b = e->layout.placements[i].bucket;
    return b >= 0 && e->buckets[b].master != NULL && e->params[i].piece.numel > 0;
}

ss_code ss_engine_adopt(ss_engine *e, const int32_t *params, int32_t count, ss_error *err)
{
    pthread_mutex_lock(&e->lock);
    for (int32_t k = 0; k < count; k++) {
        if (has_master(e, params[k])) {
            const ss_param *p = &e->params[params[k]];
            ss_work_adopt(e, p->spec.param_dtype, piece_master(e, params[k]), piece_param(e, params[k]), p->piece.numel);
        }
    }
    ss_code code = ss_work_result(e, err);
    pthread_mutex_unlock(&e->lock);
    return code;
}

void ss_engine_reset_masters(ss_engine *e)
{
    pthread_mutex_lock(&e->lock);
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        if (has_master(e, i)) {
            const ss_param *p = &e->params[i];
            ss_work_from_low(e, p->spec.param_dtype, piece_master(e, i), piece_param(e, i), p->piece.numel);
        }
    }
    pthread_mutex_unlock(&e->lock);
}

ss_code ss_engine_publish(ss_engine *e, const int32_t *params, int32_t count, ss_error *err)
{
    pthread_mutex_lock(&e->lock);
    ss_code code = ss_check_usable(e, err);
    for (int32_t k = 0; k < count; k++) {
        int32_t i = params[k], b = e->layout.placements[i].bucket;
        if (has_master(e, i)) {
            const ss_param *p = &e->params[i];
            ss_work_to_low(e, p->spec.param_dtype, piece_param(e, i), piece_master(e, i), p->piece.numel);
        }
        e->buckets[b].published = true; /* marked here, published below in bucket order */
    }
    for (int32_t b = 0; code == SS_OK && b < e->layout.n_buckets; b++) {
        if (e->buckets[b].published) {
            code = publish(e, b, err);
        }
    }
    if (code != SS_OK) {
        code = ss_broke(e, code, "the update", err);
    }
    pthread_mutex_unlock(&e->lock);
    return code;
}

ss_code ss_engine_gather(ss_engine *e, ss_error *err)
{
    pthread_mutex_lock(&e->lock);
    double begin = ss_now();
    const ss_transport_ops *ops = e->transport->ops;
    ss_code code = ss_check_usable(e, err);
    bool any = false;
    for (int32_t b = 0; code == SS_OK && b < e->layout.n_buckets; b++) {
        if (e->buckets[b].published) {
            any = true;
            void *span = ss_span_begin(e, "shardstep::gather", b);
            code = ops->collect(e->transport, SS_PLANE_PARAM, b, err);
            ss_span_end(e, span);
        }
    }
    if (code == SS_OK && any) {
        code = ops->release(e->transport, SS_PLANE_PARAM, err);
    }
    if (code != SS_OK) {
        code = ss_broke(e, code, "the all-gather of parameters", err);
    }
    for (int32_t b = 0; code == SS_OK && b < e->layout.n_buckets; b++) {
        if (e->buckets[b].published) {
            e->buckets[b].published = false;
            SS_EACH_MEMBER(e, b, i) {
                e->framework.written(e->framework.ctx, i);
            }
        }
    }
    e->clip_norm = e->clip_coefficient = NULL;
    e->clip_skip = NULL;
    e->stats.exposed_seconds += ss_now() - begin;
    pthread_mutex_unlock(&e->lock);
    return code;
}

void ss_engine_end_step(ss_engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->want_norms = e->norms_asked;
    e->norms_asked = false;
    e->window_backwards = 0;
    e->stats.steps++;
    pthread_mutex_unlock(&e->lock);
}

int ss_engine_lost_peer(ss_engine *e)
{
    pthread_mutex_lock(&e->lock);
    int rank = e->transport->ops->lost(e->transport);
    pthread_mutex_unlock(&e->lock);
    return rank;
}
