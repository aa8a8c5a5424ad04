/* What transports use of the kernels as plain loops, for tests of transports that should not depend on the real kernels. */
#ifndef SHARDSTEP_TESTS_PLAIN_KERNELS_H
#define SHARDSTEP_TESTS_PLAIN_KERNELS_H

#include <string.h>

#include "kernels/kernels.h"

static void plain_reduce_f32(float *dst, const float *const *src, int n_src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float sum = src[0][i];
        for (int k = 1; k < n_src; k++) {
            sum += src[k][i];
        }
        dst[i] = sum;
    }
}

static void plain_reduce_f64(double *dst, const double *const *src, int n_src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double sum = src[0][i];
        for (int k = 1; k < n_src; k++) {
            sum += src[k][i];
        }
        dst[i] = sum;
    }
}

static void plain_copy(void *dst, const void *src, int64_t bytes) { memcpy(dst, src, (size_t)bytes); }

static const ss_kernels plain_kernels = {
    .isa = "plain", .reduce_f32 = plain_reduce_f32, .reduce_f64 = plain_reduce_f64, .copy_through = plain_copy};

#endif
