/*
 * Entries for benchmarks, called through ctypes: rounds of the shm transport, the fused update and the layout, each as the
 * engine uses them, and beside them plain streaming loops that move the same bytes, as the measure of what this
 * machine can do. All times are in seconds. A failure prints its message and gives NULL or a negative time.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/layout.h"
#include "kernels/kernels.h"
#include "transport/shm.h"
#include "transport/shm_words.h"

#define ENTRY __attribute__((visibility("default")))

/* -- ranks over the shm transport -- */

typedef struct {
    ss_transport *t;
    ss_region *region;
    ss_bucket_spec *specs;
    int n_buckets;
    float *exp_avg, *exp_avg_sq; /* of one segment of the largest bucket; NULL until the first update */
    float step;
} bench_ranks;

static double failed(const char *what, const ss_error *err)
{
    fprintf(stderr, "%s: %s\n", what, err->message);
    return -1.0;
}

#define TIMED(call)                        \
    do {                                   \
        ss_error err_ = {0}, *err = &err_; \
        if ((call) != SS_OK) {             \
            return failed(#call, err);     \
        }                                  \
    } while (0)

ENTRY void bench_close(bench_ranks *r)
{
    if (r->t != NULL) {
        r->t->ops->close(r->t);
    }
    ss_region_release(r->region);
    free(r->specs);
    free(r->exp_avg);
    free(r->exp_avg_sq);
    free(r);
}

/* Collective. At least `elements` FP32 gradients, and as many parameters (BF16 if `low`), in buckets of at most
   `bucket_elements`. */
ENTRY bench_ranks *bench_open(const char *nonce, int rank, int world, int64_t elements, int64_t bucket_elements, int low)
{
    ss_error err = {0};
    bench_ranks *r = calloc(1, sizeof *r);
    int64_t n = (elements + bucket_elements - 1) / bucket_elements;
    r->n_buckets = (int)n;
    r->specs = calloc((size_t)n, sizeof *r->specs);
    size_t bytes = 0;
    for (int64_t b = 0; b < n; b++) {
        int64_t used = elements - b * bucket_elements < bucket_elements ? elements - b * bucket_elements : bucket_elements;
        int64_t multiple = (int64_t)SS_SEGMENT_ALIGN * world;
        ss_bucket_spec *s = &r->specs[b];
        *s = (ss_bucket_spec){.segment = (used + multiple - 1) / multiple * SS_SEGMENT_ALIGN,
                              .grad_dtype = SS_F32,
                              .param_dtype = low ? SS_BF16 : SS_F32,
                              .grad_offset = bytes};
        bytes += (size_t)(s->segment * world) * ss_dtype_size(s->grad_dtype);
        s->param_offset = bytes;
        bytes += (size_t)(s->segment * world) * ss_dtype_size(s->param_dtype);
    }
    ss_shm_wire *wire;
    if (ss_shm_wire_open(nonce, rank, world, 60.0, &wire, &err) != SS_OK
        || ss_shm_open(wire, ss_kernels_get(NULL), NULL, &r->t, &err) != SS_OK
        || r->t->ops->add_chunk(r->t, r->specs, r->n_buckets, bytes, &r->region, &err) != SS_OK) {
        failed("opening the transport", &err);
        bench_close(r);
        return NULL;
    }
    return r;
}

/* Waits for all ranks; returns how long. */
ENTRY double bench_barrier(bench_ranks *r)
{
    char mine = 0, all[r->t->world];
    double started = ss_now();
    TIMED(r->t->ops->exchange(r->t, &mine, 1, all, err));
    return ss_now() - started;
}

static char *plane_of(const bench_ranks *r, int bucket, ss_plane plane)
{
    const ss_bucket_spec *s = &r->specs[bucket];
    return (char *)r->region->base + (plane == SS_PLANE_GRAD ? s->grad_offset : s->param_offset);
}

/* Writes what a backward and an update would have written, so that peers find it where they would: in this rank's
   cache or in memory, never in their own. */
ENTRY void bench_rewrite(bench_ranks *r)
{
    for (int b = 0; b < r->n_buckets; b++) {
        size_t segment = (size_t)r->specs[b].segment;
        size_t own = segment * ss_dtype_size(r->specs[b].param_dtype);
        memset(plane_of(r, b, SS_PLANE_GRAD), 0, segment * (size_t)r->t->world * sizeof(float));
        memset(plane_of(r, b, SS_PLANE_PARAM) + (size_t)r->t->rank * own, 0, own);
    }
}

ENTRY double bench_reduce_scatter(bench_ranks *r)
{
    double started = ss_now();
    for (int b = 0; b < r->n_buckets; b++) {
        TIMED(r->t->ops->launch(r->t, b, 1, err));
    }
    for (int b = 0; b < r->n_buckets; b++) {
        TIMED(r->t->ops->reduce(r->t, b, err));
    }
    TIMED(r->t->ops->settle(r->t, err));
    return ss_now() - started;
}

static void adam(float *param, const float *grad, float *exp_avg, float *exp_avg_sq, double step, int64_t n)
{
    ss_adam_args args = {.param = param, .grad = grad, .grad_scale = 0.5f, .exp_avg = exp_avg, .exp_avg_sq = exp_avg_sq,
                         .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01,
                         .step = step, .decoupled = 1};
    ss_kernels_get(NULL)->adam(&args, n);
}

static int make_state(bench_ranks *r)
{
    int64_t all = 0;
    for (int b = 0; b < r->n_buckets; b++) {
        all += r->specs[b].segment;
    }
    r->exp_avg = calloc((size_t)all, sizeof(float));
    r->exp_avg_sq = calloc((size_t)all, sizeof(float));
    return r->exp_avg != NULL && r->exp_avg_sq != NULL;
}

/* A step without its backward: reduce-scatter, AdamW on each rank's FP32 segments, all-gather. */
ENTRY double bench_step(bench_ranks *r)
{
    if (r->exp_avg == NULL && !make_state(r)) {
        return -1.0;
    }
    double started = ss_now();
    int64_t at = 0;
    if (bench_reduce_scatter(r) < 0) {
        return -1.0;
    }
    r->step += 1;
    for (int b = 0; b < r->n_buckets; b++) {
        int64_t segment = r->specs[b].segment, first = segment * r->t->rank;
        adam((float *)(void *)plane_of(r, b, SS_PLANE_PARAM) + first, (float *)(void *)plane_of(r, b, SS_PLANE_GRAD) + first,
             r->exp_avg + at, r->exp_avg_sq + at, r->step, segment);
        at += segment;
        TIMED(r->t->ops->publish(r->t, SS_PLANE_PARAM, b, err));
    }
    for (int b = 0; b < r->n_buckets; b++) {
        TIMED(r->t->ops->collect(r->t, SS_PLANE_PARAM, b, err));
    }
    TIMED(r->t->ops->release(r->t, SS_PLANE_PARAM, err));
    return ss_now() - started;
}

ENTRY double bench_all_gather(bench_ranks *r)
{
    double started = ss_now();
    for (int b = 0; b < r->n_buckets; b++) {
        TIMED(r->t->ops->publish(r->t, SS_PLANE_PARAM, b, err));
    }
    for (int b = 0; b < r->n_buckets; b++) {
        TIMED(r->t->ops->collect(r->t, SS_PLANE_PARAM, b, err));
    }
    TIMED(r->t->ops->release(r->t, SS_PLANE_PARAM, err));
    return ss_now() - started;
}

/* -- one rank's kernels and the layout -- */

ENTRY double bench_adam(float *param, const float *grad, float *exp_avg, float *exp_avg_sq, double step, int64_t n)
{
    double started = ss_now();
    adam(param, grad, exp_avg, exp_avg_sq, step, n);
    return ss_now() - started;
}

/* Lays out FP32 parameters of these sizes. *laid becomes the elements of all buckets, padding included. */
ENTRY double bench_layout(int world, int32_t n_params, const int64_t *numel, int64_t bucket_bytes, int64_t *laid,
                          int64_t *buckets)
{
    ss_param_spec *specs = calloc((size_t)n_params, sizeof *specs);
    int32_t *params = calloc((size_t)n_params, sizeof *params);
    for (int32_t i = 0; i < n_params; i++) {
        specs[i] = (ss_param_spec){numel[i], SS_F32, SS_F32};
        params[i] = i;
    }
    ss_layout layout;
    double started = ss_now();
    TIMED(ss_layout_init(&layout, world, n_params, err));
    TIMED(ss_layout_add(&layout, specs, params, NULL, n_params, bucket_bytes, err));
    double seconds = ss_now() - started;
    *laid = 0;
    for (int32_t b = 0; b < layout.n_buckets; b++) {
        *laid += layout.buckets[b].segment * world;
    }
    *buckets = layout.n_buckets;
    ss_layout_free(&layout);
    free(specs);
    free(params);
    return seconds;
}

/* -- what the machine can do -- */

/* dst[i] += the other sources, `n_sources` - 1 of them, each `n` long, one after the other in `sources`. */
ENTRY double bench_stream_sum(float *restrict dst, const float *restrict sources, int n_sources, int64_t n)
{
    const float *a = sources, *b = sources + n, *c = sources + 2 * n;
    double started = ss_now();
    switch (n_sources) {
    case 1:
        break;
    case 2:
        for (int64_t i = 0; i < n; i++) {
            dst[i] += a[i];
        }
        break;
    case 3:
        for (int64_t i = 0; i < n; i++) {
            dst[i] += a[i] + b[i];
        }
        break;
    default: /* more than four read the fourth again and again */
        for (int64_t i = 0; i < n; i++) {
            dst[i] += a[i] + b[i] + c[i];
        }
        for (int k = 4; k < n_sources; k++) {
            for (int64_t i = 0; i < n; i++) {
                dst[i] += c[i];
            }
        }
    }
    return ss_now() - started;
}

ENTRY double bench_stream_copy(char *restrict dst, const char *restrict src, int64_t bytes)
{
    double started = ss_now();
    memcpy(dst, src, (size_t)bytes);
    return ss_now() - started;
}

/* The 28 bytes per element of AdamW, with next to no arithmetic. */
ENTRY double bench_stream_update(float *restrict param, const float *restrict grad, float *restrict exp_avg,
                                 float *restrict exp_avg_sq, int64_t n)
{
    double started = ss_now();
    for (int64_t i = 0; i < n; i++) {
        exp_avg[i] += grad[i];
        exp_avg_sq[i] += grad[i];
        param[i] -= exp_avg[i];
    }
    return ss_now() - started;
}
