/* See work.h. */
#include "core/work.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void keep(ss_engine *e, const ss_error *error)
{
    if (e->work_failed.code == SS_OK) {
        e->work_failed = *error;
    }
}

ss_code ss_work_result(ss_engine *e, ss_error *err)
{
    ss_code code = e->work_failed.code;
    if (code != SS_OK && err != NULL) {
        *err = e->work_failed;
    }
    e->work_failed.code = SS_OK;
    return code;
}

ss_code ss_work_check(const ss_engine *e, int result, const char *what, ss_error *err)
{
    return result == 0 ? SS_OK : ss_fail(err, SS_ERR_TRANSPORT, "%s on the device failed: %s", what,
                                         e->device->kernels->message(result));
}

/* On a device: runs `call`, a function of its kernels that takes `stream` last, and keeps a failure. */
#define ON_DEVICE(e, what, call)                                                           \
    do {                                                                                   \
        ss_error error_ = {0};                                                             \
        ss_stream current_;                                                                \
        if ((e)->device->ops->current((e)->device, &current_, &error_) == SS_OK) {         \
            void *stream = current_.native;                                                \
            ss_work_check(e, (e)->device->kernels->call, what, &error_);                   \
        }                                                                                  \
        if (error_.code != SS_OK) {                                                        \
            keep(e, &error_);                                                              \
        }                                                                                  \
    } while (0)

/* Memory ----------------------------------------------------------------------------------------------------------- */

static size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

static void free_heap(ss_region *region)
{
    free(region->base);
    free(region);
}

static ss_code heap_memory(size_t bytes, ss_region **made, ss_error *err)
{
    ss_region *region = malloc(sizeof *region);
    void *base = aligned_alloc(256, round_up(bytes, 256));
    if (region == NULL || base == NULL) {
        free(region);
        free(base);
        return ss_fail(err, SS_ERR_NO_MEMORY, "no memory for %zu bytes", bytes);
    }
    memset(base, 0, bytes);
    *region = (ss_region){.base = base, .bytes = bytes, .destroy = free_heap};
    atomic_init(&region->references, 1);
    *made = region;
    return SS_OK;
}

ss_code ss_work_memory(const ss_engine *e, size_t bytes, ss_region **region, ss_error *err)
{
    if (e->device == NULL) {
        return heap_memory(bytes, region, err);
    }
    SS_TRY(e->device->ops->allocate(e->device, bytes, region, err));
    ss_code code = e->device->ops->zero(e->device, (*region)->base, bytes, err);
    if (code != SS_OK) {
        ss_region_release(*region);
        *region = NULL;
    }
    return code;
}

void ss_work_zero(ss_engine *e, void *at, size_t bytes)
{
    if (e->device == NULL) {
        memset(at, 0, bytes);
        return;
    }
    ss_error error = {0};
    if (bytes > 0 && e->device->ops->zero(e->device, at, bytes, &error) != SS_OK) {
        keep(e, &error);
    }
}

void ss_work_copy(ss_engine *e, void *to, const void *from, size_t bytes)
{
    if (e->device == NULL) {
        memcpy(to, from, bytes);
        return;
    }
    ss_cuda_range range = {.dst = to, .src = from, .n = (int64_t)(bytes / sizeof(float))}; /* gradients: FP32 or FP64 */
    ON_DEVICE(e, "a copy", cast(&range, 1, SS_F32, SS_F32, stream));
}

/* Elements --------------------------------------------------------------------------------------------------------- */

void ss_work_scale(ss_engine *e, ss_dtype dtype, void *x, double factor, int64_t n)
{
    if (e->device != NULL) {
        ss_cuda_range range = {.dst = x, .n = n, .factor = factor};
        ON_DEVICE(e, "scaling", scale(&range, 1, dtype, stream));
    } else if (dtype == SS_F64) {
        e->kernels->scale_f64(x, factor, n);
    } else {
        e->kernels->scale_f32(x, (float)factor, n);
    }
}

void ss_work_add_scaled(ss_engine *e, ss_dtype dtype, void *x, const void *carry, double factor, int64_t n)
{
    if (e->device != NULL) {
        ss_cuda_range range = {.dst = x, .src = carry, .n = n, .factor = factor};
        ON_DEVICE(e, "adding", add_scaled(&range, 1, dtype, stream));
    } else if (dtype == SS_F64) {
        e->kernels->add_scaled_f64(x, carry, factor, n);
    } else {
        e->kernels->add_scaled_f32(x, carry, (float)factor, n);
    }
}

void ss_work_to_low(ss_engine *e, ss_dtype dtype, void *low, const float *master, int64_t n)
{
    if (e->device != NULL) {
        ss_cuda_range range = {.dst = low, .src = master, .n = n};
        ON_DEVICE(e, "rounding weights", cast(&range, 1, dtype, SS_F32, stream));
    } else if (dtype == SS_BF16) {
        e->kernels->f32_to_bf16(low, master, n);
    } else {
        e->kernels->f32_to_f16(low, master, n);
    }
}

void ss_work_from_low(ss_engine *e, ss_dtype dtype, float *master, const void *low, int64_t n)
{
    if (e->device != NULL) {
        ss_cuda_range range = {.dst = master, .src = low, .n = n};
        ON_DEVICE(e, "widening weights", cast(&range, 1, SS_F32, dtype, stream));
    } else if (dtype == SS_BF16) {
        e->kernels->bf16_to_f32(master, low, n);
    } else {
        e->kernels->f16_to_f32(master, low, n);
    }
}

enum { BLOCK = 1024 };

void ss_work_adopt(ss_engine *e, ss_dtype dtype, float *master, const void *low, int64_t n)
{
    if (e->device != NULL) {
        ss_cuda_range range = {.dst = master, .src = low, .n = n};
        ON_DEVICE(e, "adopting weights", adopt(&range, 1, dtype, stream));
        return;
    }
    const uint16_t *truth = low;
    uint16_t rounded[BLOCK];
    for (int64_t at = 0; at < n; at += BLOCK) {
        int64_t count = n - at < BLOCK ? n - at : BLOCK;
        ss_work_to_low(e, dtype, rounded, master + at, count);
        if (memcmp(rounded, truth + at, (size_t)count * sizeof *truth) == 0) {
            continue;
        }
        for (int64_t k = 0; k < count; k++) {
            if (rounded[k] != truth[at + k]) {
                ss_work_from_low(e, dtype, master + at + k, truth + at + k, 1);
            }
        }
    }
}

/* Norms ------------------------------------------------------------------------------------------------------------ */

/* A piece begins and ends between pairs: parameters and segments begin at even elements. */
static double host_norm(const ss_work_norm *w, double order)
{
    double sum = order == -INFINITY ? INFINITY : 0.0;
    bool f64 = w->spec->grad_dtype == SS_F64;
    for (int64_t k = 0; k < w->n; k++) {
        double x = fabs(f64 ? ((const double *)w->x)[k] : (double)((const float *)w->x)[k]);
        if (w->spec->pairs) {
            k++;
            x = hypot(x, f64 ? ((const double *)w->x)[k] : (double)((const float *)w->x)[k]);
        }
        if (isinf(order)) {
            sum = isnan(x) || isnan(sum) ? NAN : order > 0 ? fmax(sum, x) : fmin(sum, x);
        } else if (order == 0.0) {
            sum += x != 0.0;
        } else if (order == 1.0) {
            sum += x;
        } else {
            sum += pow(x, order);
        }
    }
    return sum;
}

static double host_squares(const ss_engine *e, const ss_work_norm *w)
{
    double lanes[SS_NORM_LANES] = {0};
    if (w->spec->grad_dtype == SS_F64) {
        e->kernels->sumsq_f64(w->x, w->n, w->in_param, lanes);
    } else {
        e->kernels->sumsq_f32(w->x, w->n, w->in_param, lanes);
    }
    return ss_norms_sum_lanes(lanes);
}

/* Sums of squares of those whose gradients are of one dtype. */
static ss_code device_squares(ss_engine *e, const ss_work_norm *norms, int32_t count, ss_dtype dtype, ss_error *err)
{
    const ss_cuda *kernels = e->device->kernels;
    ss_region *memory = NULL;
    ss_cuda_norm_range *ranges = calloc((size_t)count + 1, sizeof *ranges);
    double *sums = calloc((size_t)count + 1, sizeof *sums);
    ss_stream current;
    ss_code code = SS_OK;
    int32_t n = 0;
    if (ranges == NULL || sums == NULL) {
        code = ss_fail(err, SS_ERR_NO_MEMORY, "no memory for the norms of %d gradients", count);
        goto out;
    }
    for (int32_t k = 0; k < count; k++) {
        if (norms[k].spec->grad_dtype == dtype) {
            ranges[n++] = (ss_cuda_norm_range){.x = norms[k].x, .n = norms[k].n, .in_param = norms[k].in_param, .scale = 1.0};
        }
    }
    if (n == 0) {
        goto out;
    }
    size_t workspace = kernels->norm_workspace(ranges, n), at = round_up((size_t)n * sizeof(double), 256);
    SS_TRY_GOTO(code, ss_work_memory(e, at + workspace, &memory, err), out);
    SS_TRY_GOTO(code, e->device->ops->current(e->device, &current, err), out);
    ss_cuda_norms_args args = {.size = sizeof args,
                               .count = n,
                               .dtype = dtype,
                               .ranges = ranges,
                               .sums = memory->base,
                               .workspace = (char *)memory->base + at,
                               .workspace_bytes = workspace};
    SS_TRY_GOTO(code, ss_work_check(e, kernels->norms(&args, current.native), "norms", err), out);
    SS_TRY_GOTO(code, e->device->ops->read(e->device, sums, memory->base, (size_t)n * sizeof *sums, err), out);
    for (int32_t k = 0, from = 0; k < count; k++) {
        if (norms[k].spec->grad_dtype == dtype) {
            *norms[k].partial = sums[from++];
        }
    }
out:
    ss_region_release(memory);
    free(ranges);
    free(sums);
    return code;
}

ss_code ss_work_norms(ss_engine *e, const ss_work_norm *norms, int32_t count, double order, ss_error *err)
{
    if (e->device != NULL && order == 2.0) {
        SS_TRY(device_squares(e, norms, count, SS_F32, err));
        return device_squares(e, norms, count, SS_F64, err);
    }
    for (int32_t k = 0; k < count; k++) {
        const ss_work_norm *w = &norms[k];
        if (e->device != NULL) {
            SS_TRY(e->framework.partial_norm(e->framework.ctx, w->x, w->spec, w->n, order, w->partial, err));
        } else {
            *w->partial = order == 2.0 ? host_squares(e, w) : host_norm(w, order);
        }
    }
    return SS_OK;
}

/* The update ------------------------------------------------------------------------------------------------------- */

ss_code ss_work_update(ss_engine *e, ss_rule rule, const ss_cuda_update *update, ss_error *err)
{
    size_t bytes = (size_t)update->n_pieces * SS_CUDA_UPDATE_WORKSPACE;
    ss_cuda_update whole = *update;
    ss_stream current;
    if (e->workspace == NULL || e->workspace->bytes < bytes) {
        ss_region_release(e->workspace);
        e->workspace = NULL;
        SS_TRY(ss_work_memory(e, bytes, &e->workspace, err));
    }
    whole.workspace = e->workspace->base;
    whole.workspace_bytes = e->workspace->bytes;
    SS_TRY(e->device->ops->current(e->device, &current, err));
    const ss_cuda *kernels = e->device->kernels;
    return ss_work_check(e, (rule == SS_RULE_ADAM ? kernels->adam : kernels->sgd)(&whole, current.native), "the update", err);
}

/* Streams ---------------------------------------------------------------------------------------------------------- */

void ss_work_join(ss_engine *e, ss_stream other)
{
    const ss_device_ops *ops = e->device->ops;
    ss_error error = {0};
    ss_stream current;
    if (ops->current(e->device, &current, &error) == SS_OK && current.id != other.id &&
        ops->record(e->device, e->joined, other, &error) == SS_OK) {
        ops->wait(e->device, e->joined, current, &error);
    }
    if (error.code != SS_OK) {
        keep(e, &error);
    }
}
