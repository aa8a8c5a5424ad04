/*
 * CPU kernels, compiled once per instruction set and picked at run time.
 *
 * All lengths are element counts. Pointers need only the alignment of their element type. Unless said otherwise the
 * arguments must not overlap, except that a destination may be exactly one of the sources. Every variant computes the
 * same bits as the portable one.
 */
#ifndef SHARDSTEP_KERNELS_H
#define SHARDSTEP_KERNELS_H

#include <stdint.h>

#include "core/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SS_NORM_LANES 16

/* One fused Adam or AdamW step over n elements. The rule, its operation order and its source: numeric.h. */
typedef struct {
    float *param;        /* FP32 master weights, updated in place */
    void *low;           /* low-precision copy of the weights, or NULL when the master is the parameter itself */
    ss_dtype low_dtype;  /* SS_BF16 or SS_F16, when low is not NULL */
    const float *grad;   /* gradient in sum units; the effective gradient is fp32(grad * grad_scale) */
    float grad_scale;
    float *exp_avg, *exp_avg_sq;
    float *max_exp_avg_sq; /* NULL unless amsgrad */
    double lr, beta1, beta2, eps, weight_decay;
    double step;           /* 1 at the first update */
    int decoupled;         /* 1: AdamW, 0: Adam with L2 regularisation */
    int maximize;
    int64_t tail;          /* how many of the elements, the last ones, are rounded as torch rounds a parameter's tail:
                            * ss_adam_tail() for a piece of one parameter; 0 makes the rule the same everywhere */
} ss_adam_args;

/*
 * How many of the elements [offset, offset + n) of a parameter with `numel` elements lie in its tail. torch's fused
 * CPU Adam rounds exp_avg_sq of a parameter's last numel % 8 elements in another order (with AVX2 and AVX-512
 * alike), so equal bits for every length, however the parameter is cut into pieces, need to know where it ends.
 */
static inline int64_t ss_adam_tail(int64_t numel, int64_t offset, int64_t n)
{
    int64_t inside = offset + n - (numel - numel % 8);
    return inside <= 0 ? 0 : inside < n ? inside : n;
}

/* One fused SGD step over n elements, torch.optim.SGD's rule. */
typedef struct {
    float *param;
    void *low;
    ss_dtype low_dtype;
    const float *grad;
    float grad_scale;
    float *momentum_buffer; /* NULL when momentum == 0 */
    double lr, momentum, dampening, weight_decay;
    int nesterov, maximize;
    int first;              /* 1: the buffer is not initialised yet and becomes the gradient */
} ss_sgd_args;

typedef struct {
    const char *isa; /* "portable", "avx2" or "avx512" */

    /* dst[i] = ((src[0][i] + src[1][i]) + src[2][i]) + ..., in order; n_src >= 1; dst may be one of the sources. */
    void (*reduce_f32)(float *dst, const float *const *src, int n_src, int64_t n);
    void (*reduce_f64)(double *dst, const double *const *src, int n_src, int64_t n);

    /* lanes[(phase + i) % 16] += (double)x[i] * x[i], elements in order; not finite when any x[i] is not finite. */
    void (*sumsq_f32)(const float *x, int64_t n, int64_t phase, double lanes[SS_NORM_LANES]);
    void (*sumsq_f64)(const double *x, int64_t n, int64_t phase, double lanes[SS_NORM_LANES]);

    /* memcpy past the cache, for a destination that this core does not read again soon: stores that fill whole lines do
       not fetch them first, and do not push out what is still needed. Visible to other processes when it returns. */
    void (*copy_through)(void *dst, const void *src, int64_t bytes);

    /* x[i] *= scale */
    void (*scale_f32)(float *x, float scale, int64_t n);
    void (*scale_f64)(double *x, double scale, int64_t n);

    /* dst[i] = carry[i] + fp(dst[i] * scale): adds a new reduction to a gradient kept from before. */
    void (*add_scaled_f32)(float *dst, const float *carry, float scale, int64_t n);
    void (*add_scaled_f64)(double *dst, const double *carry, double scale, int64_t n);

    /* Casts, round to nearest even; NaN stays NaN (torch's bit patterns), overflow goes to infinity. */
    void (*f32_to_bf16)(uint16_t *dst, const float *src, int64_t n);
    void (*f32_to_f16)(uint16_t *dst, const float *src, int64_t n);
    void (*bf16_to_f32)(float *dst, const uint16_t *src, int64_t n);
    void (*f16_to_f32)(float *dst, const uint16_t *src, int64_t n);

    /* dst[i] += fp32(src[i]) */
    void (*add_bf16)(float *dst, const uint16_t *src, int64_t n);
    void (*add_f16)(float *dst, const uint16_t *src, int64_t n);

    /*
     * Fused updates: scale, update, and cast to `low` in one pass over memory. When `low` is given, an element whose
     * low-precision bits differ from its rounded master was written by the user; its master is first set from it.
     */
    void (*adam)(const ss_adam_args *args, int64_t n);
    void (*sgd)(const ss_sgd_args *args, int64_t n);
} ss_kernels;

/* The best variant for this processor; `isa` NULL, or a name to force one. NULL when that one cannot run here. */
const ss_kernels *ss_kernels_get(const char *isa);

#ifdef __cplusplus
}
#endif
#endif
