/*
 * Every kernel as a plain loop over the rules in numeric.h. Included once per instruction set by kernels_portable.c,
 * kernels_avx2.c and kernels_avx512.c, which name the table (SS_KERNELS_TABLE, SS_KERNELS_ISA) and, before anything
 * is included, select the target; the compiler vectorises the loops. Vectorising changes no bits: every element is
 * its own chain of correctly rounded operations, and no loop reduces across elements except sumsq, whose lanes are
 * fixed.
 */
#include "kernels/numeric.h"

#ifdef __SSE2__
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__NO_MATH_ERRNO__)
#error "compile the kernels with -fno-math-errno: the update loops do not vectorise otherwise (flags: dispatch.c)"
#endif

/* Iterations are independent even where a destination is one of the sources: element i only ever meets element i. */
#ifdef __clang__
#define SS_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define SS_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SS_INDEPENDENT _Pragma("GCC ivdep")
#define SS_UNROLL _Pragma("GCC unroll 16")
#endif

#define SS_INLINE static inline __attribute__((always_inline))

/*
 * Elements per block where an update makes several passes (low-precision weights): small, so that the processor
 * overlaps the end of one pass with the beginning of the next.
 */
#define SS_BLOCK 256

static inline int64_t block_length(int64_t start, int64_t n) { return n - start < SS_BLOCK ? n - start : SS_BLOCK; }

/* ---- Reductions ---- */

/*
 * The widest vectors of this target, for the two kinds of loop whose accumulators must stay in registers.
 * may_alias and the alignment of one element: they are read from ordinary arrays.
 */
#if defined(__AVX512F__)
#define SS_VECTOR_BYTES 64
#elif defined(__AVX__)
#define SS_VECTOR_BYTES 32
#else
#define SS_VECTOR_BYTES 16
#endif
#define SS_VECTOR(TYPE, BYTES) __attribute__((vector_size(BYTES), aligned(sizeof(TYPE)), may_alias))
typedef float vf32 SS_VECTOR(float, SS_VECTOR_BYTES);
typedef double vf64 SS_VECTOR(double, SS_VECTOR_BYTES);

#define SS_WIDTH(VECTOR) ((int64_t)(sizeof(VECTOR) / sizeof(((VECTOR){0})[0])))

SS_INLINE vf64 load_f64(const double *x) { return *(const vf64 *)x; }

/* The next SS_WIDTH(vf64) floats, widened. __builtin_convertvector would do, at half the speed with gcc 12. */
SS_INLINE vf64 load_f32_as_f64(const float *x)
{
#if defined(__AVX512F__)
    return _mm512_cvtps_pd(_mm256_loadu_ps(x));
#elif defined(__AVX__)
    return _mm256_cvtps_pd(_mm_loadu_ps(x));
#else
    return (vf64){x[0], x[1]};
#endif
}

/*
 * Two sources, the common case, have a loop of their own; more are summed vector by vector across the sources. Every
 * source is read before the destination, which may be any of them, is written.
 */
#define SS_DEFINE_REDUCE(NAME, TYPE, VECTOR)                                         \
    static void NAME(TYPE *dst, const TYPE *const *src, int n_src, int64_t n)        \
    {                                                                                \
        const TYPE *a = src[0];                                                      \
        if (n_src == 1) {                                                            \
            if (dst != a) {                                                          \
                memcpy(dst, a, (size_t)n * sizeof(TYPE));                            \
            }                                                                        \
            return;                                                                  \
        }                                                                            \
        const TYPE *b = src[1];                                                      \
        if (n_src == 2) {                                                            \
            SS_INDEPENDENT                                                           \
            for (int64_t i = 0; i < n; i++) {                                        \
                dst[i] = a[i] + b[i];                                                \
            }                                                                        \
            return;                                                                  \
        }                                                                            \
        const int64_t width = SS_WIDTH(VECTOR);                                      \
        int64_t i = 0;                                                               \
        for (; i + 2 * width <= n; i += 2 * width) {                                 \
            VECTOR sum0 = *(const VECTOR *)(a + i);                                  \
            VECTOR sum1 = *(const VECTOR *)(a + i + width);                          \
            for (int s = 1; s < n_src; s++) {                                        \
                sum0 += *(const VECTOR *)(src[s] + i);                               \
                sum1 += *(const VECTOR *)(src[s] + i + width);                       \
            }                                                                        \
            *(VECTOR *)(dst + i) = sum0;                                             \
            *(VECTOR *)(dst + i + width) = sum1;                                     \
        }                                                                            \
        for (; i < n; i++) {                                                         \
            TYPE sum = a[i];                                                         \
            for (int s = 1; s < n_src; s++) {                                        \
                sum += src[s][i];                                                    \
            }                                                                        \
            dst[i] = sum;                                                            \
        }                                                                            \
    }

SS_DEFINE_REDUCE(reduce_f32, float, vf32)
SS_DEFINE_REDUCE(reduce_f64, double, vf64)

/* ---- Copies ---- */

#define SS_COPY_THROUGH_MIN 4096 /* bytes; shorter copies stay in the cache anyway */
#define SS_COPY_AHEAD 1024       /* bytes to prefetch ahead */

#ifdef __SSE2__
SS_INLINE void store_through(char *to, const char *from)
{
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)to, _mm512_loadu_si512(from));
#elif defined(__AVX__)
    _mm256_stream_si256((void *)to, _mm256_loadu_si256((const void *)from));
#else
    _mm_stream_si128((void *)to, _mm_loadu_si128((const void *)from));
#endif
}
#endif

static void copy_through(void *dst, const void *src, int64_t bytes)
{
    char *to = dst;
    const char *from = src;
#ifdef __SSE2__
    if (bytes >= SS_COPY_THROUGH_MIN) {
        int64_t head = (int64_t)(-(uintptr_t)to % 64);
        memcpy(to, from, (size_t)head);
        int64_t at = head;
        for (; at + 256 <= bytes; at += 256) {
            SS_UNROLL
            for (int k = 0; k < 256; k += 64) {
                __builtin_prefetch(from + at + k + SS_COPY_AHEAD);
            }
            SS_UNROLL
            for (int k = 0; k < 256; k += SS_VECTOR_BYTES) {
                store_through(to + at + k, from + at + k);
            }
        }
        _mm_sfence(); /* such stores are ordered with no others */
        to += at, from += at, bytes -= at;
    }
#endif
    memcpy(to, from, (size_t)bytes);
}

/* Elements to fetch ahead: without it a lone stream of reads stays well below the memory limit. */
#define SS_PREFETCH 512

/*
 * Sixteen independent sums by position modulo 16: wide enough to keep any vector unit busy, and the same additions in
 * the same order on all of them and for any cut of the tensor into calls. The lanes are rotated by the phase, not the
 * elements, so that loads stay as aligned as x is.
 */
#define SS_DEFINE_SUMSQ(NAME, TYPE, LOAD)                                                    \
    static void NAME(const TYPE *x, int64_t n, int64_t phase, double lanes[SS_NORM_LANES])   \
    {                                                                                        \
        double rotated[SS_NORM_LANES];                                                       \
        for (int k = 0; k < SS_NORM_LANES; k++) {                                            \
            rotated[k] = lanes[(phase + k) % SS_NORM_LANES];                                 \
        }                                                                                    \
        vf64 sum[SS_NORM_LANES / SS_WIDTH(vf64)];                                            \
        memcpy(sum, rotated, sizeof sum);                                                    \
        int64_t i = 0;                                                                       \
        for (; i + SS_NORM_LANES <= n; i += SS_NORM_LANES) {                                 \
            __builtin_prefetch(x + i + SS_PREFETCH);                                         \
            SS_UNROLL                                                                        \
            for (int64_t k = 0; k < SS_NORM_LANES / SS_WIDTH(vf64); k++) {                   \
                vf64 y = LOAD(x + i + k * SS_WIDTH(vf64));                                   \
                sum[k] += y * y;                                                             \
            }                                                                                \
        }                                                                                    \
        memcpy(rotated, sum, sizeof sum);                                                    \
        for (int k = 0; i < n; i++, k++) {                                                   \
            rotated[k] += (double)x[i] * (double)x[i];                                       \
        }                                                                                    \
        for (int k = 0; k < SS_NORM_LANES; k++) {                                            \
            lanes[(phase + k) % SS_NORM_LANES] = rotated[k];                                 \
        }                                                                                    \
    }

SS_DEFINE_SUMSQ(sumsq_f32, float, load_f32_as_f64)
SS_DEFINE_SUMSQ(sumsq_f64, double, load_f64)

/* ---- Scaling ---- */

#define SS_DEFINE_SCALE(SCALE, ADD_SCALED, TYPE)                                          \
    static void SCALE(TYPE *x, TYPE scale, int64_t n)                                     \
    {                                                                                     \
        for (int64_t i = 0; i < n; i++) {                                                 \
            x[i] *= scale;                                                                \
        }                                                                                 \
    }                                                                                     \
    static void ADD_SCALED(TYPE *dst, const TYPE *carry, TYPE scale, int64_t n)           \
    {                                                                                     \
        SS_INDEPENDENT                                                                    \
        for (int64_t i = 0; i < n; i++) {                                                 \
            dst[i] = carry[i] + dst[i] * scale;                                           \
        }                                                                                 \
    }

SS_DEFINE_SCALE(scale_f32, add_scaled_f32, float)
SS_DEFINE_SCALE(scale_f64, add_scaled_f64, double)

/* ---- Casts ---- */

#define SS_DEFINE_CAST(NAME, TO, FROM, RULE)                                                 \
    static void NAME(TO *dst, const FROM *src, int64_t n)                                    \
    {                                                                                        \
        SS_INDEPENDENT                                                                       \
        for (int64_t i = 0; i < n; i++) {                                                    \
            dst[i] = RULE(src[i]);                                                           \
        }                                                                                    \
    }

SS_DEFINE_CAST(f32_to_bf16, uint16_t, float, ss_f32_to_bf16)
SS_DEFINE_CAST(bf16_to_f32, float, uint16_t, ss_bf16_to_f32)

#ifdef __F16C__
/* The processor's conversions follow the same rules as numeric.h's, in one instruction. */
static void f32_to_f16(uint16_t *dst, const float *src, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((__m128i *)(dst + i), half);
    }
    for (; i < n; i++) {
        dst[i] = ss_f32_to_f16(src[i]);
    }
}

static void f16_to_f32(float *dst, const uint16_t *src, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + i))));
    }
    for (; i < n; i++) {
        dst[i] = ss_f16_to_f32(src[i]);
    }
}
#else
SS_DEFINE_CAST(f32_to_f16, uint16_t, float, ss_f32_to_f16)
SS_DEFINE_CAST(f16_to_f32, float, uint16_t, ss_f16_to_f32)
#endif

static void add_bf16(float *dst, const uint16_t *src, int64_t n)
{
    SS_INDEPENDENT
    for (int64_t i = 0; i < n; i++) {
        dst[i] += ss_bf16_to_f32(src[i]);
    }
}

static void add_f16(float *dst, const uint16_t *src, int64_t n)
{
    float wide[SS_BLOCK];
    for (int64_t start = 0; start < n; start += SS_BLOCK) {
        int64_t length = block_length(start, n);
        f16_to_f32(wide, src + start, length);
        for (int64_t i = 0; i < length; i++) {
            dst[start + i] += wide[i];
        }
    }
}

static void store_low(uint16_t *low, const float *master, ss_dtype dtype, int64_t n)
{
    if (dtype == SS_BF16) {
        f32_to_bf16(low, master, n);
    } else {
        f32_to_f16(low, master, n);
    }
}

/*
 * Masters of one block take over what the user wrote into the low-precision weights. Almost always that is nothing,
 * which a cast and a comparison in the cache establish.
 */
static void adopt_low(float *master, const uint16_t *low, ss_dtype dtype, int64_t n)
{
    for (int k = 0; k < SS_BLOCK; k += 16) { /* the next block's; this pass is too short for the hardware to see it */
        __builtin_prefetch(master + SS_BLOCK + k);
        if (k % 32 == 0) {
            __builtin_prefetch(low + SS_BLOCK + k);
        }
    }
    uint16_t expected[SS_BLOCK];
    store_low(expected, master, dtype, n);
    if (memcmp(expected, low, (size_t)n * sizeof *low) == 0) {
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        if (expected[i] != low[i]) {
            master[i] = dtype == SS_BF16 ? ss_bf16_to_f32(low[i]) : ss_f16_to_f32(low[i]);
        }
    }
}

/* ---- Updates ---- */

/* Inlined with constant flags, so that each combination is a loop without branches. */
SS_INLINE void adam_loop(const ss_adam_constants *constants, const ss_adam_args *args, int64_t start, int64_t end,
                         int l2, int amsgrad, int tail)
{
    const ss_adam_constants c = *constants;
    float *p = args->param, *m = args->exp_avg, *v = args->exp_avg_sq, *largest = args->max_exp_avg_sq;
    const float *g = args->grad;
    SS_INDEPENDENT
    for (int64_t i = start; i < end; i++) {
        p[i] = ss_adam_rule(&c, p[i], g[i], m + i, v + i, amsgrad ? largest + i : NULL, l2, amsgrad, tail);
    }
}

static void adam(const ss_adam_args *args, int64_t n)
{
    const ss_adam_constants c = ss_adam_prepare(args);
    const int l2 = !args->decoupled && args->weight_decay != 0.0;
    const int amsgrad = args->max_exp_avg_sq != NULL;
    const int64_t body = n - args->tail;
    for (int64_t start = 0; start < n; start += SS_BLOCK) {
        int64_t length = block_length(start, n), end = start + length;
        int64_t middle = end < body ? end : start < body ? body : start;
        if (args->low != NULL) {
            adopt_low(args->param + start, (uint16_t *)args->low + start, args->low_dtype, length);
        }
        switch (2 * l2 + amsgrad) {
        case 0: adam_loop(&c, args, start, middle, 0, 0, 0); break;
        case 1: adam_loop(&c, args, start, middle, 0, 1, 0); break;
        case 2: adam_loop(&c, args, start, middle, 1, 0, 0); break;
        case 3: adam_loop(&c, args, start, middle, 1, 1, 0); break;
        }
        adam_loop(&c, args, middle, end, l2, amsgrad, 1);
        if (args->low != NULL) {
            store_low((uint16_t *)args->low + start, args->param + start, args->low_dtype, length);
        }
    }
}

SS_INLINE void sgd_loop(const ss_sgd_constants *constants, const ss_sgd_args *args, int64_t start, int64_t end,
                        int decay, ss_momentum momentum, int nesterov)
{
    const ss_sgd_constants c = *constants;
    float *p = args->param, *buffer = args->momentum_buffer;
    const float *g = args->grad;
    SS_INDEPENDENT
    for (int64_t i = start; i < end; i++) {
        p[i] = ss_sgd_rule(&c, p[i], g[i], momentum != SS_MOMENTUM_NONE ? buffer + i : NULL, decay, momentum, nesterov);
    }
}

SS_INLINE void sgd_block(const ss_sgd_constants *c, const ss_sgd_args *args, int64_t start, int64_t end, int decay)
{
    if (args->momentum_buffer == NULL) {
        sgd_loop(c, args, start, end, decay, SS_MOMENTUM_NONE, 0);
    } else {
        switch (2 * (args->first != 0) + (args->nesterov != 0)) {
        case 0: sgd_loop(c, args, start, end, decay, SS_MOMENTUM_NEXT, 0); break;
        case 1: sgd_loop(c, args, start, end, decay, SS_MOMENTUM_NEXT, 1); break;
        case 2: sgd_loop(c, args, start, end, decay, SS_MOMENTUM_FIRST, 0); break;
        case 3: sgd_loop(c, args, start, end, decay, SS_MOMENTUM_FIRST, 1); break;
        }
    }
}

static void sgd(const ss_sgd_args *args, int64_t n)
{
    const ss_sgd_constants c = ss_sgd_prepare(args);
    for (int64_t start = 0; start < n; start += SS_BLOCK) {
        int64_t length = block_length(start, n), end = start + length;
        if (args->low != NULL) {
            adopt_low(args->param + start, (uint16_t *)args->low + start, args->low_dtype, length);
        }
        if (args->weight_decay != 0.0) {
            sgd_block(&c, args, start, end, 1);
        } else {
            sgd_block(&c, args, start, end, 0);
        }
        if (args->low != NULL) {
            store_low((uint16_t *)args->low + start, args->param + start, args->low_dtype, length);
        }
    }
}

const ss_kernels SS_KERNELS_TABLE = {
    .isa = SS_KERNELS_ISA,
    .reduce_f32 = reduce_f32,
    .reduce_f64 = reduce_f64,
    .copy_through = copy_through,
    .sumsq_f32 = sumsq_f32,
    .sumsq_f64 = sumsq_f64,
    .scale_f32 = scale_f32,
    .scale_f64 = scale_f64,
    .add_scaled_f32 = add_scaled_f32,
    .add_scaled_f64 = add_scaled_f64,
    .f32_to_bf16 = f32_to_bf16,
    .f32_to_f16 = f32_to_f16,
    .bf16_to_f32 = bf16_to_f32,
    .f16_to_f32 = f16_to_f32,
    .add_bf16 = add_bf16,
    .add_f16 = add_f16,
    .adam = adam,
    .sgd = sgd,
};
