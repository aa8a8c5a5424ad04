// The framework calls of the engine: what a parameter's .grad is, moved into and out of its slot. See shim.h.
#include "shim/shim_private.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>

using namespace ss_shim_private;

namespace {

[[noreturn]] void throw_pending()
{
    python_error error;
    error.persist();
    throw error;
}

// The engine, also in another thread's backward, never sees a gradient as hidden.
Param& at_ctx(void* ctx, int32_t i)
{
    Param& p = static_cast<ss_shim*>(ctx)->params[i];
    show(p);
    return p;
}
const ss_shim* shim_of(void* ctx) { return static_cast<ss_shim*>(ctx); }

ss_grad_kind kind(void* ctx, int32_t i)
{
    Param& p = at_ctx(ctx, i);
    const at::Tensor& grad = p.variable.grad();
    if (!grad.defined()) {
        return SS_GRAD_NONE;
    }
    if (grad.unsafeGetTensorImpl() == p.bound.unsafeGetTensorImpl()) {
        return SS_GRAD_BOUND;
    }
    if (!grad.has_storage()) {
        return SS_GRAD_OTHER;
    }
    const c10::StorageImpl* memory = grad.storage().unsafeGetStorageImpl();
    if (memory == p.slot.storage().unsafeGetStorageImpl() && same_memory_order(grad, p.slot)) {
        p.variable.mutable_grad() = p.bound;  // `p.grad = p.grad.detach()`: the same gradient
        return SS_GRAD_BOUND;
    }
    bool stale = std::any_of(p.pieces.begin(), p.pieces.end(), [memory](const auto& piece) {
        auto alive = piece.lock();
        return alive.get() == memory;
    });
    return stale ? SS_GRAD_STALE : SS_GRAD_OTHER;
}

int wants_place(void* ctx, int32_t i) { return at_ctx(ctx, i).variable.requires_grad(); }
void bind(void* ctx, int32_t i)
{
    Param& p = at_ctx(ctx, i);
    p.variable.mutable_grad() = p.bound;
}
void unbind(void* ctx, int32_t i) { at_ctx(ctx, i).variable.mutable_grad().reset(); }
void written(void* ctx, int32_t i)
{
    at::Tensor& variable = at_ctx(ctx, i).variable;
    if (!variable.is_inference()) {
        variable.unsafeGetTensorImpl()->bump_version();
    }
}

bool is_low(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

// dst := grad or dst += grad, both dense on the CPU and of one memory order. False when the kernels have no such loop.
bool fold_elements(const ss_kernels* kernels, const at::Tensor& dst, const at::Tensor& grad, bool add)
{
    void* to = dst.data_ptr();
    const void* from = grad.const_data_ptr();
    if (grad.scalar_type() == dst.scalar_type() && !add) {
        if (from != to) {
            kernels->copy_through(to, from, static_cast<int64_t>(dst.nbytes()));
        }
        return true;
    }
    if (dst.scalar_type() == at::kFloat && is_low(grad.scalar_type())) {
        bool bf16 = grad.scalar_type() == at::kBFloat16;
        auto loop = add ? (bf16 ? kernels->add_bf16 : kernels->add_f16) : (bf16 ? kernels->bf16_to_f32 : kernels->f16_to_f32);
        loop(static_cast<float*>(to), static_cast<const uint16_t*>(from), dst.numel());
        return true;
    }
    return false;
}

// dst := grad or dst += grad, with dst a plain dense tensor.
void fold_gradient(const ss_shim* shim, at::Tensor dst, const at::Tensor& grad, bool add = false)
{
    TORCH_CHECK(grad.sizes() == dst.sizes(), "its gradient has shape ", grad.sizes(), ", the parameter ", dst.sizes());
    if (shim->host && same_memory_order(grad, dst) && fold_elements(shim->kernels, dst, grad, add)) {
        return;
    }
    at::NoGradGuard no_grad;
    if (add) {
        dst.add_(grad.detach());
    } else {
        dst.copy_(grad.is_sparse() ? grad.detach().to_dense() : grad.detach());
    }
}

// On the current stream.
void copy_bytes(const ss_shim* shim, void* to, const void* from, size_t bytes)
{
    at::NoGradGuard no_grad;
    const auto n = static_cast<int64_t>(bytes);
    over_memory(shim, to, at::kByte, {n}, {1}, nullptr).copy_(over_memory(shim, from, at::kByte, {n}, {1}, nullptr));
}

// Of what the engine counts as an element: of a complex number it has two.
size_t element_size(const at::Tensor& t) { return t.element_size() / (t.is_complex() ? 2 : 1); }

ss_code guarded(ss_error* err, const std::function<void()>& body)
{
    try {
        body();
        return SS_OK;
    } catch (const c10::Error& e) {
        return ss_fail(err, SS_ERR_USAGE, "a gradient could not be copied into its bucket: %s",
                       e.what_without_backtrace());
    } catch (const std::exception& e) {
        return ss_fail(err, SS_ERR_USAGE, "a gradient could not be copied into its bucket: %s", e.what());
    }
}

int casts(void* ctx, int32_t i)
{
    const Param& p = at_ctx(ctx, i);
    return is_low(p.home.scalar_type()) && !ag::impl::post_acc_grad_hooks(p.variable);
}

ss_code fold(void* ctx, int32_t i, bool add, ss_error* err)
{
    Param& p = at_ctx(ctx, i);
    return guarded(err, [&] { fold_gradient(shim_of(ctx), p.slot, p.variable.grad(), add); });
}

ss_code fold_piece(void* ctx, int32_t i, int64_t begin, int64_t numel, void* dst, ss_error* err)
{
    Param& p = at_ctx(ctx, i);
    return guarded(err, [&] {
        at::Tensor grad = p.variable.grad();
        if (!same_memory_order(grad, p.slot) || grad.scalar_type() != p.slot.scalar_type()) {
            at::Tensor whole = at::empty_strided(p.slot.sizes(), p.slot.strides(), p.slot.options());
            fold_gradient(shim_of(ctx), whole, grad);
            grad = whole;
        }
        size_t size = element_size(grad);
        const char* from = static_cast<const char*>(grad.data_ptr()) + begin * size;
        if (shim_of(ctx)->host) {
            std::memcpy(dst, from, numel * size);
        } else {
            copy_bytes(shim_of(ctx), dst, from, numel * size);
        }
    });
}

ss_code add_beside(void* ctx, int32_t i, ss_error* err)
{
    Param& p = at_ctx(ctx, i);
    return guarded(err, [&] {
        at::Tensor late = at::empty_strided(p.slot.sizes(), p.slot.strides(), p.slot.options());
        fold_gradient(shim_of(ctx), late, p.variable.grad());
        if (p.beside.defined()) {
            at::NoGradGuard no_grad;
            p.beside.add_(late);
        } else {
            p.beside = late;
        }
    });
}

ss_code fold_beside(void* ctx, int32_t i, ss_error* err)
{
    Param& p = at_ctx(ctx, i);
    ss_code code = guarded(err, [&] { fold_gradient(shim_of(ctx), p.slot, p.beside); });
    p.beside.reset();
    return code;
}

void drop_beside(void* ctx, int32_t i) { at_ctx(ctx, i).beside.reset(); }

// What users hold of p's gradient gets memory of its own, with elements [begin, begin + numel) of the slot in it. Returns
// a tensor over the slot.
at::Tensor separate(const ss_shim* shim, Param& p, int64_t begin, int64_t numel)
{
    c10::StorageImpl* storage = p.slot.storage().unsafeGetStorageImpl();
    size_t bytes = storage->nbytes(), element = element_size(p.slot);
    const char* from = static_cast<const char*>(p.slot.const_data_ptr()) + begin * element;
    at::NoGradGuard no_grad;
    at::DataPtr memory;
    if (shim->host) {
        char* zeros = static_cast<char*>(std::calloc(1, bytes));  // pages that stay zero cost nothing
        if (zeros == nullptr) {
            throw std::bad_alloc();
        }
        std::memcpy(zeros + begin * element, from, numel * element);
        memory = at::DataPtr(zeros, zeros, std::free, at::kCPU);
    } else {
        at::Tensor zeros = at::zeros({static_cast<int64_t>(bytes)}, p.slot.options().dtype(at::kByte));
        copy_bytes(shim, static_cast<char*>(zeros.data_ptr()) + begin * element, from, numel * element);
        memory = zeros.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, shim->device));
    }
    at::DataPtr slot = storage->set_data_ptr(std::move(memory));
    at::Tensor over = at::empty({0}, p.slot.options());
    over.set_(at::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(slot), nullptr, false), 0, p.slot.sizes(),
              p.slot.strides());
    return over;
}

ss_code dropped(void* ctx, int32_t i, ss_kept kept, int64_t begin, int64_t numel, double norm, ss_error* err)
{
    ss_shim* shim = static_cast<ss_shim*>(ctx);
    Param& p = at_ctx(ctx, i);
    if (p.slot.numel() == 0 || !more(holders_of(p), p.ours)) {
        return SS_OK;
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    ss_code code = guarded(err, [&] {
        at::Storage held = p.slot.storage();
        at::Tensor slot = separate(shim, p, begin, numel);
        if (kept == SS_KEPT_PIECE || kept == SS_KEPT_NOTHING) {
            p.pieces.erase(std::remove_if(p.pieces.begin(), p.pieces.end(), [](const auto& w) { return w.expired(); }),
                           p.pieces.end());
            p.pieces.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(held.unsafeGetStorageImpl()));
        }
        if (shim->guard != nullptr) {
            PyObject* told = PyObject_CallMethod(p.object, "outlives_window", "id", static_cast<int>(kept), norm);
            if (told == nullptr) {
                throw_pending();
            }
            Py_DECREF(told);
        }
        p.slot = std::move(slot);
        bind_new(shim, i);
    });
    PyGILState_Release(gil);
    return code;
}

// On a device: torch's own reductions.
ss_code partial_norm(void* ctx, const void* x, const ss_param_spec* spec, int64_t n, double order, double* partial,
                     ss_error* err)
{
    return guarded(err, [&] {
        at::NoGradGuard no_grad;
        const at::ScalarType dtype = spec->grad_dtype == SS_F64 ? at::kDouble : at::kFloat;
        const bool largest = order == std::numeric_limits<double>::infinity(), least = order == -std::numeric_limits<double>::infinity();
        if (n == 0) {
            *partial = least ? std::numeric_limits<double>::infinity() : 0.0;
            return;
        }
        at::Tensor values = over_memory(shim_of(ctx), x, dtype, {n}, {1}, nullptr).to(at::kDouble);
        values = spec->pairs ? at::view_as_complex(values.view({n / 2, 2})).abs() : values.abs();
        at::Tensor result = largest       ? values.max()
                            : least       ? values.min()
                            : order == 0.0 ? values.ne(0).sum().to(at::kDouble)
                            : order == 1.0 ? values.sum()
                                           : values.pow(order).sum();
        *partial = result.item<double>();
    });
}

}  // namespace

void ss_shim_private::bind_new(ss_shim* shim, int32_t i)
{
    Param& p = shim->params[i];
    PyObject* bound = THPVariable_Wrap(p.slot);
    if (bound != nullptr && shim->guard != nullptr) {
        bound = PyObject_CallFunction(shim->guard, "Ni", bound, static_cast<int>(i));
    }
    if (bound == nullptr) {
        throw_pending();
    }
    Py_XDECREF(p.object);
    p.object = bound;
    p.bound = THPVariable_Unpack(bound);
    p.ours = holders_of(p);
}

extern "C" {

ss_framework ss_shim_framework(ss_shim* shim)
{
    return ss_framework{shim,       kind,       wants_place, bind,    unbind,  casts,        fold,
                        fold_piece, add_beside, fold_beside, drop_beside, written, dropped, partial_norm,
                        ss_shim_span_begin, ss_shim_span_end};
}

}  // extern "C"
