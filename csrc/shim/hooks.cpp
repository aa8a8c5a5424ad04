// Hooks on AccumulateGrad nodes and the framework calls of the engine. See shim.h.
//
// Why nodes' own pre- and post-hooks and not torch's post-accumulate hook: the latter has one slot per tensor (users'), and
// both run in C++ without the interpreter. Why a pre-hook: before autograd adds in place, it must be known that the memory
// behind .grad is this rank's to write and holds a value of this round.
#include <Python.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/kernels.h"
#include "shim/shim.h"

namespace ag = torch::autograd;
using NodePtr = decltype(ag::impl::grad_accumulator(std::declval<const ag::Variable&>()));

namespace {

// Shared with the hooks, which may outlive the shim. `engine` is null before the first and after the last report.
struct Link {
    std::atomic<ss_engine*> engine{nullptr};
    std::atomic<int> last_task{-1};
    std::mutex lock;
    std::vector<int> tasks;  // graph tasks whose end is being waited for
    ss_raise raise = nullptr;
    PyObject* synchronise = nullptr;  // owned by the shim; see ss_shim_set_synchronise
};
using LinkPtr = std::shared_ptr<Link>;

[[noreturn]] void throw_python(const Link& link, const ss_error& err)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    link.raise(&err);
    python_error error;
    error.persist();
    PyGILState_Release(gil);
    throw error;
}

// The engine leaves the synchronisation at the end of this backward to Python.
void call_synchronise(const Link& link)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject* call = Py_XNewRef(link.synchronise);
    PyObject* result = call != nullptr ? PyObject_CallNoArgs(call) : nullptr;
    Py_XDECREF(call);
    if (result == nullptr && PyErr_Occurred()) {
        python_error error;
        error.persist();
        PyGILState_Release(gil);
        throw error;
    }
    Py_XDECREF(result);
    PyGILState_Release(gil);
}

void end_of_task(const LinkPtr& link, int task)
{
    {
        std::lock_guard<std::mutex> guard(link->lock);
        auto& tasks = link->tasks;
        tasks.erase(std::remove(tasks.begin(), tasks.end(), task), tasks.end());
        link->last_task = -1;
        if (ag::get_current_node() != nullptr) {
            return;  // a backward inside another one's node; the outer one's end is the end
        }
        tasks.clear();  // tasks that ended in an exception never reported
    }
    ss_engine* engine = link->engine;
    ss_error err = {};
    if (engine != nullptr && ss_engine_end_backward(engine, &err) != SS_OK) {
        throw_python(*link, err);
    }
    if (engine != nullptr && ss_engine_sync_due(engine)) {
        call_synchronise(*link);
    }
}

// Is this torch.autograd.grad, which adds to no .grad? A rank may well call it alone.
bool only_captures()
{
    const auto* execution = ag::get_current_graph_task_exec_info();
    return execution != nullptr && std::any_of(execution->begin(), execution->end(),
                                               [](const auto& item) { return item.second.captures_ != nullptr; });
}

void queue_end(const LinkPtr& link)
{
    int task = ag::get_current_graph_task_id();
    if (task == -1 || task == link->last_task || only_captures()) {
        return;
    }
    {
        std::lock_guard<std::mutex> guard(link->lock);
        link->last_task = task;
        if (std::find(link->tasks.begin(), link->tasks.end(), task) != link->tasks.end()) {
            return;
        }
        link->tasks.push_back(task);
    }
    ag::Engine::get_default_engine().queue_callback([link, task] { end_of_task(link, task); });
}

struct PreHook : ag::FunctionPreHook {
    LinkPtr link;
    explicit PreHook(LinkPtr l) : link(std::move(l)) {}
    // Compiled autograd asks for this when it traces a backward, which our hooks cannot be part of.
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override
    {
        ss_error err = {};
        ss_fail(&err, SS_ERR_USAGE,
                "compiled autograd cannot trace the backward of a wrapped model, because its hooks are not Python; leave "
                "torch._dynamo.config.compiled_autograd False (torch.compile itself works)");
        throw_python(*link, err);
    }
};

// On an output of the root's forward.
struct Watch final : PreHook {
    using PreHook::PreHook;
    ag::variable_list operator()(const ag::variable_list& grads) override
    {
        if (link->engine != nullptr) {
            queue_end(link);
        }
        return grads;
    }
};

struct Before final : PreHook {
    int32_t param;
    Before(LinkPtr l, int32_t p) : PreHook(std::move(l)), param(p) {}
    ag::variable_list operator()(const ag::variable_list& grads) override
    {
        ss_engine* engine = link->engine;
        ss_error err = {};
        if (engine != nullptr && !grads.empty() && grads[0].defined()) {
            queue_end(link);
            if (ss_engine_before_accumulate(engine, param, &err) != SS_OK) {
                throw_python(*link, err);
            }
        }
        return grads;
    }
};

struct After final : ag::FunctionPostHook {
    LinkPtr link;
    int32_t param;
    After(LinkPtr l, int32_t p) : link(std::move(l)), param(p) {}
    ag::variable_list operator()(const ag::variable_list& outputs, const ag::variable_list& inputs) override
    {
        ss_engine* engine = link->engine;
        ss_error err = {};
        if (engine != nullptr && !inputs.empty() && inputs[0].defined() &&
            ss_engine_after_accumulate(engine, param, &err) != SS_OK) {
            throw_python(*link, err);
        }
        return outputs;
    }
};

struct Param {
    at::Tensor variable;
    at::Tensor bound, slot;  // undefined until attached
    at::Tensor beside;       // gradient that came while the slot was in flight
    NodePtr node;            // keeps our hooks alive: a tensor holds its AccumulateGrad weakly
    uintptr_t post_hook = 0;
    bool hidden = false;     // .grad is bound, but shows as undefined for now
    const void* data = nullptr;
    at::ScalarType dtype = at::kFloat;
};

}  // namespace

struct ss_shim {
    LinkPtr link;
    const ss_kernels* kernels = ss_kernels_get(nullptr);
    std::vector<Param> params;
};

namespace {

void show(Param& p)
{
    if (p.hidden) {
        p.hidden = false;
        if (!p.variable.grad().defined()) {
            p.variable.mutable_grad() = p.bound;
        }
    }
}

// The engine, also in another thread's backward, never sees a gradient as hidden.
Param& at_ctx(void* ctx, int32_t i)
{
    Param& p = static_cast<ss_shim*>(ctx)->params[i];
    show(p);
    return p;
}
const ss_kernels* kernels_of(void* ctx) { return static_cast<ss_shim*>(ctx)->kernels; }

ss_grad_kind kind(void* ctx, int32_t i)
{
    const Param& p = at_ctx(ctx, i);
    const at::Tensor& grad = p.variable.grad();
    if (!grad.defined()) {
        return SS_GRAD_NONE;
    }
    return grad.unsafeGetTensorImpl() == p.bound.unsafeGetTensorImpl() ? SS_GRAD_BOUND : SS_GRAD_OTHER;
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

bool same_memory_order(const at::Tensor& a, const at::Tensor& b)
{
    return a.layout() == at::kStrided && a.device() == b.device() && a.sizes() == b.sizes() &&
           a.strides() == b.strides() && !a.is_conj() && !a.is_neg();
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
void fold_gradient(const ss_kernels* kernels, at::Tensor dst, const at::Tensor& grad, bool add = false)
{
    TORCH_CHECK(grad.sizes() == dst.sizes(), "its gradient has shape ", grad.sizes(), ", the parameter ", dst.sizes());
    if (same_memory_order(grad, dst) && dst.is_cpu() && fold_elements(kernels, dst, grad, add)) {
        return;
    }
    at::NoGradGuard no_grad;
    if (add) {
        dst.add_(grad.detach());
    } else {
        dst.copy_(grad.is_sparse() ? grad.detach().to_dense() : grad.detach());
    }
}

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
    return is_low(p.dtype) && !ag::impl::post_acc_grad_hooks(p.variable);
}

ss_code fold(void* ctx, int32_t i, bool add, ss_error* err)
{
    Param& p = at_ctx(ctx, i);
    return guarded(err, [&] { fold_gradient(kernels_of(ctx), p.slot, p.variable.grad(), add); });
}

ss_code fold_piece(void* ctx, int32_t i, int64_t begin, int64_t numel, void* dst, ss_error* err)
{
    Param& p = at_ctx(ctx, i);
    return guarded(err, [&] {
        at::Tensor grad = p.variable.grad();
        if (!same_memory_order(grad, p.slot) || grad.scalar_type() != p.slot.scalar_type()) {
            at::Tensor whole = at::empty_strided(p.slot.sizes(), p.slot.strides(), p.slot.options());
            fold_gradient(kernels_of(ctx), whole, grad);
            grad = whole;
        }
        size_t size = grad.element_size();
        std::memcpy(dst, static_cast<const char*>(grad.data_ptr()) + begin * size, numel * size);
    });
}

ss_code add_beside(void* ctx, int32_t i, ss_error* err)
{
    Param& p = at_ctx(ctx, i);
    return guarded(err, [&] {
        at::Tensor late = at::empty_strided(p.slot.sizes(), p.slot.strides(), p.slot.options());
        fold_gradient(kernels_of(ctx), late, p.variable.grad());
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
    ss_code code = guarded(err, [&] { fold_gradient(kernels_of(ctx), p.slot, p.beside); });
    p.beside.reset();
    return code;
}

void drop_beside(void* ctx, int32_t i) { at_ctx(ctx, i).beside.reset(); }

at::ScalarType scalar_type(ss_dtype dtype)
{
    switch (dtype) {
    case SS_F32: return at::kFloat;
    case SS_F64: return at::kDouble;
    case SS_BF16: return at::kBFloat16;
    case SS_F16: return at::kHalf;
    }
    return at::kFloat;
}

at::Tensor over_memory(void* data, ss_dtype dtype, at::IntArrayRef sizes, at::IntArrayRef strides, ss_region* region)
{
    ss_region_retain(region);
    return at::from_blob(data, sizes, strides, [region](void*) { ss_region_release(region); },
                         at::TensorOptions().dtype(scalar_type(dtype)));
}

// The elements of `values` in the order of memory of a dense tensor with these strides, flat.
at::Tensor in_memory_order(const at::Tensor& values, at::IntArrayRef strides)
{
    at::Tensor dense = values;
    if (values.strides() != strides) {
        dense = at::empty_strided(values.sizes(), strides, values.options()).copy_(values);
    }
    return dense.as_strided({dense.numel()}, {1});
}

// Copies the parameter's values into its bucket and points it there.
void move_values(at::Tensor& variable, at::IntArrayRef strides, const ss_slot& slot, const ss_param_spec& spec)
{
    at::Tensor values = variable.detach();
    if (slot.master_region != nullptr && slot.piece.numel > 0) {
        at::Tensor master = over_memory(slot.piece_master, SS_F32, {slot.piece.numel}, {1}, slot.master_region);
        master.copy_(in_memory_order(values, strides).narrow(0, slot.piece.in_param, slot.piece.numel));
    }
    at::Tensor param = over_memory(slot.param, spec.param_dtype, values.sizes(), strides, slot.region);
    if (same_memory_order(values, param) && values.scalar_type() == param.scalar_type()) {
        std::memcpy(slot.param, values.const_data_ptr(), values.nbytes());
    } else {
        param.copy_(values);
    }
    variable.set_data(param);
}

// Lets `.grad` be of the dtype of the gradient bucket.
void allow_any_grad_dtype(const at::Tensor& variable)
{
    PyObject* self = THPVariable_Wrap(variable);
    int failed = self == nullptr || PyObject_SetAttrString(self, "grad_dtype", Py_None) < 0;
    Py_XDECREF(self);
    if (failed) {
        throw python_error();
    }
}

at::Tensor call_guard(PyObject* guard, const at::Tensor& slot, int32_t i)
{
    PyObject* plain = THPVariable_Wrap(slot);
    PyObject* bound = plain != nullptr ? PyObject_CallFunction(guard, "Ni", plain, i) : nullptr;
    if (bound == nullptr || !THPVariable_Check(bound)) {
        Py_XDECREF(bound);
        throw python_error();
    }
    at::Tensor result = THPVariable_Unpack(bound);
    Py_DECREF(bound);
    return result;
}

// Our hooks on the parameter's AccumulateGrad node.
void hook(ss_shim* shim, int32_t i)
{
    Param& p = shim->params[i];
    // A node exists only for tensors that require grad; one frozen on this rank may be unfrozen on another.
    bool frozen = !p.variable.requires_grad();
    if (frozen) {
        p.variable.set_requires_grad(true);
    }
    p.node = ag::impl::grad_accumulator(p.variable);
    if (frozen) {
        p.variable.set_requires_grad(false);
    }
    TORCH_CHECK(p.node, "the parameter is not a leaf of autograd's graph");
    p.node->add_pre_hook(std::make_unique<Before>(shim->link, i));
    p.post_hook = p.node->add_post_hook(std::make_unique<After>(shim->link, i));
}

}  // namespace

extern "C" {

ss_shim* ss_shim_create(PyObject* params, ss_raise raise)
{
    PyObject* list = PySequence_Fast(params, "parameters must be a sequence");
    if (list == nullptr) {
        return nullptr;
    }
    auto shim = std::make_unique<ss_shim>();
    shim->link = std::make_shared<Link>();
    shim->link->raise = raise;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(list);
    shim->params.resize(n);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject* item = PySequence_Fast_GET_ITEM(list, i);
        if (!THPVariable_Check(item)) {
            PyErr_Format(PyExc_TypeError, "parameter %zd is not a tensor", i);
            Py_DECREF(list);
            return nullptr;
        }
        shim->params[i].variable = THPVariable_Unpack(item);
    }
    Py_DECREF(list);
    return shim.release();
}

void ss_shim_set_engine(ss_shim* shim, ss_engine* engine) { shim->link->engine = engine; }

void ss_shim_set_synchronise(ss_shim* shim, PyObject* synchronise)
{
    PyObject* before = shim->link->synchronise;
    shim->link->synchronise = Py_XNewRef(synchronise);
    Py_XDECREF(before);
}

void ss_shim_destroy(ss_shim* shim)
{
    if (shim == nullptr) {
        return;
    }
    shim->link->engine = nullptr;
    ss_shim_set_synchronise(shim, nullptr);
    for (Param& p : shim->params) {
        if (p.node) {
            p.node->del_post_hook(p.post_hook);
        }
        if (p.bound.defined() && p.variable.grad().defined() &&
            p.variable.grad().unsafeGetTensorImpl() == p.bound.unsafeGetTensorImpl()) {
            p.variable.mutable_grad().reset();
        }
    }
    delete shim;
}

ss_framework ss_shim_framework(ss_shim* shim)
{
    return ss_framework{shim,       kind,        wants_place, bind,    unbind,             casts,           fold, fold_piece,
                        add_beside, fold_beside, drop_beside, written, ss_shim_span_begin, ss_shim_span_end};
}

int ss_shim_interrupted(void*)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    int stop = PyErr_CheckSignals() != 0;
    PyGILState_Release(gil);
    return stop;
}

int ss_shim_settle(ss_shim* shim, int32_t i, const ss_slot* slot, const ss_param_spec* spec, PyObject* guard)
{
    Param& p = shim->params[i];
    try {
        at::NoGradGuard no_grad;
        at::Tensor dense = p.variable.is_non_overlapping_and_dense() ? p.variable.detach()
                                                                     : at::empty(p.variable.sizes(), p.variable.options());
        if (slot->param != nullptr) {
            move_values(p.variable, dense.strides(), *slot, *spec);
        }
        p.slot = over_memory(slot->grad, spec->grad_dtype, dense.sizes(), dense.strides(), slot->region);
        if (p.slot.scalar_type() != p.variable.scalar_type()) {
            allow_any_grad_dtype(p.variable);
        }
        p.bound = guard != nullptr ? call_guard(guard, p.slot, i) : p.slot;
        p.data = p.variable.numel() > 0 ? p.variable.const_data_ptr() : nullptr;
        p.dtype = p.variable.scalar_type();
        hook(shim, i);
        return 0;
    } catch (python_error& e) {
        e.restore();
        return -1;
    } catch (const std::exception& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
        return -1;
    }
}

PyObject* ss_shim_grad(ss_shim* shim, int32_t i) { return THPVariable_Wrap(shim->params[i].slot); }

int ss_shim_watch(ss_shim* shim, PyObject* tensor)
{
    try {
        const at::Tensor& t = THPVariable_Unpack(tensor);
        if (const auto& node = t.grad_fn()) {
            node->add_tensor_pre_hook(std::make_unique<Watch>(shim->link));
        }
        return 0;
    } catch (const std::exception& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
        return -1;
    }
}

void ss_shim_hide_low_gradients(ss_shim* shim, int hide)
{
    for (Param& p : shim->params) {
        const at::Tensor& grad = p.variable.grad();
        if (!hide) {
            show(p);
        } else if (grad.defined() && p.bound.defined() && grad.unsafeGetTensorImpl() == p.bound.unsafeGetTensorImpl() &&
                   grad.scalar_type() != p.variable.scalar_type()) {
            p.variable.mutable_grad().reset();
            p.hidden = true;
        }
    }
}

int32_t ss_shim_moved(ss_shim* shim, int in_bucket)
{
    for (size_t i = 0; i < shim->params.size(); i++) {
        const Param& p = shim->params[i];
        if (!p.bound.defined()) {
            continue;
        }
        bool same = p.variable.scalar_type() == p.dtype &&
                    (!in_bucket || p.variable.numel() == 0 || p.variable.const_data_ptr() == p.data) &&
                    p.variable.numel() == p.slot.numel();
        if (!same) {
            return static_cast<int32_t>(i);
        }
    }
    return -1;
}

PyObject* ss_shim_flat(void* data, ss_dtype dtype, int64_t n, ss_region* region)
{
    try {
        return THPVariable_Wrap(over_memory(data, dtype, {n}, {1}, region));
    } catch (const std::exception& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
        return nullptr;
    }
}

}  // extern "C"
