// What the files of the shim share: the hooks' link to the engine, and the tensors of each parameter.
#ifndef SHARDSTEP_SHIM_PRIVATE_HPP
#define SHARDSTEP_SHIM_PRIVATE_HPP

#include <Python.h>

#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/kernels.h"
#include "shim/shim.h"

namespace ss_shim_private {

namespace ag = torch::autograd;
using NodePtr = decltype(ag::impl::grad_accumulator(std::declval<const ag::Variable&>()));

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

// How many hold a gradient and its memory.
struct Holders {
    Py_ssize_t object = 0;
    size_t tensor = 0, storage = 0;
    bool operator==(const Holders&) const = default;
};

struct Param {
    at::Tensor variable;
    at::Tensor bound, slot;     // undefined until attached
    PyObject* object = nullptr; // of `bound`, held here
    Holders ours;               // when .grad is unbound and no user holds it
    // Memory of gradients that were dropped while a user held them, and that hold this rank's piece only.
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> pieces;
    at::Tensor beside;          // gradient that came while the slot was in flight
    NodePtr node;               // keeps our hooks alive: a tensor holds its AccumulateGrad weakly
    uintptr_t post_hook = 0;
    bool hidden = false;        // .grad is bound, but shows as undefined for now
    at::Tensor home;            // what the parameter was when it was attached: over its bucket, if it lives in one
    const void* address = nullptr; // of home then
};

inline void show(Param& p)
{
    if (p.hidden) {
        p.hidden = false;
        if (!p.variable.grad().defined()) {
            p.variable.mutable_grad() = p.bound;
        }
    }
}

inline Holders holders_of(const Param& p)
{
    return Holders{Py_REFCNT(p.object), p.bound.use_count(), p.slot.storage().use_count()};
}

inline bool same_memory_order(const at::Tensor& a, const at::Tensor& b)
{
    return a.layout() == at::kStrided && a.device() == b.device() && a.sizes() == b.sizes() &&
           a.strides() == b.strides() && !a.is_conj() && !a.is_neg();
}

// A tensor over foreign memory that holds a reference to the region (which may be null).
at::Tensor over_memory(const ss_shim* shim, const void* data, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
                       ss_region* region);

// The dtype of a tensor over memory of `dtype`: of pairs where the parameter is complex.
at::ScalarType whole_type(ss_dtype dtype, const ss_param_spec& spec);

// Makes the tensor to bind over p.slot, and notes that only we hold it. Needs the interpreter's lock; throws.
void bind_new(ss_shim* shim, int32_t i);

inline bool more(const Holders& a, const Holders& b)
{
    return a.object > b.object || a.tensor > b.tensor || a.storage > b.storage;
}

}  // namespace ss_shim_private

struct ss_shim {
    ss_shim_private::LinkPtr link;
    // Memory is the host's and work on it is done when a call returns. Else all of it is torch's work, on the current stream.
    bool host = true;
    at::Device device = at::kCPU;  // as torch calls it
    const ss_kernels* kernels = ss_kernels_get(nullptr);
    std::vector<ss_shim_private::Param> params;
    PyObject* guard = nullptr;  // see ss_shim_settle
};

#endif
