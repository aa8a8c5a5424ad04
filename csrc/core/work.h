/*
 * Element work on the engine's memory: done when a call returns on the CPU, enqueued on the calling thread's current stream
 * where there is a device. What fails on a device is kept and comes up at the end of the engine's call (ss_work_result), as
 * the device's own failures come up late.
 */
#ifndef SHARDSTEP_CORE_WORK_H
#define SHARDSTEP_CORE_WORK_H

#include "core/engine_state.h"

/* New memory, zeroed. */
ss_code ss_work_memory(const ss_engine *e, size_t bytes, ss_region **region, ss_error *err);

void ss_work_zero(ss_engine *e, void *at, size_t bytes);
void ss_work_copy(ss_engine *e, void *to, const void *from, size_t bytes);
/* x *= factor; x = carry + x * factor. FP32 or FP64. */
void ss_work_scale(ss_engine *e, ss_dtype dtype, void *x, double factor, int64_t n);
void ss_work_add_scaled(ss_engine *e, ss_dtype dtype, void *x, const void *carry, double factor, int64_t n);
/* Between FP32 masters and parameters of a low dtype. adopt: masters whose rounded value is not the parameter are set from it. */
void ss_work_to_low(ss_engine *e, ss_dtype dtype, void *low, const float *master, int64_t n);
void ss_work_from_low(ss_engine *e, ss_dtype dtype, float *master, const void *low, int64_t n);
void ss_work_adopt(ss_engine *e, ss_dtype dtype, float *master, const void *low, int64_t n);

/* The part of a norm of any order that these elements make: a sum of squares for order 2. */
typedef struct {
    const void *x;
    const ss_param_spec *spec;
    int64_t n, in_param; /* elements; the first's index in its parameter */
    double *partial;     /* out */
} ss_work_norm;
/* On a device this is the one thing that waits for it. */
ss_code ss_work_norms(ss_engine *e, const ss_work_norm *norms, int32_t count, double order, ss_error *err);

/* On a device only: one step of the pieces of `update`, which needs no workspace. */
ss_code ss_work_update(ss_engine *e, ss_rule rule, const ss_cuda_update *update, ss_error *err);

/* Makes the current stream wait for another one, on which gradients have come. */
void ss_work_join(ss_engine *e, ss_stream other);

/* What a function of the device's kernels has answered. */
ss_code ss_work_check(const ss_engine *e, int result, const char *what, ss_error *err);

/* What has failed since it was asked last. */
ss_code ss_work_result(ss_engine *e, ss_error *err);

#endif
