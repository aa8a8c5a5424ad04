// The control channel of the transports that need one (csrc/transport/control.h says what it does and promises), and what
// they share besides: one posted collective, waiting for it, and finding out why it failed.
#ifndef SHARDSTEP_SHIM_CONTROL_HPP
#define SHARDSTEP_SHIM_CONTROL_HPP

#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "shim/c10d_peers.hpp"
#include "transport/control.h"

namespace shardstep {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Collectives of ours are no business of Python dispatch modes that are active in the thread (and would take the GIL).
struct OutsideDispatchModes {
    c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKeySet(c10::DispatchKey::Python) |
                                             c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot) |
                                             c10::autograd_dispatch_keyset | c10::DispatchKeySet(
                                                 c10::DispatchKey::ADInplaceOrView)};
};

std::string describe_current_exception();

// One collective that was posted.
class Pending {
  public:
    explicit Pending(c10::intrusive_ptr<c10d::Work> work);
    // Throws what the collective threw.
    bool done();

  private:
    c10::intrusive_ptr<c10d::Work> work_;
    c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// torch 2.13 renamed the flat collectives and deprecated the old names.
template <class G>
c10::intrusive_ptr<c10d::Work> flat_all_gather(G &group, at::Tensor &output, at::Tensor &input)
{
    if constexpr (requires { group.all_gather_single(output, input); }) {
        return group.all_gather_single(output, input);
    } else {
        return group._allgather_base(output, input);
    }
}

// The torch process group of this name; throws when it is not one of these ranks.
Group resolve_group(const char *name, const char *role, int rank, int world);

inline std::string bucket_name(int bucket) { return bucket < 0 ? "" : " of bucket " + std::to_string(bucket); }

// Methods throw Failure or, once it has failed for good, ss_error; `guarded` makes a code of both.
class Control {
  public:
    explicit Control(ss_transport *transport) : base(transport) {}

    // Collective. Tells the ranks who they are; `backend` has to be the same everywhere.
    void meet(Group group, const std::string &backend);

    // Waits until `ready()`, calling `progress()` meanwhile, and watching peers, notices, signals and the time.
    void wait(const char *phase, int bucket, const std::function<bool()> &ready, const std::function<void()> &progress)
    {
        wait_for(phase, bucket, ready, progress, false);
    }

    void exchange(const void *mine, size_t bytes, void *all, const std::function<void()> &progress);

    // Ends the transport: it only repeats this error from now on.
    [[noreturn]] void fail_for_good(const Failure &failure, const char *phase, int bucket);
    // Called in a catch block with what a collective threw. Finds out why: a peer's notice and a dead process explain it
    // better than the backend's words, and may come a moment later.
    [[noreturn]] void explain(const char *phase, int bucket);

    void give_up(const char *message);
    // Lets the others know. 'A': this rank has given up, 'L': that rank was lost.
    void tell(char kind, int rank, const std::string &text);
    // A rank on this host whose process has ended, or -1.
    int dead();
    // Throws what is known of peers. False when the store is gone.
    bool look(bool ask_store);
    void waits(char kind, uint64_t number);
    std::string missing(char kind, uint64_t number);

    // Whether some exchange was left pending, by a timeout or an interrupt. Then the group must not be destroyed: the last
    // reference waits in its destructor for what is pending.
    bool any_pending();
    void abandon_group() { (void)group_.release(); }
    bool one_host() const { return !peers_ || peers_->one_host(); }

    ss_transport *base;
    std::optional<ss_error> failed;

  private:
    // With `named`, a timeout says which ranks have not come to this exchange.
    void wait_for(const char *phase, int bucket, const std::function<bool()> &ready, const std::function<void()> &progress,
                  bool named);

    Group group_;
    std::unique_ptr<Peers> peers_;
    std::unique_ptr<Notices> notices_;
    std::vector<Pending> exchanges_; // those that a timeout or an interrupt left behind
    uint64_t number_ = 0;            // of the exchange
    std::mutex looking_;
};

// Runs a function's body; no C++ exception leaves the shim.
template <class Body>
ss_code guarded(Control &control, const char *phase, int bucket, ss_error *err, Body body) noexcept
{
    const char *name = control.base->ops->name;
    const int rank = control.base->rank;
    ss_error error{};
    try {
        if (control.failed) {
            throw *control.failed;
        }
        body();
        return SS_OK;
    } catch (const ss_error &known) {
        error = known;
    } catch (const Failure &failure) {
        ss_fail_at(&error, failure.code, failure.rank, bucket, "%s, rank %d, %s%s: %s", name, rank, phase,
                   bucket_name(bucket).c_str(), failure.text.c_str());
    } catch (const std::bad_alloc &) {
        ss_fail_at(&error, SS_ERR_NO_MEMORY, -1, bucket, "%s, rank %d, %s%s: out of memory", name, rank, phase,
                   bucket_name(bucket).c_str());
    } catch (...) {
        ss_fail_at(&error, SS_ERR_TRANSPORT, -1, bucket, "%s, rank %d, %s%s: %s", name, rank, phase,
                   bucket_name(bucket).c_str(), describe_current_exception().c_str());
    }
    if (err != nullptr) {
        *err = error;
    }
    return error.code;
}

} // namespace shardstep

#endif
