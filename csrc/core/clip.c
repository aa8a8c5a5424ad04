/*
 * Clipping by the global norm, and skipping what is not finite, where there is a device: everything stays in its memory, so
 * that the host goes on without waiting for it. The update reads the coefficient and the flag there.
 *
 *   sums of squares of my pieces -> my norm -> everybody's norms -> the global norm -> coefficient and flag
 */
#include <math.h>
#include <stdlib.h>

#include "core/work.h"

/* The region's content. Norms of all ranks come after it, then sums of squares, then the workspace of the kernels. */
typedef struct {
    double norm, coefficient; /* of all gradients together */
    double mine, unused;      /* this rank's part, and a coefficient that is not looked at */
    double total;             /* sum of the squares of the norms */
    int32_t skip;
} result;

#define ALIGN(bytes) (((bytes) + 255) / 256 * 256)

typedef struct {
    result *result;
    double *norms, *sums;
    void *workspace;
    size_t bytes, workspace_bytes;
} places;

static places places_in(const ss_engine *e, void *base, int32_t n, size_t workspace)
{
    size_t norms = ALIGN(sizeof(result)), sums = norms + ALIGN((size_t)e->world * sizeof(double));
    size_t rest = sums + ALIGN(((size_t)n + 1) * sizeof(double));
    char *at = base;
    return (places){.result = base,
                    .norms = (double *)(at + norms),
                    .sums = (double *)(at + sums),
                    .workspace = at + rest,
                    .bytes = rest + workspace,
                    .workspace_bytes = workspace};
}

static ss_code ensure(ss_engine *e, int32_t n, size_t workspace, places *p, ss_error *err)
{
    *p = places_in(e, NULL, n, workspace);
    if (e->clip_region == NULL || e->clip_region->bytes < p->bytes) {
        ss_region_release(e->clip_region);
        e->clip_region = NULL;
        SS_TRY(ss_work_memory(e, p->bytes, &e->clip_region, err));
    }
    *p = places_in(e, e->clip_region->base, n, workspace);
    return SS_OK;
}

static ss_code enqueue(ss_engine *e, const ss_cuda_norm_range *ranges, int32_t n, double max_norm, int only_finite,
                       ss_error *err)
{
    const ss_cuda *kernels = e->device->kernels;
    places p;
    ss_stream current;
    ss_cuda_norm_range total = {.n = e->world, .scale = 1.0};
    size_t workspace = kernels->norm_workspace(ranges, n), few = kernels->norm_workspace(&total, 1);
    SS_TRY(ensure(e, n, workspace > few ? workspace : few, &p, err));
    total.x = p.norms;
    SS_TRY(e->device->ops->current(e->device, &current, err));
    ss_cuda_norms_args squares = {.size = sizeof squares,
                                  .count = n,
                                  .dtype = SS_F32,
                                  .ranges = ranges,
                                  .sums = p.sums,
                                  .workspace = p.workspace,
                                  .workspace_bytes = p.workspace_bytes};
    ss_cuda_clip_args mine = {.size = sizeof mine,
                              .count = n,
                              .max_norm = INFINITY,
                              .sums = p.sums,
                              .norm = &p.norms[e->rank],
                              .coefficient = &p.result->unused};
    ss_cuda_norms_args all = squares;
    all.count = 1;
    all.dtype = SS_F64;
    all.ranges = &total;
    all.sums = &p.result->total;
    ss_cuda_clip_args clip = {.size = sizeof clip,
                              .count = 1,
                              .only_finite = only_finite,
                              .max_norm = max_norm,
                              .sums = &p.result->total,
                              .norm = &p.result->norm,
                              .coefficient = &p.result->coefficient};
    SS_TRY(ss_work_check(e, kernels->norms(&squares, current.native), "norms", err));
    SS_TRY(ss_work_check(e, kernels->clip(&mine, current.native), "norms", err));
    SS_TRY(e->transport->ops->gather(e->transport, p.norms, sizeof(double), err));
    SS_TRY(ss_work_check(e, kernels->norms(&all, current.native), "norms", err));
    SS_TRY(ss_work_check(e, kernels->clip(&clip, current.native), "clipping", err));
    if (only_finite) {
        SS_TRY(ss_work_check(e, kernels->skip(&p.result->norm, NULL, &p.result->skip, current.native), "skipping", err));
    }
    e->clip_norm = &p.result->norm;
    e->clip_coefficient = &p.result->coefficient;
    e->clip_skip = only_finite ? &p.result->skip : NULL;
    return SS_OK;
}

ss_code ss_engine_clip_on_device(ss_engine *e, const int32_t *params, int32_t count, double max_norm, int only_finite,
                                 const double **norm, ss_region **region, ss_error *err)
{
    pthread_mutex_lock(&e->lock);
    ss_code code = ss_check_usable(e, err);
    ss_cuda_norm_range *ranges = calloc((size_t)count + 1, sizeof *ranges);
    int32_t n = 0;
    if (code == SS_OK && ranges == NULL) {
        code = ss_fail(err, SS_ERR_NO_MEMORY, "no memory for the norms of %d gradients", count);
    }
    for (int32_t k = 0; code == SS_OK && k < count; k++) {
        const ss_param *p = &e->params[params[k]];
        if (p->state == SS_HELD && p->piece.numel > 0) {
            ranges[n++] = (ss_cuda_norm_range){.x = ss_piece_grad(e, params[k]),
                                               .n = p->piece.numel,
                                               .in_param = p->piece.in_param,
                                               .scale = p->scale};
        }
    }
    if (code == SS_OK) {
        code = enqueue(e, ranges, n, max_norm, only_finite, err);
    }
    if (code == SS_OK) {
        *norm = e->clip_norm;
        *region = e->clip_region;
    } else {
        code = ss_broke(e, code, "clipping", err);
    }
    free(ranges);
    pthread_mutex_unlock(&e->lock);
    return code;
}
