// Hooks on AccumulateGrad nodes, and tensors over the engine's memory. See shim.h.
//
// Why nodes' own pre- and post-hooks and not torch's post-accumulate hook: the latter has one slot per tensor (users'), and
// both run in C++ without the interpreter. Why a pre-hook: before autograd adds in place, it must be known that the memory
// behind .grad is this rank's to write and holds a value of this round.
#include <Python.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>

#include "shim/shim_private.hpp"

using namespace ss_shim_private;

namespace {

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

// The elements of `values` in the order of memory of a dense tensor with these strides, flat.
at::Tensor in_memory_order(const at::Tensor& values, at::IntArrayRef strides)
{
    at::Tensor dense = values;
    if (values.strides() != strides) {
        dense = at::empty_strided(values.sizes(), strides, values.options()).copy_(values);
    }
    return dense.as_strided({dense.numel()}, {1});
}

// Copies new values of a parameter whose memory is not its bucket's any more into the bucket, and points it there again.
bool bring_home(Param& p)
{
    if (p.home.const_data_ptr() != p.address) { // the storage itself was moved, as share_memory_() does
        return false;
    }
    if (p.variable.numel() == 0 ||
        (p.variable.const_data_ptr() == p.home.const_data_ptr() && p.variable.strides() == p.home.strides())) {
        return true;
    }
    try {
        at::NoGradGuard no_grad;
        p.home.copy_(p.variable.detach().clone()); // a copy first: the new tensor may be a view of the old memory
        p.variable.set_data(p.home);
        return true;
    } catch (const std::exception&) {
        return false;
    }
}

// Copies the parameter's values into its bucket and points it there.
void move_values(const ss_shim* shim, at::Tensor& variable, at::IntArrayRef strides, const ss_slot& slot,
                 const ss_param_spec& spec)
{
    at::Tensor values = variable.detach();
    if (slot.master_region != nullptr && slot.piece.numel > 0) {
        at::Tensor master = over_memory(shim, slot.piece_master, at::kFloat, {slot.piece.numel}, {1}, slot.master_region);
        master.copy_(in_memory_order(values, strides).narrow(0, slot.piece.in_param, slot.piece.numel));
    }
    at::Tensor param = over_memory(shim, slot.param, whole_type(spec.param_dtype, spec), values.sizes(), strides, slot.region);
    if (shim->host && same_memory_order(values, param) && values.scalar_type() == param.scalar_type()) {
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

at::ScalarType ss_shim_private::whole_type(ss_dtype dtype, const ss_param_spec& spec)
{
    return spec.pairs ? c10::toComplexType(scalar_type(dtype)) : scalar_type(dtype);
}

at::Tensor ss_shim_private::over_memory(const ss_shim* shim, const void* data, at::ScalarType dtype, at::IntArrayRef sizes,
                                        at::IntArrayRef strides, ss_region* region)
{
    if (region != nullptr) {
        ss_region_retain(region);
    }
    return at::from_blob(const_cast<void*>(data), sizes, strides, [region](void*) { ss_region_release(region); },
                         at::TensorOptions().dtype(dtype).device(shim->device), shim->device);
}

extern "C" {

ss_shim* ss_shim_create(PyObject* params, int host, ss_raise raise)
{
    PyObject* list = PySequence_Fast(params, "parameters must be a sequence");
    if (list == nullptr) {
        return nullptr;
    }
    auto shim = std::make_unique<ss_shim>();
    shim->link = std::make_shared<Link>();
    shim->link->raise = raise;
    shim->host = host != 0;
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
        shim->device = shim->params[i].variable.device();
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
    Py_CLEAR(shim->guard);
    for (Param& p : shim->params) {
        Py_CLEAR(p.object);
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
            move_values(shim, p.variable, dense.strides(), *slot, *spec);
        }
        p.slot = over_memory(shim, slot->grad, whole_type(spec->grad_dtype, *spec), dense.sizes(), dense.strides(), slot->region);
        if (p.slot.scalar_type() != p.variable.scalar_type()) {
            allow_any_grad_dtype(p.variable);
        }
        if (guard != shim->guard) {
            Py_XDECREF(shim->guard);
            shim->guard = Py_XNewRef(guard);
        }
        bind_new(shim, i);
        p.home = p.variable.detach();
        p.address = p.home.const_data_ptr();
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

PyObject* ss_shim_grad(ss_shim* shim, int32_t i) { return THPVariable_Wrap(shim->params[i].slot.detach()); }

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
        Param& p = shim->params[i];
        if (!p.bound.defined()) {
            continue;
        }
        const at::Tensor& v = p.variable;
        bool fits = v.scalar_type() == p.home.scalar_type() && v.sizes() == p.home.sizes() && v.device() == p.home.device();
        if (!fits || (in_bucket && !bring_home(p))) {
            return static_cast<int32_t>(i);
        }
    }
    return -1;
}

PyObject* ss_shim_flat(ss_shim* shim, void* data, ss_dtype dtype, int64_t n, ss_region* region)
{
    try {
        return THPVariable_Wrap(over_memory(shim, data, scalar_type(dtype), {n}, {1}, region));
    } catch (const std::exception& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
        return nullptr;
    }
}

}  // extern "C"
