/*
 * Norms of reduced gradients. Each rank sums over its pieces, the ranks add their sums in rank order. L2 sums are FP64
 * in 16 fixed lanes per parameter, so they do not depend on the instruction set or on when they are computed; when the
 * last window asked for them they are computed block by block while the reduction has the data in cache.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/engine_state.h"
#include "core/work.h"

void ss_norms_begin(ss_engine *e, int32_t b)
{
    ss_bucket *bucket = &e->buckets[b];
    bucket->norms_ready = false;
    bucket->cursor = 0;
    memset(bucket->lanes, 0, sizeof bucket->lanes);
}

double ss_norms_sum_lanes(const double lanes[SS_NORM_LANES])
{
    double sum = 0.0;
    for (int k = 0; k < SS_NORM_LANES; k++) {
        sum += lanes[k];
    }
    return sum;
}

static void add_squares(ss_engine *e, int32_t i, const void *x, int64_t n, int64_t phase, double *lanes)
{
    if (e->params[i].spec.grad_dtype == SS_F64) {
        e->kernels->sumsq_f64(x, n, phase, lanes);
    } else {
        e->kernels->sumsq_f32(x, n, phase, lanes);
    }
}

/* Elements [begin, end) of my segment are final. Ranges come in order. */
void ss_norms_range(ss_engine *e, int32_t b, int64_t begin, int64_t end)
{
    if (!e->want_norms) {
        return;
    }
    ss_bucket *bucket = &e->buckets[b];
    const ss_bucket_shape *shape = &e->layout.buckets[b];
    int64_t base = e->rank * shape->segment;
    for (; bucket->cursor < shape->n_members; bucket->cursor++) {
        int32_t i = e->layout.members[shape->first_member + bucket->cursor];
        ss_param *p = &e->params[i];
        int64_t piece_end = p->piece.in_segment + p->piece.numel;
        int64_t from = p->piece.in_segment > begin ? p->piece.in_segment : begin;
        int64_t to = piece_end < end ? piece_end : end;
        if (from < to) {
            add_squares(e, i, ss_grad_at(e, b, base + from), to - from, p->piece.in_param + from - p->piece.in_segment,
                        bucket->lanes);
        }
        if (p->piece.numel > 0 && piece_end > end) {
            return; /* the rest of this piece is in the next range */
        }
        p->norm_partial = ss_norms_sum_lanes(bucket->lanes);
        memset(bucket->lanes, 0, sizeof bucket->lanes);
    }
    bucket->norms_ready = true;
}

static ss_code compute_partials(ss_engine *e, double order, ss_error *err)
{
    ss_work_norm *norms = calloc((size_t)e->layout.n_params + 1, sizeof *norms);
    int32_t count = 0;
    if (norms == NULL) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "no memory for norms");
    }
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        ss_bucket *bucket = &e->buckets[b];
        if (order == 2.0 && bucket->norms_ready) {
            continue;
        }
        SS_EACH_MEMBER(e, b, i) {
            ss_param *p = &e->params[i];
            p->norm_partial = 0.0;
            if (p->state == SS_HELD) {
                norms[count++] = (ss_work_norm){.x = p->piece.numel > 0 ? ss_piece_grad(e, i) : NULL,
                                                .spec = &p->spec,
                                                .n = p->piece.numel,
                                                .in_param = p->piece.in_param,
                                                .partial = &p->norm_partial};
            }
        }
        bucket->norms_ready = order == 2.0;
    }
    ss_code code = ss_work_norms(e, norms, count, order, err);
    free(norms);
    return code;
}

/* Collective. Leaves each parameter's total of the given order in norm_total, when this rank wants to keep it. */
ss_code ss_norms_agree(ss_engine *e, double order, bool keep, ss_error *err)
{
    int32_t n = e->layout.n_params;
    SS_TRY(compute_partials(e, order, err));
    double *mine = e->partials, *all = e->partials + n;
    for (int32_t i = 0; i < n; i++) {
        mine[i] = e->layout.placements[i].bucket >= 0 ? e->params[i].norm_partial : 0.0;
    }
    SS_TRY(e->transport->ops->exchange(e->transport, mine, (size_t)n * sizeof *mine, all, err));
    if (!keep) {
        return SS_OK;
    }
    for (int32_t i = 0; i < n; i++) {
        double total = all[i];
        for (int k = 1; k < e->world; k++) {
            double other = all[(int64_t)k * n + i];
            if (isinf(order)) {
                total = isnan(total) || isnan(other) ? NAN : order > 0 ? fmax(total, other) : fmin(total, other);
            } else {
                total += other;
            }
        }
        e->params[i].norm_total = total;
    }
    e->norm_order = order;
    e->norms_valid = true;
    return SS_OK;
}

/* Is the norm of this parameter's gradient that the last close agreed on still the one of its gradient? */
static bool known(const ss_engine *e, double order, int32_t i)
{
    const ss_param *p = &e->params[i];
    bool joins = e->layout.placements[i].bucket < 0 && e->framework.wants_place(e->framework.ctx, i);
    return e->norms_valid && !e->unsettled && e->norm_order == order && !joins &&
           (p->state == SS_HELD || p->state == SS_NONE);
}

int ss_engine_norm(ss_engine *e, double order, int32_t i, double *norm)
{
    pthread_mutex_lock(&e->lock);
    const ss_param *p = &e->params[i];
    int is_known = known(e, order, i);
    if (is_known) {
        double root = p->norm_total;
        if (order == 2.0) {
            root = sqrt(root);
        } else if (!isinf(order) && order != 0.0 && order != 1.0) {
            root = pow(root, 1.0 / order);
        }
        double scale = order == 0.0 ? p->scale != 0.0 : fabs(p->scale);
        *norm = p->state == SS_NONE ? 0.0 : root * scale;
    }
    pthread_mutex_unlock(&e->lock);
    return is_known;
}

int ss_engine_clip(ss_engine *e, const int32_t *params, int32_t count, double max_norm, int only_finite, double *norm)
{
    pthread_mutex_lock(&e->lock);
    int all_known = 1;
    double sum = 0.0;
    for (int32_t k = 0; k < count && all_known; k++) {
        const ss_param *p = &e->params[params[k]];
        all_known = known(e, 2.0, params[k]);
        sum += p->state == SS_HELD ? p->norm_total * p->scale * p->scale : 0.0;
    }
    *norm = sqrt(sum);
    if (all_known && !(*norm <= max_norm) && (isfinite(*norm) || !only_finite)) {
        double factor = max_norm / (*norm + 1e-6);
        for (int32_t k = 0; k < count; k++) {
            ss_param *p = &e->params[params[k]];
            p->scale *= p->state == SS_HELD ? factor : 1.0;
        }
    }
    pthread_mutex_unlock(&e->lock);
    return all_known;
}
