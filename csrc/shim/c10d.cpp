// The c10d transport (csrc/transport/c10d.h says what it does and promises).
//
// Order of this file: small helpers; the transport's state; posting and finishing; the vtable.

#include "transport/c10d.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "shim/control.hpp"

extern "C" {
#include "kernels/kernels.h"
}

namespace {

using namespace shardstep;
constexpr size_t kScratchLimit = size_t{64} << 20;
constexpr int64_t kBlock = 8192; // elements finished before `reduced` is told: in L2 with every source
constexpr int kScatterWorld = 4;

// ---------------------------------------------------------------------------------------------- small helpers

at::ScalarType scalar_type(ss_dtype dtype) { return dtype == SS_F64 ? at::kDouble : at::kFloat; }

// A tensor over `elements` at `data` that keeps `owner` (copied) alive.
template <class Owner>
at::Tensor view(void *data, int64_t elements, at::ScalarType type, Owner owner)
{
    return at::from_blob(data, {elements}, [owner](void *) {}, at::TensorOptions().dtype(type));
}

struct RegionRef {
    explicit RegionRef(ss_region *region) : region(region) { ss_region_retain(region); }
    RegionRef(const RegionRef &other) : region(other.region) { ss_region_retain(region); }
    RegionRef &operator=(const RegionRef &) = delete;
    ~RegionRef() { ss_region_release(region); }
    ss_region *region;
};

void destroy_region(ss_region *region)
{
    munmap(region->base, region->bytes);
    delete region;
}

ss_region *new_region(size_t bytes)
{
    auto region = std::make_unique<ss_region>();
    region->bytes = bytes;
    region->base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (region->base == MAP_FAILED) {
        throw std::bad_alloc();
    }
    region->references = 1;
    region->destroy = destroy_region;
    return region.release();
}

template <class G>
c10::intrusive_ptr<c10d::Work> flat_reduce_scatter(G &group, at::Tensor &output, at::Tensor &input)
{
    if constexpr (requires { group.reduce_scatter_single(output, input); }) {
        return group.reduce_scatter_single(output, input);
    } else {
        return group._reduce_scatter_base(output, input);
    }
}

bool all_done(std::vector<Pending> &works)
{
    return std::all_of(works.begin(), works.end(), [](Pending &work) { return work.done(); });
}

// ---------------------------------------------------------------------------------------------- state

enum class Method { kScatter, kAllReduce, kReduceScatter };
enum class Phase { kIdle, kQueued, kPosted, kDone };

struct Bucket {
    ss_bucket_spec spec;
    ss_region *region; // a reference of the transport's
    Phase reduce = Phase::kIdle;
    Phase gather[2] = {Phase::kIdle, Phase::kIdle};
};

struct Task {
    int bucket;
    std::optional<ss_plane> gather; // empty: reduce
    std::vector<Pending> works;
    at::Tensor scratch; // bytes
};

struct Transport {
    ss_transport base{}; // first: the C side holds a pointer to it
    Group data;
    Control control{&base};
    Method method = Method::kReduceScatter;
    const ss_kernels *kernels = ss_kernels_get(nullptr);
    std::vector<Bucket> buckets;
    std::deque<Task> queued, posted;
    std::vector<at::Tensor> spare;  // scratch for reuse
    size_t scratch_bytes = 0;       // of posted tasks
};

static_assert(std::is_standard_layout_v<ss_transport>);

Transport *self(ss_transport *t) { return reinterpret_cast<Transport *>(t); }

// Runs a vtable function's body; no C++ exception leaves this file.
template <class Body>
ss_code run(ss_transport *base, const char *phase, int bucket, ss_error *err, Body body) noexcept
{
    Transport *t = self(base);
    return guarded(t->control, phase, bucket, err, [&] { body(t); });
}

Bucket &at(Transport *t, int bucket)
{
    if (bucket < 0 || static_cast<size_t>(bucket) >= t->buckets.size()) {
        throw Failure{SS_ERR_USAGE, -1, "there are only " + std::to_string(t->buckets.size()) + " buckets"};
    }
    return t->buckets[static_cast<size_t>(bucket)];
}

char *plane_base(const Bucket &b, ss_plane plane)
{
    return static_cast<char *>(b.region->base) + (plane == SS_PLANE_GRAD ? b.spec.grad_offset : b.spec.param_offset);
}

size_t segment_bytes(const Bucket &b, ss_plane plane)
{
    return static_cast<size_t>(b.spec.segment) *
           ss_dtype_size(plane == SS_PLANE_GRAD ? b.spec.grad_dtype : b.spec.param_dtype);
}

// ---------------------------------------------------------------------------------------------- post and finish

size_t scratch_needed(const Transport *t, const Task &task)
{
    if (task.gather || t->method == Method::kAllReduce || t->base.world == 1) {
        return 0;
    }
    size_t segment = segment_bytes(t->buckets[static_cast<size_t>(task.bucket)], SS_PLANE_GRAD);
    return t->method == Method::kScatter ? segment * static_cast<size_t>(t->base.world - 1) : segment;
}

at::Tensor take_scratch(Transport *t, size_t bytes)
{
    for (auto it = t->spare.begin(); it != t->spare.end(); ++it) {
        if (it->nbytes() == bytes) {
            at::Tensor found = *it;
            t->spare.erase(it);
            return found;
        }
    }
    t->spare.clear(); // of other sizes
    return at::empty({static_cast<int64_t>(bytes)}, at::kByte);
}

void post_reduce(Transport *t, Task &task)
{
    const Bucket &b = t->buckets[static_cast<size_t>(task.bucket)];
    const int rank = t->base.rank, world = t->base.world;
    const size_t bytes = segment_bytes(b, SS_PLANE_GRAD);
    const auto type = scalar_type(b.spec.grad_dtype);
    char *grad = plane_base(b, SS_PLANE_GRAD);
    const RegionRef region(b.region);

    if (t->method == Method::kScatter) {
        std::vector<at::Tensor> segments;
        for (int k = 0; k < world; ++k) {
            segments.push_back(view(grad + static_cast<size_t>(k) * bytes, b.spec.segment, type, region));
        }
        char *slot = static_cast<char *>(task.scratch.data_ptr());
        for (int root = 0; root < world; ++root) {
            c10d::ScatterOptions options;
            options.rootRank = root;
            std::vector<std::vector<at::Tensor>> inputs;
            std::vector<at::Tensor> outputs;
            if (root == rank) {
                inputs.push_back(segments);
                outputs.push_back(segments[static_cast<size_t>(rank)]);
            } else {
                outputs.push_back(view(slot, b.spec.segment, type, task.scratch));
                slot += bytes;
            }
            task.works.emplace_back(t->data->scatter(outputs, inputs, options));
        }
        return;
    }
    at::Tensor whole = view(grad, b.spec.segment * world, type, region);
    if (t->method == Method::kAllReduce) {
        std::vector<at::Tensor> tensors{whole};
        task.works.emplace_back(t->data->allreduce(tensors));
    } else {
        at::Tensor output = view(task.scratch.data_ptr(), b.spec.segment, type, task.scratch);
        task.works.emplace_back(flat_reduce_scatter(*t->data, output, whole));
    }
}

void post_gather(Transport *t, Task &task)
{
    const Bucket &b = t->buckets[static_cast<size_t>(task.bucket)];
    const size_t bytes = segment_bytes(b, *task.gather);
    char *data = plane_base(b, *task.gather);
    for (int root = 0; root < t->base.world; ++root) {
        c10d::BroadcastOptions options;
        options.rootRank = root;
        // As bytes: every backend has them, not every backend has bf16.
        std::vector<at::Tensor> tensors{view(data + static_cast<size_t>(root) * bytes, static_cast<int64_t>(bytes),
                                             at::kByte, RegionRef(b.region))};
        task.works.emplace_back(t->data->broadcast(tensors, options));
    }
}

// Posts queued tasks, first in first out, as far as scratch memory goes.
void post(Transport *t)
{
    OutsideDispatchModes guard;
    while (!t->queued.empty()) {
        Task &next = t->queued.front();
        size_t bytes = scratch_needed(t, next);
        if (bytes > 0 && t->scratch_bytes > 0 && t->scratch_bytes + bytes > kScratchLimit) {
            return;
        }
        if (bytes > 0) {
            next.scratch = take_scratch(t, bytes);
        }
        t->scratch_bytes += bytes;
        t->posted.push_back(std::move(next));
        t->queued.pop_front();
        Task &task = t->posted.back();
        Bucket &b = t->buckets[static_cast<size_t>(task.bucket)];
        void *span = task.gather ? nullptr : ss_reduce_begin(&t->base, task.bucket);
        try {
            if (t->base.world == 1) {
                // no works: done when next looked at
            } else if (task.gather) {
                post_gather(t, task);
            } else {
                post_reduce(t, task);
            }
            ss_reduce_end(&t->base, span);
        } catch (...) {
            ss_reduce_end(&t->base, span);
            t->control.explain(task.gather ? "all-gather" : "reduce-scatter", task.bucket);
        }
        (task.gather ? b.gather[*task.gather] : b.reduce) = Phase::kPosted;
    }
}

// All collectives of a reduce are done: what remains is local.
void finish_reduce(Transport *t, Task &task)
{
    Bucket &b = t->buckets[static_cast<size_t>(task.bucket)];
    const size_t bytes = segment_bytes(b, SS_PLANE_GRAD), element = ss_dtype_size(b.spec.grad_dtype);
    char *own = plane_base(b, SS_PLANE_GRAD) + static_cast<size_t>(t->base.rank) * bytes;
    char *scratch = task.scratch.defined() ? static_cast<char *>(task.scratch.data_ptr()) : nullptr;
    const int world = t->base.world, rank = t->base.rank;
    std::vector<const float *> f32(static_cast<size_t>(world));
    std::vector<const double *> f64(static_cast<size_t>(world));
    void *span = ss_reduce_begin(&t->base, task.bucket);
    for (int64_t begin = 0; begin < b.spec.segment; begin += kBlock) {
        const int64_t end = std::min(begin + kBlock, b.spec.segment);
        const size_t offset = static_cast<size_t>(begin) * element;
        if (world > 1 && t->method == Method::kScatter) {
            for (int k = 0, slot = 0; k < world; ++k) {
                const char *from = (k == rank ? own : scratch + bytes * static_cast<size_t>(slot++)) + offset;
                f32[static_cast<size_t>(k)] = reinterpret_cast<const float *>(from);
                f64[static_cast<size_t>(k)] = reinterpret_cast<const double *>(from);
            }
            if (b.spec.grad_dtype == SS_F64) {
                t->kernels->reduce_f64(reinterpret_cast<double *>(own + offset), f64.data(), world, end - begin);
            } else {
                t->kernels->reduce_f32(reinterpret_cast<float *>(own + offset), f32.data(), world, end - begin);
            }
        } else if (world > 1 && t->method == Method::kReduceScatter) {
            std::memcpy(own + offset, scratch + offset, static_cast<size_t>(end - begin) * element);
        }
        if (t->base.callbacks.reduced != nullptr) {
            t->base.callbacks.reduced(t->base.callbacks.ctx, task.bucket, begin, end);
        }
    }
    ss_reduce_end(&t->base, span);
    const uint64_t once = bytes * static_cast<uint64_t>(t->base.world - 1);
    t->base.traffic.reduce_scatter_bytes += t->method == Method::kAllReduce ? 2 * once : once;
    t->base.traffic.reduce_scatters += 1;
    b.reduce = Phase::kDone;
}

// Finishes what has arrived and posts what waited for its scratch. Never waits.
void progress(Transport *t)
{
    for (auto task = t->posted.begin(); task != t->posted.end();) {
        const char *phase = task->gather ? "all-gather" : "reduce-scatter";
        bool arrived = false;
        try {
            arrived = all_done(task->works);
        } catch (...) {
            t->control.explain(phase, task->bucket);
        }
        if (!arrived) {
            ++task;
            continue;
        }
        if (task->gather) {
            Bucket &b = t->buckets[static_cast<size_t>(task->bucket)];
            b.gather[*task->gather] = Phase::kDone;
            t->base.traffic.all_gather_bytes +=
                segment_bytes(b, *task->gather) * static_cast<uint64_t>(t->base.world - 1);
            t->base.traffic.all_gathers += 1;
        } else {
            finish_reduce(t, *task);
        }
        if (task->scratch.defined()) {
            t->scratch_bytes -= task->scratch.nbytes();
            t->spare.push_back(std::move(task->scratch));
        }
        task = t->posted.erase(task);
    }
    post(t);
}

// Waits until `ready()`, making progress meanwhile.
template <class Ready>
void wait(Transport *t, const char *phase, int bucket, Ready ready)
{
    t->control.wait(phase, bucket, ready, [t] { progress(t); });
}

// ---------------------------------------------------------------------------------------------- the vtable

ss_code op_add_chunk(ss_transport *base, const ss_bucket_spec *specs, int n, size_t bytes, ss_region **region,
                     ss_error *err)
{
    return run(base, "adding a chunk", -1, err, [&](Transport *t) {
        const size_t world = static_cast<size_t>(t->base.world);
        for (int i = 0; i < n; ++i) {
            const ss_bucket_spec &s = specs[i];
            const size_t elements = static_cast<size_t>(s.segment) * world;
            const bool grad = s.segment > 0 && s.segment % 128 == 0 && s.grad_offset % 256 == 0 &&
                              (s.grad_dtype == SS_F32 || s.grad_dtype == SS_F64) && s.grad_offset <= bytes &&
                              elements * ss_dtype_size(s.grad_dtype) <= bytes - s.grad_offset;
            const bool param = s.param_offset == SIZE_MAX ||
                               (s.param_offset % 256 == 0 && s.param_offset <= bytes &&
                                elements * ss_dtype_size(s.param_dtype) <= bytes - s.param_offset);
            if (!grad || !param) {
                throw Failure{SS_ERR_USAGE, -1,
                              "the layout of bucket " + std::to_string(t->buckets.size() + static_cast<size_t>(i)) +
                                  " is not valid"};
            }
        }
        t->buckets.reserve(t->buckets.size() + static_cast<size_t>(n)); // nothing below throws
        ss_region *made = new_region(bytes);
        for (int i = 0; i < n; ++i) {
            ss_region_retain(made);
            t->buckets.push_back(Bucket{specs[i], made});
        }
        *region = made;
    });
}

ss_code op_launch(ss_transport *base, int bucket, int contributes, ss_error *err)
{
    return run(base, "launch", bucket, err, [&](Transport *t) {
        Bucket &b = at(t, bucket);
        if (b.reduce != Phase::kIdle) {
            throw Failure{SS_ERR_USAGE, -1, "it was already launched in this round"};
        }
        if (!contributes) {
            std::memset(plane_base(b, SS_PLANE_GRAD), 0,
                        segment_bytes(b, SS_PLANE_GRAD) * static_cast<size_t>(t->base.world));
        }
        t->queued.push_back(Task{bucket, std::nullopt, {}, {}});
        b.reduce = Phase::kQueued;
        post(t);
    });
}

ss_code op_poll(ss_transport *base, int bucket, ss_reduce_state *state, ss_error *err)
{
    return run(base, "reduce-scatter", bucket, err, [&](Transport *t) {
        Bucket &b = at(t, bucket);
        if (b.reduce == Phase::kIdle) {
            throw Failure{SS_ERR_USAGE, -1, "it was not launched in this round"};
        }
        progress(t);
        *state = b.reduce == Phase::kDone ? SS_REDUCE_SETTLED : SS_REDUCE_PENDING;
    });
}

ss_code op_reduce(ss_transport *base, int bucket, ss_error *err)
{
    return run(base, "reduce-scatter", bucket, err, [&](Transport *t) {
        Bucket &b = at(t, bucket);
        if (b.reduce == Phase::kIdle) {
            throw Failure{SS_ERR_USAGE, -1, "it was not launched in this round"};
        }
        wait(t, "reduce-scatter", bucket, [&] { return b.reduce == Phase::kDone; });
    });
}

ss_code op_settle(ss_transport *base, ss_error *err)
{
    return run(base, "settle", -1, err, [&](Transport *t) {
        wait(t, "settle", -1, [&] {
            return std::all_of(t->buckets.begin(), t->buckets.end(), [](const Bucket &b) {
                return b.reduce == Phase::kIdle || b.reduce == Phase::kDone;
            });
        });
        for (Bucket &b : t->buckets) {
            b.reduce = Phase::kIdle;
        }
    });
}

ss_code op_exchange(ss_transport *base, const void *mine, size_t bytes, void *all, ss_error *err)
{
    return run(base, "exchange", -1, err, [&](Transport *t) { t->control.exchange(mine, bytes, all, [t] { progress(t); }); });
}

Bucket &with_plane(Transport *t, ss_plane plane, int bucket)
{
    Bucket &b = at(t, bucket);
    if (plane != SS_PLANE_GRAD && (plane != SS_PLANE_PARAM || b.spec.param_offset == SIZE_MAX)) {
        throw Failure{SS_ERR_USAGE, -1, "it has no such plane"};
    }
    return b;
}

ss_code op_publish(ss_transport *base, ss_plane plane, int bucket, ss_error *err)
{
    return run(base, "publish", bucket, err, [&](Transport *t) {
        Bucket &b = with_plane(t, plane, bucket);
        if (b.gather[plane] == Phase::kQueued || b.gather[plane] == Phase::kPosted) {
            throw Failure{SS_ERR_USAGE, -1, "it was already published and not collected"};
        }
        if (plane == SS_PLANE_GRAD && b.reduce != Phase::kIdle && b.reduce != Phase::kDone) {
            throw Failure{SS_ERR_USAGE, -1, "its gradients are still being reduced"};
        }
        t->queued.push_back(Task{bucket, plane, {}, {}});
        b.gather[plane] = Phase::kQueued;
        post(t);
    });
}

ss_code op_collect(ss_transport *base, ss_plane plane, int bucket, ss_error *err)
{
    return run(base, "all-gather", bucket, err, [&](Transport *t) {
        Bucket &b = with_plane(t, plane, bucket);
        if (b.gather[plane] == Phase::kIdle) {
            throw Failure{SS_ERR_USAGE, -1, "it was not published"};
        }
        wait(t, "all-gather", bucket, [&] { return b.gather[plane] == Phase::kDone; });
    });
}

// A broadcast that is complete has left my memory, so there is no need to hear from the peers.
ss_code op_release(ss_transport *base, ss_plane plane, ss_error *err)
{
    return run(base, "release", -1, err, [&](Transport *t) {
        wait(t, "release", -1, [&] {
            return std::all_of(t->buckets.begin(), t->buckets.end(), [&](const Bucket &b) {
                return b.gather[plane] == Phase::kIdle || b.gather[plane] == Phase::kDone;
            });
        });
        for (Bucket &b : t->buckets) {
            b.gather[plane] = Phase::kIdle;
        }
    });
}

void op_fail(ss_transport *base, const char *message)
{
    // Nothing when a failure is known to all already.
    (void)run(base, "fail", -1, nullptr, [&](Transport *t) { t->control.give_up(message); });
}

int op_lost(ss_transport *base)
{
    return self(base)->control.dead();
}

void op_close(ss_transport *base)
{
    Transport *t = self(base);
    const auto pending = [](Pending &work) {
        try {
            return !work.done();
        } catch (...) {
            return false;
        }
    };
    bool any = t->control.any_pending();
    for (Task &task : t->posted) {
        any = any || std::any_of(task.works.begin(), task.works.end(), pending);
    }
    if (any) {
        // The last reference to a group waits in its destructor for what is pending; close() must not. Such a group is
        // lost anyhow, so its memory goes with the process.
        (void)t->data.release();
        t->control.abandon_group();
    }
    for (Bucket &b : t->buckets) {
        ss_region_release(b.region);
    }
    delete t;
}

const ss_transport_ops kOps = {
    sizeof(ss_transport_ops), "c10d",     1,          op_add_chunk, op_launch, op_poll, op_reduce, op_settle,
    op_exchange,              op_publish, op_collect, op_release,   nullptr,   op_fail, op_lost,   op_close,
};

// Which backend carries CPU tensors; "python" for a group without backends, whose collectives are methods in Python.
std::string cpu_backend(const Group &group)
{
    try {
        return group->getBackend(c10::DeviceType::CPU)->getBackendName();
    } catch (const std::exception &) {
        return "python";
    }
}

} // namespace

extern "C" ss_code ss_c10d_open(const char *data_group, const char *control_group, int rank, int world, double timeout,
                                const ss_transport_callbacks *callbacks, ss_transport **transport, ss_error *err)
{
    Transport *t = new (std::nothrow) Transport;
    if (t == nullptr) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "c10d: out of memory");
    }
    t->base.ops = &kOps;
    t->base.rank = rank;
    t->base.world = world;
    t->base.timeout = timeout;
    if (callbacks != nullptr) {
        t->base.callbacks = *callbacks;
    }
    ss_code code = run(&t->base, "open", -1, err, [&](Transport *) {
        t->data = resolve_group(data_group, "data", rank, world);
        Group control = resolve_group(control_group, "control", rank, world);
        if (t->data == control && world > 1) {
            throw Failure{SS_ERR_USAGE, -1, "the data group and the control group must be two groups"};
        }
        const std::string backend = cpu_backend(t->data);
        t->control.meet(std::move(control), backend);
        if (backend == "gloo") {
            t->method = t->control.one_host() || world <= kScatterWorld ? Method::kScatter : Method::kAllReduce;
        } else { // a group in Python has allreduce, but no flat reduce-scatter
            t->method = backend == "python" ? Method::kAllReduce : Method::kReduceScatter;
        }
    });
    if (code != SS_OK) {
        op_close(&t->base);
        return code;
    }
    *transport = &t->base;
    return SS_OK;
}
