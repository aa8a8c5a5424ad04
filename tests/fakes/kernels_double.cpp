// The kernels of the device's double: those of cuda/, compiled for the host, as work on its streams. See doubles.h.
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

extern "C" {
#include "cuda/load.h"
#include "doubles.h"
}

namespace {

template <class Body> struct Kernel {
    dd_work work; // first
    Body body;
};

template <class Body> void run(dd_work *work)
{
    auto *kernel = reinterpret_cast<Kernel<Body> *>(work);
    const int code = kernel->body();
    if (code != SS_CUDA_OK) {
        std::fprintf(stderr, "double of a device: %s\n", ss_cuda_message(code));
        std::abort();
    }
    delete kernel;
}

template <class Body> int enqueue(void *stream, Body body)
{
    auto *kernel = new Kernel<Body>{{[](dd_work *) {}, run<Body>}, std::move(body)};
    dd_enqueue(static_cast<dd_stream *>(stream), &kernel->work);
    return SS_CUDA_OK;
}

using Ranges = std::vector<ss_cuda_range>;

int zero(const ss_cuda_range *r, int32_t n, ss_dtype dtype, void *stream)
{
    return enqueue(stream, [v = Ranges(r, r + n), n, dtype] { return ss_cuda_zero(v.data(), n, dtype, nullptr); });
}

int scale(const ss_cuda_range *r, int32_t n, ss_dtype dtype, void *stream)
{
    return enqueue(stream, [v = Ranges(r, r + n), n, dtype] { return ss_cuda_scale(v.data(), n, dtype, nullptr); });
}

int add_scaled(const ss_cuda_range *r, int32_t n, ss_dtype dtype, void *stream)
{
    return enqueue(stream, [v = Ranges(r, r + n), n, dtype] { return ss_cuda_add_scaled(v.data(), n, dtype, nullptr); });
}

int add(const ss_cuda_range *r, int32_t n, ss_dtype dtype, void *stream)
{
    return enqueue(stream, [v = Ranges(r, r + n), n, dtype] { return ss_cuda_add(v.data(), n, dtype, nullptr); });
}

int cast(const ss_cuda_range *r, int32_t n, ss_dtype to, ss_dtype from, void *stream)
{
    return enqueue(stream, [v = Ranges(r, r + n), n, to, from] { return ss_cuda_cast(v.data(), n, to, from, nullptr); });
}

int adopt(const ss_cuda_range *r, int32_t n, ss_dtype dtype, void *stream)
{
    return enqueue(stream, [v = Ranges(r, r + n), n, dtype] { return ss_cuda_adopt(v.data(), n, dtype, nullptr); });
}

int norms(const ss_cuda_norms_args *args, void *stream)
{
    return enqueue(stream, [a = *args, v = std::vector<ss_cuda_norm_range>(args->ranges, args->ranges + args->count)]() mutable {
        a.ranges = v.data();
        return ss_cuda_norms(&a, nullptr);
    });
}

int clip(const ss_cuda_clip_args *args, void *stream)
{
    return enqueue(stream, [a = *args] { return ss_cuda_clip(&a, nullptr); });
}

int skip(const double *norm, const float *found_inf, int32_t *skipped, void *stream)
{
    return enqueue(stream, [=] { return ss_cuda_skip(norm, found_inf, skipped, nullptr); });
}

template <int (*Rule)(const ss_cuda_update *, void *)> int update(const ss_cuda_update *given, void *stream)
{
    const int code = enqueue(stream, [u = *given, pieces = std::vector<ss_cuda_piece>(given->pieces, given->pieces + given->n_pieces),
                            options = std::vector<ss_cuda_options>(given->options, given->options + given->n_options)]() mutable {
        u.pieces = pieces.data();
        u.options = options.data();
        return Rule(&u, nullptr);
    });
    // The optimizer's state is torch's memory, whose freeing on the CPU waits for no stream.
    dd_flush();
    return code;
}

const ss_cuda kernels = {nullptr, ss_cuda_abi_version, ss_cuda_versions, ss_cuda_message, update<ss_cuda_adam>,
                         update<ss_cuda_sgd>, ss_cuda_norm_workspace, norms, clip, skip, zero, scale, add_scaled, add, cast, adopt};

} // namespace

extern "C" const ss_cuda *dd_kernels(void) { return &kernels; }
