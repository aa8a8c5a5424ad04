/* What is done to elements one by one: zero, scale, add, cast, copy. One launch for many ranges. */
#include "chunks.h"

struct element_entry {
    ss_span span;
    void *dst;
    const void *src;
    double factor;
};

/*
 * The operations. `dst` and `src` are element types, src `none` where there is no source; keeps: the result depends on what dst
 * held.
 */
template <class T> struct zero {
    typedef T dst;
    typedef none src;
    static const bool keeps = false;
    static SS_ON_DEVICE typename T::raw apply(typename T::raw, uint16_t, double) { return typename T::raw(0); }
};

template <class T> struct scale {
    typedef T dst;
    typedef none src;
    static const bool keeps = true;
    static SS_ON_DEVICE typename T::raw apply(typename T::raw x, uint16_t, double factor)
    {
        return x * (typename T::raw)factor;
    }
};

template <class T> struct add_scaled {
    typedef T dst;
    typedef T src;
    static const bool keeps = true;
    static SS_ON_DEVICE typename T::raw apply(typename T::raw x, typename T::raw carry, double factor)
    {
        return carry + x * (typename T::raw)factor;
    }
};

template <class Dst, class Src> struct add {
    typedef Dst dst;
    typedef Src src;
    static const bool keeps = true;
    static SS_ON_DEVICE typename Dst::raw apply(typename Dst::raw x, typename Src::raw y, double) { return x + Src::widen(y); }
};

template <class Dst, class Src> struct cast {
    typedef Dst dst;
    typedef Src src;
    static const bool keeps = false;
    static SS_ON_DEVICE typename Dst::raw apply(typename Dst::raw, typename Src::raw y, double)
    {
        return Dst::narrow(Src::widen(y));
    }
};

template <class T> struct copy {
    typedef T dst;
    typedef T src;
    static const bool keeps = false;
    static SS_ON_DEVICE typename T::raw apply(typename T::raw, typename T::raw y, double) { return y; }
};

template <class Low> struct adopt {
    typedef f32 dst;
    typedef Low src;
    static const bool keeps = true;
    static SS_ON_DEVICE float apply(float master, typename Low::raw low, double)
    {
        return Low::narrow(master) == low ? master : Low::widen(low);
    }
};

template <class Op> struct elementwise {
    typedef ss_table<element_entry> table;
    typedef typename Op::dst dst;
    typedef typename Op::src src;

    static SS_ON_DEVICE void block(const table &work, int64_t chunk)
    {
        int32_t i = ss_range_of(work, chunk);
        const element_entry &e = work.entry[i];
        int64_t first = (chunk - work.first[i]) * SS_CHUNK_PACKS;
        SS_THREADS_DO(t)
        {
            for (int64_t number = first + t; number < first + SS_CHUNK_PACKS; number += SS_THREADS) {
                ss_pack pack = ss_pack_of(e.span, number);
                if (pack.from < pack.to) {
                    one(e, pack);
                }
            }
        }
    }

    static SS_ON_DEVICE void one(const element_entry &e, const ss_pack &pack)
    {
        typename dst::raw x[SS_PACK] = {};
        typename src::raw y[SS_PACK] = {};
        if constexpr (Op::keeps) {
            ss_load<dst>(pack, (const typename dst::raw *)e.dst, x);
        }
        if constexpr (src::present) {
            ss_load<src>(pack, (const typename src::raw *)e.src, y);
        }
        SS_UNROLL
        for (int k = 0; k < SS_PACK; k++) {
            x[k] = Op::apply(x[k], y[k], e.factor);
        }
        ss_store<dst>(pack, (typename dst::raw *)e.dst, x);
    }
};

template <class Op> static int over_ranges(const ss_cuda_range *ranges, int32_t count, void *stream)
{
    const size_t elements[] = {sizeof(typename Op::dst::raw), sizeof(typename Op::src::raw)};
    for (int32_t i = 0; i < count; i++) {
        const ss_cuda_range &r = ranges[i];
        if (r.n < 0 || (r.n > 0 && (r.dst == NULL || (Op::src::present && r.src == NULL)))) {
            return SS_CUDA_ERR_ARGUMENT;
        }
    }
    SS_EACH_LAUNCH(count, first, n)
    {
        typename elementwise<Op>::table table;
        ss_clear(&table);
        for (int32_t i = first; i < first + n; i++) {
            const ss_cuda_range &r = ranges[i];
            const void *arrays[] = {r.dst, Op::src::present ? r.src : NULL};
            element_entry entry = {ss_span_over(r.n, arrays, elements, 2), r.dst, r.src, r.factor};
            SS_CUDA_TRY(ss_add(&table, entry));
        }
        SS_CUDA_TRY(ss_run_table<elementwise<Op>>(table, stream));
    }
    return SS_CUDA_OK;
}

int ss_cuda_zero(const ss_cuda_range *ranges, int32_t count, ss_dtype dtype, void *stream)
{
    switch (dtype) {
    case SS_F32: return over_ranges<zero<f32>>(ranges, count, stream);
    case SS_F64: return over_ranges<zero<f64>>(ranges, count, stream);
    case SS_BF16:
    case SS_F16: return over_ranges<zero<bf16>>(ranges, count, stream);
    }
    return SS_CUDA_ERR_DTYPE;
}

int ss_cuda_scale(const ss_cuda_range *ranges, int32_t count, ss_dtype dtype, void *stream)
{
    switch (dtype) {
    case SS_F32: return over_ranges<scale<f32>>(ranges, count, stream);
    case SS_F64: return over_ranges<scale<f64>>(ranges, count, stream);
    default: return SS_CUDA_ERR_DTYPE;
    }
}

int ss_cuda_add_scaled(const ss_cuda_range *ranges, int32_t count, ss_dtype dtype, void *stream)
{
    switch (dtype) {
    case SS_F32: return over_ranges<add_scaled<f32>>(ranges, count, stream);
    case SS_F64: return over_ranges<add_scaled<f64>>(ranges, count, stream);
    default: return SS_CUDA_ERR_DTYPE;
    }
}

int ss_cuda_add(const ss_cuda_range *ranges, int32_t count, ss_dtype src_dtype, void *stream)
{
    switch (src_dtype) {
    case SS_F32: return over_ranges<add<f32, f32>>(ranges, count, stream);
    case SS_F64: return over_ranges<add<f64, f64>>(ranges, count, stream);
    case SS_BF16: return over_ranges<add<f32, bf16>>(ranges, count, stream);
    case SS_F16: return over_ranges<add<f32, f16>>(ranges, count, stream);
    }
    return SS_CUDA_ERR_DTYPE;
}

int ss_cuda_cast(const ss_cuda_range *ranges, int32_t count, ss_dtype dst_dtype, ss_dtype src_dtype, void *stream)
{
    if (dst_dtype == src_dtype) {
        switch (dst_dtype) {
        case SS_F32: return over_ranges<copy<f32>>(ranges, count, stream);
        case SS_F64: return over_ranges<copy<f64>>(ranges, count, stream);
        case SS_BF16:
        case SS_F16: return over_ranges<copy<bf16>>(ranges, count, stream);
        }
    } else if (src_dtype == SS_F32 && dst_dtype == SS_BF16) {
        return over_ranges<cast<bf16, f32>>(ranges, count, stream);
    } else if (src_dtype == SS_F32 && dst_dtype == SS_F16) {
        return over_ranges<cast<f16, f32>>(ranges, count, stream);
    } else if (src_dtype == SS_BF16 && dst_dtype == SS_F32) {
        return over_ranges<cast<f32, bf16>>(ranges, count, stream);
    } else if (src_dtype == SS_F16 && dst_dtype == SS_F32) {
        return over_ranges<cast<f32, f16>>(ranges, count, stream);
    }
    return SS_CUDA_ERR_DTYPE;
}

int ss_cuda_adopt(const ss_cuda_range *ranges, int32_t count, ss_dtype src_dtype, void *stream)
{
    switch (src_dtype) {
    case SS_BF16: return over_ranges<adopt<bf16>>(ranges, count, stream);
    case SS_F16: return over_ranges<adopt<f16>>(ranges, count, stream);
    default: return SS_CUDA_ERR_DTYPE;
    }
}
