// The c10d transport, and for its tests a process group whose backend is not Gloo, has only a flat reduce-scatter and a
// broadcast, and, like MPI, forbids that output and input overlap. Underneath it is Gloo.

#include "shim/c10d.cpp"
#include "shim/control.cpp"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace {

class OtherBackend : public c10d::Backend {
  public:
    explicit OtherBackend(c10::intrusive_ptr<c10d::Backend> inner)
        : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner))
    {
    }

    const std::string getBackendName() const override { return "other"; }

    c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor> &tensors,
                                             const c10d::BroadcastOptions &options) override
    {
        return inner_->broadcast(tensors, options);
    }

    c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                                        const c10d::ReduceScatterOptions &options) override
    {
        auto *begin = static_cast<char *>(input.data_ptr()), *end = begin + input.nbytes();
        auto *out = static_cast<char *>(output.data_ptr());
        TORCH_CHECK(out + output.nbytes() <= begin || out >= end, "Buffers must not be aliased");
        // Not Gloo's own: that work is complete only when somebody has waited for it.
        std::vector<at::Tensor> sum{input.clone()};
        c10d::AllreduceOptions same;
        same.reduceOp = options.reduceOp;
        at::Tensor part = sum[0].narrow(0, getRank() * output.numel(), output.numel());
        auto copied = inner_->allreduce(sum, same)->getFuture()->then(
            [output, part](c10::ivalue::Future &) {
                output.copy_(part);
                return c10::IValue(output);
            },
            c10::TensorType::get());
        return c10d::Work::create_from_future(copied);
    }

  private:
    c10::intrusive_ptr<c10d::Backend> inner_;
};

} // namespace

extern "C" int make_other_group(const char *gloo_group, const char *name)
{
    try {
        auto gloo = c10d::resolve_process_group(gloo_group);
        auto group = c10::make_intrusive<c10d::ProcessGroup>(gloo->getStore(), gloo->getRank(), gloo->getSize());
        group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
        group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                          c10::make_intrusive<OtherBackend>(gloo->getBackend(c10::DeviceType::CPU)));
        c10d::register_process_group(name, group); // which keeps no reference
        static std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> kept;
        kept.push_back(group);
        return 0;
    } catch (const std::exception &) {
        return 1;
    }
}
