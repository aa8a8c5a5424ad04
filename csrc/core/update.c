/*
 * The sharded update: each rank updates its pieces of the master weights, publishes its segments of the parameters and
 * collects the others'. Every rank has entered its step when this begins, so no weight changes under a reader.
 */
#include <stdlib.h>
#include <string.h>

#include "core/engine_state.h"

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

ss_code ss_engine_update(ss_engine *e, const ss_update *u, ss_error *err)
{
    pthread_mutex_lock(&e->lock);
    double begin = ss_now();
    ss_code code = ss_check_usable(e, err);
    for (int32_t b = 0; code == SS_OK && b < e->layout.n_buckets; b++) {
        bool touched = false;
        void *span = NULL;
        SS_EACH_MEMBER(e, b, i) {
            ss_param *p = &e->params[i];
            if (p->state != SS_HELD || u->group[i] < 0) {
                continue;
            }
            if (!touched) {
                touched = true;
                span = ss_span_begin(e, "shardstep::update", b);
            }
            u->steps[i] += u->rule == SS_RULE_ADAM || u->options[u->group[i]].momentum != 0.0;
            if (p->piece.numel == 0) {
                continue;
            }
            bool own_master = e->buckets[b].master == NULL;
            float *master = own_master ? piece_param(e, i) : e->buckets[b].master + p->piece.in_segment;
            void *low = own_master ? NULL : piece_param(e, i);
            if (u->rule == SS_RULE_ADAM) {
                adam(e, u, i, master, low, p->piece.in_segment);
            } else {
                sgd(e, u, i, master, low, p->piece.in_segment);
            }
        }
        ss_span_end(e, span);
        if (touched) {
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

static void to_low(const ss_engine *e, int32_t i, void *low, const float *master, int64_t n)
{
    if (e->params[i].spec.param_dtype == SS_BF16) {
        e->kernels->f32_to_bf16(low, master, n);
    } else {
        e->kernels->f32_to_f16(low, master, n);
    }
}

static void from_low(const ss_engine *e, int32_t i, float *master, const void *low, int64_t n)
{
    if (e->params[i].spec.param_dtype == SS_BF16) {
        e->kernels->bf16_to_f32(master, low, n);
    } else {
        e->kernels->f16_to_f32(master, low, n);
    }
}

enum { BLOCK = 1024 };

/* Elements of the parameter whose bits differ from the rounded master were written by the user: they are the truth. */
static void adopt(ss_engine *e, int32_t i)
{
    const ss_param *p = &e->params[i];
    float *master = e->buckets[e->layout.placements[i].bucket].master + p->piece.in_segment;
    const uint16_t *low = piece_param(e, i);
    uint16_t rounded[BLOCK];
    for (int64_t at = 0; at < p->piece.numel; at += BLOCK) {
        int64_t n = p->piece.numel - at < BLOCK ? p->piece.numel - at : BLOCK;
        to_low(e, i, rounded, master + at, n);
        if (memcmp(rounded, low + at, (size_t)n * sizeof *low) == 0) {
            continue;
        }
        for (int64_t k = 0; k < n; k++) {
            if (rounded[k] != low[at + k]) {
                from_low(e, i, master + at + k, low + at + k, 1);
            }
        }
    }
}

static bool has_master(const ss_engine *e, int32_t i)
{
    int32_t b = e->layout.placements[i].bucket;
    return b >= 0 && e->buckets[b].master != NULL && e->params[i].piece.numel > 0;
}

ss_code ss_engine_adopt(ss_engine *e, const int32_t *params, int32_t count, ss_error *err)
{
    (void)err; /* cannot fail */
    pthread_mutex_lock(&e->lock);
    for (int32_t k = 0; k < count; k++) {
        if (has_master(e, params[k])) {
            adopt(e, params[k]);
        }
    }
    pthread_mutex_unlock(&e->lock);
    return SS_OK;
}

void ss_engine_reset_masters(ss_engine *e)
{
    pthread_mutex_lock(&e->lock);
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        if (has_master(e, i)) {
            float *master = e->buckets[e->layout.placements[i].bucket].master + e->params[i].piece.in_segment;
            from_low(e, i, master, piece_param(e, i), e->params[i].piece.numel);
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
            to_low(e, i, piece_param(e, i), e->buckets[b].master + e->params[i].piece.in_segment,
                   e->params[i].piece.numel);
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
    e->want_norms = e->norms_asked;
    e->norms_asked = false;
    e->window_backwards = 0;
    e->stats.steps++;
    e->stats.exposed_seconds += ss_now() - begin;
    pthread_mutex_unlock(&e->lock);
    return code;
}
