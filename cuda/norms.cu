/*
 * L2 norms of many ranges, and what follows from them without the host: the clip coefficient and the skip flag.
 *
 * A sum of squares is taken in 16 lanes by index in the parameter modulo 16, as on the CPU. A pack is half of the lanes, the
 * same half for one thread throughout. A chunk begins at a multiple of SS_CHUNK in the parameter and not where the range does,
 * so that its lanes are the same wherever a parameter is cut, but for the chunk that the cut goes through. The squares of FP32,
 * bfloat16 and float16 are exact in FP64.
 */
#include "chunks.h"

#define LANES SS_NORM_LANES

struct norm_entry {
    ss_span span;
    const void *x;
    double scale;
};

struct norm_table : ss_table<norm_entry> {
    double *partials; /* [chunks][LANES] */
    double *sums;     /* [ranges] */
};

static SS_ON_DEVICE double square_plus(float x, double sum) { return fma((double)x, (double)x, sum); }
static SS_ON_DEVICE double square_plus(double x, double sum) { return sum + x * x; } /* rounded twice, as on the CPU */

/* Adds what 256 threads have found, over threads of equal number modulo `step`, in an order that never varies. */
#define SS_SUM_OVER_THREADS(partial, fields, step)                             \
    for (int width_ = SS_THREADS / 2; width_ >= (step); width_ /= 2) {         \
        SS_THREADS_DO(t)                                                       \
        {                                                                      \
            for (int k_ = 0; t < width_ && k_ < (fields); k_++) {              \
                (partial)[k_][t] += (partial)[k_][t + width_];                 \
            }                                                                  \
        }                                                                      \
        SS_BARRIER();                                                          \
    }

/* The lanes of one chunk. */
template <class T> struct sum_chunk {
    typedef norm_table table;

    static SS_ON_DEVICE void block(const table &work, int64_t chunk)
    {
        int32_t i = ss_range_of(work, chunk);
        const norm_entry &e = work.entry[i];
        int64_t first = (chunk - work.first[i]) * SS_CHUNK_PACKS;
        SS_SHARED double partial[SS_PACK][SS_THREADS];
        SS_THREADS_DO(t)
        {
            double lanes[SS_PACK] = {};
            for (int64_t number = first + t; number < first + SS_CHUNK_PACKS; number += SS_THREADS) {
                ss_pack pack = ss_pack_of(e.span, number);
                if (pack.from < pack.to) {
                    typename T::raw x[SS_PACK];
                    ss_load<T>(pack, (const typename T::raw *)e.x, x);
                    SS_UNROLL
                    for (int k = 0; k < SS_PACK; k++) {
                        lanes[k] = square_plus(T::widen(x[k]), lanes[k]);
                    }
                }
            }
            SS_UNROLL
            for (int k = 0; k < SS_PACK; k++) {
                partial[k][t] = lanes[k];
            }
        }
        SS_BARRIER();
        SS_SUM_OVER_THREADS(partial, SS_PACK, LANES / SS_PACK);
        SS_THREADS_DO(t)
        {
            if (t < LANES) {
                work.partials[chunk * LANES + t] = partial[t % SS_PACK][t / SS_PACK];
            }
        }
        SS_BARRIER(); /* before the next chunk writes there */
    }
};

/* The sum of one range. */
struct sum_range {
    typedef norm_table table;

    static SS_ON_DEVICE void block(const table &work, int64_t i)
    {
        const norm_entry &e = work.entry[i];
        const int groups = SS_THREADS / LANES;
        SS_SHARED double partial[1][SS_THREADS];
        SS_THREADS_DO(t)
        {
            double sum = 0.0;
            for (int64_t chunk = work.first[i] + t / LANES; chunk < work.first[i + 1]; chunk += groups) {
                sum += work.partials[chunk * LANES + t % LANES];
            }
            partial[0][t] = sum;
        }
        SS_BARRIER();
        SS_SUM_OVER_THREADS(partial, 1, LANES);
        SS_THREADS_DO(t)
        {
            if (t == 0) {
                double sum = 0.0;
                for (int k = 0; k < LANES; k++) {
                    sum += partial[0][k];
                }
                work.sums[i] = sum * e.scale * e.scale;
            }
        }
        SS_BARRIER();
    }
};

static norm_entry entry_of(const ss_cuda_norm_range &r, ss_dtype dtype)
{
    int32_t shift = (int32_t)(r.in_param % SS_CHUNK);
    return {{r.n, shift, ss_fits(r.x, ss_dtype_size(dtype), shift)}, r.x, r.scale};
}

template <class T> static int sum_squares(const norm_table &table, void *stream)
{
    SS_CUDA_TRY(ss_run_table<sum_chunk<T>>(table, stream));
    return ss_run<sum_range>(table, table.count, stream);
}

/* Launches follow each other on the stream, so they share the workspace: it is as large as the largest needs. */
size_t ss_cuda_norm_workspace(const ss_cuda_norm_range *ranges, int32_t count)
{
    int64_t most = 0;
    SS_EACH_LAUNCH(count, first, n)
    {
        int64_t chunks = 0;
        for (int32_t i = first; i < first + n; i++) {
            chunks += ss_span_chunks(entry_of(ranges[i], SS_F32).span);
        }
        most = chunks > most ? chunks : most;
    }
    return (size_t)most * LANES * sizeof(double);
}

int ss_cuda_norms(const ss_cuda_norms_args *args, void *stream)
{
    if (args->size != sizeof *args) {
        return SS_CUDA_ERR_SIZE;
    }
    for (int32_t i = 0; i < args->count; i++) {
        const ss_cuda_norm_range &r = args->ranges[i];
        if (r.n < 0 || r.in_param < 0 || (r.n > 0 && r.x == NULL) || args->sums == NULL) {
            return SS_CUDA_ERR_ARGUMENT;
        }
    }
    size_t needed = ss_cuda_norm_workspace(args->ranges, args->count);
    if (needed > 0 && (args->workspace == NULL || (uintptr_t)args->workspace % 16 != 0 || args->workspace_bytes < needed)) {
        return SS_CUDA_ERR_WORKSPACE;
    }
    SS_EACH_LAUNCH(args->count, first, count)
    {
        norm_table table;
        ss_clear(&table);
        table.partials = (double *)args->workspace;
        table.sums = args->sums + first;
        for (int32_t i = first; i < first + count; i++) {
            SS_CUDA_TRY(ss_add(&table, entry_of(args->ranges[i], args->dtype)));
        }
        switch (args->dtype) {
        case SS_F32: SS_CUDA_TRY(sum_squares<f32>(table, stream)); break;
        case SS_F64: SS_CUDA_TRY(sum_squares<f64>(table, stream)); break;
        case SS_BF16: SS_CUDA_TRY(sum_squares<bf16>(table, stream)); break;
        case SS_F16: SS_CUDA_TRY(sum_squares<f16>(table, stream)); break;
        default: return SS_CUDA_ERR_DTYPE;
        }
    }
    return SS_CUDA_OK;
}

/* ---- Clipping and skipping ---- */

struct clip {
    typedef ss_cuda_clip_args table;

    static SS_ON_DEVICE void block(const table &work, int64_t)
    {
        SS_SHARED double partial[1][SS_THREADS];
        SS_THREADS_DO(t)
        {
            double sum = 0.0;
            for (int32_t i = t; i < work.count; i += SS_THREADS) {
                sum += work.sums[i];
            }
            partial[0][t] = sum;
        }
        SS_BARRIER();
        SS_SUM_OVER_THREADS(partial, 1, 1);
        SS_THREADS_DO(t)
        {
            if (t == 0) {
                double norm = sqrt(partial[0][0]) * (work.scale != NULL ? fabs(*work.scale) : 1.0);
                double coefficient = work.max_norm / (norm + 1e-6);
                bool whole = coefficient > 1.0 || (work.only_finite && !isfinite(norm));
                *work.norm = norm;
                *work.coefficient = whole ? 1.0 : coefficient; /* a NaN stays one, as in torch.clamp */
            }
        }
    }
};

int ss_cuda_clip(const ss_cuda_clip_args *args, void *stream)
{
    if (args->size != sizeof *args) {
        return SS_CUDA_ERR_SIZE;
    }
    if (args->count < 0 || (args->count > 0 && args->sums == NULL) || args->norm == NULL || args->coefficient == NULL) {
        return SS_CUDA_ERR_ARGUMENT;
    }
    return ss_run<clip>(*args, 1, stream);
}

struct skip {
    struct table {
        const double *norm;
        const float *found_inf;
        int32_t *skip;
    };

    static SS_ON_DEVICE void block(const table &work, int64_t)
    {
        SS_THREADS_DO(t)
        {
            if (t == 0) {
                *work.skip = !isfinite(*work.norm) || (work.found_inf != NULL && *work.found_inf != 0.0f);
            }
        }
    }
};

int ss_cuda_skip(const double *norm, const float *found_inf, int32_t *flag, void *stream)
{
    if (norm == NULL || flag == NULL) {
        return SS_CUDA_ERR_ARGUMENT;
    }
    skip::table table = {norm, found_inf, flag};
    return ss_run<skip>(table, 1, stream);
}
