/*
 * The CUDA kernels of shardstep, as a C library: python/shardstep/_cuda.so, built by nvcc, loaded by csrc/cuda/load.c where
 * there is a GPU.
 *
 * Every function only enqueues work on `stream`, a cudaStream_t of the current device: none waits for the device, copies
 * from host memory that the caller must keep, or allocates. Tables are host memory and may be freed when a call returns;
 * every pointer in them is device memory. Work goes into one launch for each SS_CUDA_PIECES_PER_LAUNCH entries of a table, so
 * everything may be captured into a CUDA graph. Pointers need the alignment of their element type; where those of one entry
 * allow it, accesses are 16 bytes wide.
 *
 * Functions return 0, a cudaError_t, or one of ss_cuda_error; ss_cuda_message() has the words.
 */
#ifndef SHARDSTEP_CUDA_H
#define SHARDSTEP_CUDA_H

#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised with every change of a signature, of a struct or of what a function does. */
#define SS_CUDA_ABI_VERSION 1

#define SS_CUDA_PIECES_PER_LAUNCH 256

#define SS_CUDA_EXPORT __attribute__((visibility("default")))

typedef enum {
    SS_CUDA_OK = 0, /* and a cudaError_t from 1 on */
    SS_CUDA_ERR_SIZE = 100001, /* a struct is not of the size that this library knows */
    SS_CUDA_ERR_DTYPE,         /* no kernel for these element types */
    SS_CUDA_ERR_WORKSPACE,     /* too little of it */
    SS_CUDA_ERR_ARGUMENT       /* a NULL pointer that is needed, or a length below 0 */
} ss_cuda_error;

/* SS_CUDA_ABI_VERSION of the library. */
SS_CUDA_EXPORT int ss_cuda_abi_version(void);

/*
 * CUDA versions as CUDA numbers them (13.0 is 13000): `runtime` is what the library is built with, `driver` the newest that the
 * installed driver knows, 0 where there is no driver. Needs no GPU.
 */
SS_CUDA_EXPORT int ss_cuda_versions(int *runtime, int *driver);

/* What went wrong, for a user; never NULL, never freed. */
SS_CUDA_EXPORT const char *ss_cuda_message(int code);

/* ---- Updates ---- */

/* One piece of the flat shard, that is of one parameter. The rule, its operation order and its source: kernels/numeric.h. */
typedef struct {
    int64_t n;           /* elements; 0 where this rank owns none of the parameter: only its step count advances */
    float *param;        /* FP32 master weights, updated in place */
    void *low;           /* low-precision weights, written, or NULL when the master is the parameter itself. An element whose
                          * bits differ from the rounded master was written by the user: its master is first set from it */
    const void *grad;    /* FP32 or bfloat16, in sum units */
    float *state[3];     /* Adam: exp_avg, exp_avg_sq, and max_exp_avg_sq or NULL; SGD: momentum buffer or NULL */
    float *step;         /* updates made so far; advanced, but not by a skipped step. SGD without momentum: NULL */
    double grad_scale;   /* factor of this piece's gradient, beside those in device memory */
    ss_dtype low_dtype;  /* SS_BF16 or SS_F16, when low is not NULL */
    ss_dtype grad_dtype; /* SS_F32 or SS_BF16 */
    int32_t tail;        /* ss_adam_tail() of the piece; 0 makes the rule the same everywhere */
    int32_t options;     /* index into ss_cuda_update.options */
} ss_cuda_piece;

typedef struct {
    double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
    int decoupled; /* Adam: 1 for AdamW */
    int nesterov, maximize;
} ss_cuda_options;

/*
 * A step. A gradient counts as fp32(grad_scale * *scale * *clip) times what is in memory; each factor may be NULL, for 1.
 * With *skip not 0 nothing is written, step counts neither.
 */
typedef struct {
    size_t size; /* sizeof(ss_cuda_update) */
    int32_t n_pieces, n_options;
    const ss_cuda_piece *pieces;
    const ss_cuda_options *options;
    const double *scale, *clip; /* in device memory */
    const int32_t *skip;        /* in device memory; NULL: never */
    void *workspace;            /* device memory, SS_CUDA_UPDATE_WORKSPACE bytes for each piece, 16-byte aligned */
    size_t workspace_bytes;
} ss_cuda_update;

#define SS_CUDA_UPDATE_WORKSPACE 64

SS_CUDA_EXPORT int ss_cuda_adam(const ss_cuda_update *update, void *stream);
SS_CUDA_EXPORT int ss_cuda_sgd(const ss_cuda_update *update, void *stream);

/* ---- Norms, clipping, skipping ---- */

typedef struct {
    const void *x;
    int64_t n;
    int64_t in_param; /* index of x[0] in its parameter */
    double scale;     /* the gradient is this times x */
} ss_cuda_norm_range;

/*
 * sums[k] = scale^2 * sum of x[i]^2 over range k, not finite when any element is not. FP64 partial sums in 16 lanes by index in
 * the parameter modulo 16, in a fixed order: the same bits in every run, and wherever a parameter is cut the same up to the
 * rounding of FP64. `workspace` is device memory of ss_cuda_norm_workspace() bytes, 16-byte aligned.
 */
typedef struct {
    size_t size; /* sizeof(ss_cuda_norms_args) */
    int32_t count;
    ss_dtype dtype; /* of all ranges */
    const ss_cuda_norm_range *ranges;
    double *sums; /* [count], device memory */
    void *workspace;
    size_t workspace_bytes;
} ss_cuda_norms_args;

SS_CUDA_EXPORT size_t ss_cuda_norm_workspace(const ss_cuda_norm_range *ranges, int32_t count);
SS_CUDA_EXPORT int ss_cuda_norms(const ss_cuda_norms_args *args, void *stream);

/*
 * norm = |*scale| * sqrt(sum of sums[k]) and coefficient = min(1, max_norm / (norm + 1e-6)), as torch's clip_grad_norm_: NaN for
 * a NaN, 0 for an infinite norm; but 1 for both where `only_finite`, because such a step is going to be skipped.
 */
typedef struct {
    size_t size; /* sizeof(ss_cuda_clip_args) */
    int32_t count;
    int only_finite;
    double max_norm;
    const double *sums;         /* [count], device memory */
    const double *scale;        /* device memory; NULL: 1 */
    double *norm, *coefficient; /* out, device memory */
} ss_cuda_clip_args;

SS_CUDA_EXPORT int ss_cuda_clip(const ss_cuda_clip_args *args, void *stream);

/* *skip = 1 when the norm is not finite, or *found_inf (torch.amp's, may be NULL) is not 0; else 0. All in device memory. */
SS_CUDA_EXPORT int ss_cuda_skip(const double *norm, const float *found_inf, int32_t *skip, void *stream);

/* ---- Elements ---- */

typedef struct {
    void *dst;
    const void *src; /* where the operation has one; may be dst itself, but not overlap it otherwise */
    int64_t n;
    double factor; /* where the operation has one */
} ss_cuda_range;

/* dst[i] = 0 */
SS_CUDA_EXPORT int ss_cuda_zero(const ss_cuda_range *ranges, int32_t count, ss_dtype dtype, void *stream);
/* dst[i] *= factor; FP32 and FP64. The factor is rounded to the type first. */
SS_CUDA_EXPORT int ss_cuda_scale(const ss_cuda_range *ranges, int32_t count, ss_dtype dtype, void *stream);
/* dst[i] = src[i] + dst[i] * factor; FP32 and FP64; product and sum are rounded each. */
SS_CUDA_EXPORT int ss_cuda_add_scaled(const ss_cuda_range *ranges, int32_t count, ss_dtype dtype, void *stream);
/* dst[i] += src[i]; dst is FP64 for an FP64 source and FP32 otherwise. */
SS_CUDA_EXPORT int ss_cuda_add(const ss_cuda_range *ranges, int32_t count, ss_dtype src_dtype, void *stream);
/* dst[i] = src[i], to and from FP32, round to nearest even with kernels/numeric.h's NaNs; equal types: a copy of the bits. */
SS_CUDA_EXPORT int ss_cuda_cast(const ss_cuda_range *ranges, int32_t count, ss_dtype dst_dtype, ss_dtype src_dtype,
                                void *stream);
/* dst: FP32 masters, src: bfloat16 or float16 weights. A master whose rounded value has not the weight's bits is set from it. */
SS_CUDA_EXPORT int ss_cuda_adopt(const ss_cuda_range *ranges, int32_t count, ss_dtype src_dtype, void *stream);

/* All of the above, for loaders: X(name) for ss_cuda_<name>. */
#define SS_CUDA_FUNCTIONS(X)                                                                                               \
    X(abi_version) X(versions) X(message) X(adam) X(sgd) X(norm_workspace) X(norms) X(clip) X(skip) X(zero) X(scale)     \
    X(add_scaled) X(add) X(cast) X(adopt)

#ifdef __cplusplus
}
#endif
#endif
