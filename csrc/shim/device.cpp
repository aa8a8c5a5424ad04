// The device of csrc/core/device.h over torch's own: one implementation for every accelerator, through c10's device-generic
// guard, so that nothing of CUDA is linked.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <new>
#include <string>

#include "shim/shim.h"

namespace {

using Guard = c10::impl::VirtualGuardImpl;

struct Device {
    ss_device base{}; // first: the C side holds a pointer to it
    c10::Device device;
    Guard guard;
    ss_cuda kernels{};
    explicit Device(c10::Device d) : device(d), guard(d.type()) {}
};

Device* of(ss_device* device) { return reinterpret_cast<Device*>(device); }

template <class Body>
ss_code guarded(ss_device* device, const char* what, ss_error* err, Body body) noexcept
{
    try {
        body(of(device));
        return SS_OK;
    } catch (const c10::OutOfMemoryError& e) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "%s: %s", what, e.what_without_backtrace());
    } catch (const c10::Error& e) {
        return ss_fail(err, SS_ERR_TRANSPORT, "%s: %s", what, e.what_without_backtrace());
    } catch (const std::exception& e) {
        return ss_fail(err, SS_ERR_TRANSPORT, "%s: %s", what, e.what());
    }
}

// torch 2.10 and some later ones do not tell what a stream is to its own library, but for the default one (CUDA's is null).
template <class G>
void* native_handle(const G& guard, const c10::Stream& stream)
{
    if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
        return guard.getStreamNativeHandle(stream);
    } else {
        TORCH_CHECK(stream.id() == 0, "this version of torch does not tell the native handle of a stream; use a newer one");
        return nullptr;
    }
}

c10::Stream unpack(Device* d, ss_stream stream) { return c10::Stream(c10::Stream::UNSAFE, d->device, stream.id); }
ss_stream pack(Device* d, const c10::Stream& stream) { return ss_stream{stream.id(), native_handle(d->guard, stream)}; }

// Memory of torch's caching allocator, for as long as the region lives.
struct Region {
    ss_region base{};
    at::Tensor memory;
};

void destroy_region(ss_region* region) { delete reinterpret_cast<Region*>(region); }

int enter(ss_device* device)
{
    Device* d = of(device);
    const int before = d->guard.getDevice().index();
    d->guard.uncheckedSetDevice(d->device);
    return before;
}

void leave(ss_device* device, int before)
{
    Device* d = of(device);
    d->guard.uncheckedSetDevice(c10::Device(d->device.type(), static_cast<c10::DeviceIndex>(before)));
}

ss_code allocate(ss_device* device, size_t bytes, ss_region** region, ss_error* err)
{
    return guarded(device, "allocating device memory", err, [&](Device* d) {
        auto made = std::make_unique<Region>();
        made->memory = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(d->device).dtype(at::kByte));
        made->base.base = made->memory.data_ptr();
        made->base.bytes = bytes;
        made->base.references = 1;
        made->base.destroy = destroy_region;
        *region = &made.release()->base;
    });
}

ss_code zero(ss_device* device, void* at, size_t bytes, ss_error* err)
{
    return guarded(device, "clearing device memory", err, [&](Device* d) {
        at::NoGradGuard no_grad;
        at::from_blob(at, {static_cast<int64_t>(bytes)}, {1}, [](void*) {}, at::TensorOptions(d->device).dtype(at::kByte),
                      d->device).zero_();
    });
}

ss_code read(ss_device* device, void* to, const void* from, size_t bytes, ss_error* err)
{
    return guarded(device, "reading device memory", err, [&](Device* d) {
        const auto n = static_cast<int64_t>(bytes);
        at::Tensor there = at::from_blob(const_cast<void*>(from), {n}, {1}, [](void*) {},
                                         at::TensorOptions(d->device).dtype(at::kByte), d->device);
        at::from_blob(to, {n}, at::TensorOptions().dtype(at::kByte)).copy_(there);
    });
}

ss_code current(ss_device* device, ss_stream* stream, ss_error* err)
{
    return guarded(device, "asking for the current stream", err,
                   [&](Device* d) { *stream = pack(d, d->guard.getStream(d->device)); });
}

ss_code new_stream(ss_device* device, ss_stream* stream, ss_error* err)
{
    return guarded(device, "making a stream", err, [&](Device* d) { *stream = pack(d, d->guard.getNewStream(d->device, -1)); });
}

// c10 makes the event itself when it is recorded first.
struct Event {
    void* made = nullptr;
};

ss_event* new_event(ss_device*) { return reinterpret_cast<ss_event*>(new (std::nothrow) Event); }

void free_event(ss_device* device, ss_event* event)
{
    auto* e = reinterpret_cast<Event*>(event);
    if (e != nullptr && e->made != nullptr) {
        of(device)->guard.destroyEvent(e->made, of(device)->device.index());
    }
    delete e;
}

ss_code record(ss_device* device, ss_event* event, ss_stream stream, ss_error* err)
{
    return guarded(device, "recording an event", err, [&](Device* d) {
        d->guard.record(&reinterpret_cast<Event*>(event)->made, unpack(d, stream), d->device.index(),
                        c10::EventFlag::PYTORCH_DEFAULT);
    });
}

ss_code wait(ss_device* device, ss_event* event, ss_stream stream, ss_error* err)
{
    return guarded(device, "waiting for an event", err,
                   [&](Device* d) { d->guard.block(reinterpret_cast<Event*>(event)->made, unpack(d, stream)); });
}

ss_code done(ss_device* device, ss_event* event, int* done, ss_error* err)
{
    return guarded(device, "asking for an event", err,
                   [&](Device* d) { *done = d->guard.queryEvent(reinterpret_cast<Event*>(event)->made); });
}

void destroy(ss_device* device)
{
    ss_cuda_unload(&of(device)->kernels);
    delete of(device);
}

const ss_device_ops kOps = {
    sizeof(ss_device_ops), "torch", enter, leave, allocate, zero, read, current, new_stream, new_event, free_event, record, wait, done,
    destroy,
};

} // namespace

extern "C" ss_code ss_shim_device(const char* name, const char* kernels, const char* torch_cuda, ss_device** device,
                                  ss_error* err)
{
    try {
        auto made = std::make_unique<Device>(c10::Device(std::string(name)));
        SS_TRY(ss_cuda_load(kernels, torch_cuda, &made->kernels, err));
        made->base.ops = &kOps;
        made->base.kernels = &made->kernels;
        made->base.references = 1;
        *device = &made.release()->base;
        return SS_OK;
    } catch (const std::exception& e) {
        return ss_fail(err, SS_ERR_USAGE, "no device %s: %s", name, e.what());
    }
}
