// See control.hpp. Order of this file: one collective; failures; waiting; the C functions of csrc/transport/control.h.
#include "shim/control.hpp"

#include <cxxabi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace shardstep {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr auto kInterruptEvery = milliseconds(100);
constexpr auto kPeersEvery = milliseconds(50);
constexpr auto kStoreEvery = milliseconds(250);
constexpr auto kGrace = milliseconds(400); // what a dying peer sent may still be in my socket
constexpr auto kDiagnose = milliseconds(1000);
constexpr auto kSleepMin = microseconds(20);
constexpr auto kSleepMax = microseconds(500);
constexpr auto kLong = milliseconds(1000); // a rank that has waited for so long says so

// Gloo's headers do not come with torch, so its exceptions are told apart by name.
std::string current_exception_type()
{
    const std::type_info *type = abi::__cxa_current_exception_type();
    int status = 0;
    char *name = type == nullptr ? nullptr : abi::__cxa_demangle(type->name(), nullptr, nullptr, &status);
    std::string result = name == nullptr ? "" : name;
    std::free(name);
    return result;
}

Failure lost(int rank)
{
    return {SS_ERR_PEER_LOST, rank, "the process of rank " + std::to_string(rank) + " has ended"};
}

} // namespace

std::string describe_current_exception()
{
    try {
        throw;
    } catch (const c10::Error &e) {
        return e.what_without_backtrace();
    } catch (const std::exception &e) {
        return e.what();
    } catch (...) {
        return "an exception of unknown type";
    }
}

Group resolve_group(const char *name, const char *role, int rank, int world)
{
    Group group;
    try {
        group = c10d::resolve_process_group(name == nullptr ? "" : name);
    } catch (...) {
        throw Failure{SS_ERR_USAGE, -1, std::string("there is no ") + role + " group: " + describe_current_exception()};
    }
    if (group->getRank() != rank || group->getSize() != world) {
        throw Failure{SS_ERR_USAGE, -1,
                      std::string("in the ") + role + " group this process is rank " +
                          std::to_string(group->getRank()) + " of " + std::to_string(group->getSize()) + ", not " +
                          std::to_string(rank) + " of " + std::to_string(world)};
    }
    return group;
}

// ---------------------------------------------------------------------------------------------- one collective

Pending::Pending(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work))
{
    if (!work_) {
        throw Failure{SS_ERR_TRANSPORT, -1, "the process group returned no work for an asynchronous collective"};
    }
    try { // a Work from Python answers isCompleted() only through its future
        future_ = work_->getFuture();
    } catch (const std::exception &) {
        future_ = nullptr; // backends without futures have a working isCompleted()
    }
}

bool Pending::done()
{
    if (future_) {
        if (!future_->completed()) {
            return false;
        }
        if (future_->hasError()) {
            std::rethrow_exception(future_->exception_ptr());
        }
    } else {
        if (!work_->isCompleted()) {
            return false;
        }
        if (!work_->isSuccess()) {
            std::rethrow_exception(work_->exception());
        }
    }
    return true;
}

// ---------------------------------------------------------------------------------------------- failures

int Control::dead()
{
    std::lock_guard<std::mutex> guard(looking_);
    return peers_ ? peers_->dead() : -1;
}

bool Control::look(bool ask_store)
{
    std::lock_guard<std::mutex> guard(looking_);
    const int rank = peers_ ? peers_->dead() : -1;
    if (rank >= 0) {
        throw lost(rank);
    }
    return !ask_store || !notices_ || notices_->look();
}

void Control::waits(char kind, uint64_t number)
{
    std::lock_guard<std::mutex> guard(looking_);
    if (notices_) {
        notices_->waits(kind, base->rank, number);
    }
}

std::string Control::missing(char kind, uint64_t number)
{
    std::lock_guard<std::mutex> guard(looking_);
    std::vector<int> ranks = notices_ ? notices_->missing(kind, base->rank, base->world, number) : std::vector<int>{};
    if (ranks.empty()) {
        return "";
    }
    std::string text = ranks.size() == 1 ? " (rank " : " (ranks ";
    for (size_t i = 0; i < ranks.size(); ++i) {
        text += (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") + std::to_string(ranks[i]);
    }
    return text + (ranks.size() == 1 ? " was not seen there)" : " were not seen there)");
}

void Control::tell(char kind, int rank, const std::string &text)
{
    std::lock_guard<std::mutex> guard(looking_);
    if (notices_) {
        notices_->publish(kind, rank, text);
    }
}

void Control::fail_for_good(const Failure &failure, const char *phase, int bucket)
{
    ss_error error{};
    ss_fail_at(&error, failure.code, failure.rank, bucket, "%s, rank %d, %s%s: %s", base->ops->name, base->rank, phase,
               bucket_name(bucket).c_str(), failure.text.c_str());
    failed = error;
    if (failure.code == SS_ERR_PEER_LOST) {
        tell('L', failure.rank, failure.text);
    }
    throw error;
}

void Control::explain(const char *phase, int bucket)
{
    std::string type = current_exception_type(), text = describe_current_exception();
    bool timeout = type == "gloo::TimeoutException";
    bool connection = type == "gloo::IoException";
    try {
        auto end = Clock::now() + (timeout ? milliseconds(0) : kDiagnose);
        while (notices_ && peers_) {
            (void)look(true);
            if (Clock::now() >= end) {
                break;
            }
            std::this_thread::sleep_for(milliseconds(20));
        }
    } catch (const Failure &failure) {
        fail_for_good(failure, phase, bucket);
    }
    if (timeout) {
        fail_for_good({SS_ERR_TIMEOUT, -1, "the process group's own timeout passed: " + text}, phase, bucket);
    }
    if (connection) {
        fail_for_good({SS_ERR_PEER_LOST, -1, "the connection to a peer broke, which one is unknown: " + text}, phase, bucket);
    }
    fail_for_good({SS_ERR_TRANSPORT, -1, "the process group failed: " + text}, phase, bucket);
}

void Control::give_up(const char *message)
{
    const char *reason = message == nullptr ? "" : message;
    tell('A', base->rank, reason);
    ss_error error{};
    ss_fail_at(&error, SS_ERR_ABORTED, base->rank, -1, "%s, rank %d: this rank had given up: %s", base->ops->name, base->rank,
               reason);
    failed = error;
}

bool Control::any_pending()
{
    return std::any_of(exchanges_.begin(), exchanges_.end(), [](Pending &work) {
        try {
            return !work.done();
        } catch (...) {
            return false;
        }
    });
}

// ---------------------------------------------------------------------------------------------- waiting

// Work::wait with a timeout would do for Gloo, but for other backends it may end the work, so completion is polled.
void Control::wait_for(const char *phase, int bucket, const std::function<bool()> &ready,
                       const std::function<void()> &progress, bool named)
{
    progress();
    if (ready()) {
        return;
    }
    const auto start = Clock::now();
    const auto end = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(
                                 std::min(base->timeout, 1e9)));
    auto interrupt_at = start + kInterruptEvery, peers_at = start + kPeersEvery, store_at = start + kStoreEvery;
    auto sleep = kSleepMin;
    bool said = false;
    std::optional<Clock::time_point> lost_at;
    Failure gone{SS_ERR_PEER_LOST, -1, ""};
    struct Timer {
        ss_transport *base;
        Clock::time_point start;
        ~Timer() { base->traffic.wait_seconds += std::chrono::duration<double>(Clock::now() - start).count(); }
    } timer{base, start};

    while (true) {
        std::this_thread::sleep_for(sleep);
        sleep = std::min(sleep + sleep / 4, kSleepMax);
        progress();
        if (ready()) {
            return;
        }
        const auto now = Clock::now();
        if (now >= interrupt_at) {
            interrupt_at = now + kInterruptEvery;
            if (base->callbacks.interrupted != nullptr && base->callbacks.interrupted(base->callbacks.ctx) != 0) {
                throw Failure{SS_ERR_INTERRUPTED, -1, "interrupted while waiting for peers"};
            }
        }
        if (now >= peers_at && !lost_at) {
            peers_at = now + kPeersEvery;
            const int rank = dead();
            if (rank >= 0) {
                gone = lost(rank);
                lost_at = now;
            }
        }
        if (now >= store_at) {
            store_at = now + kStoreEvery;
            try {
                std::lock_guard<std::mutex> guard(looking_);
                if (notices_ && !notices_->look() && !lost_at) {
                    gone.text = "the connection to the process group's store broke; whoever hosts it (rank 0 or the "
                                "launcher) is gone";
                    lost_at = now;
                }
            } catch (const Failure &failure) {
                fail_for_good(failure, phase, bucket);
            }
        }
        if (lost_at && now >= *lost_at + kGrace) {
            fail_for_good(gone, phase, bucket);
        }
        if (named && !said && now >= start + std::min<Clock::duration>(kLong, (end - start) / 4)) {
            said = true;
            waits('x', number_);
        }
        if (now >= end) {
            char text[128];
            std::snprintf(text, sizeof text, "some peer did not arrive within %g seconds", base->timeout);
            throw Failure{SS_ERR_TIMEOUT, -1, text + (named ? missing('x', number_) : "")};
        }
    }
}

void Control::exchange(const void *mine, size_t bytes, void *all, const std::function<void()> &progress)
{
    const size_t world = static_cast<size_t>(base->world);
    if (world == 1 || bytes == 0) {
        if (bytes > 0 && all != mine) {
            std::memmove(all, mine, bytes);
        }
        return;
    }
    // In memory of its own: after a timeout the collective is still pending while the caller's buffers are gone.
    at::Tensor message, result;
    number_++;
    try {
        OutsideDispatchModes guard;
        message = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
        result = at::empty({static_cast<int64_t>(bytes * world)}, at::kByte);
        std::memcpy(message.data_ptr(), mine, bytes);
        exchanges_.emplace_back(flat_all_gather(*group_, result, message));
    } catch (...) {
        explain("exchange", -1);
    }
    wait_for(
        "exchange", -1,
        [&] {
            try {
                return exchanges_.back().done();
            } catch (...) {
                explain("exchange", -1);
            }
        },
        progress, true);
    exchanges_.pop_back();
    std::memcpy(all, result.data_ptr(), bytes * world);
    base->traffic.control_bytes += bytes * (world - 1);
}

void Control::meet(Group group, const std::string &backend)
{
    group_ = std::move(group);
    const int world = base->world;
    std::vector<Identity> ids(static_cast<size_t>(world));
    const Identity mine = Identity::mine(backend);
    exchange(&mine, sizeof mine, ids.data(), [] {});
    base->traffic = ss_traffic{};
    for (int k = 0; k < world; ++k) {
        if (ids[static_cast<size_t>(k)].backend != mine.backend) {
            throw Failure{SS_ERR_MISMATCH, k,
                          "rank " + std::to_string(k) + " has another backend in the data group than " + backend};
        }
    }
    peers_ = std::make_unique<Peers>(ids, base->rank);
    if (group_) {
        notices_ = std::make_unique<Notices>(group_->getStore(), ids[0].nonce);
    }
}

} // namespace shardstep

// ---------------------------------------------------------------------------------------------- the C functions

using namespace shardstep;

struct ss_control : Control {
    using Control::Control;
};

extern "C" ss_code ss_control_open(const char *group, ss_transport *base, ss_control **control, ss_error *err)
{
    auto *made = new (std::nothrow) ss_control(base);
    if (made == nullptr) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "%s: out of memory", base->ops->name);
    }
    ss_code code = guarded(*made, "open", -1, err, [&] {
        made->meet(group == nullptr ? Group() : resolve_group(group, "control", base->rank, base->world), "");
    });
    if (code != SS_OK) {
        ss_control_close(made);
        return code;
    }
    *control = made;
    return SS_OK;
}

extern "C" ss_code ss_control_exchange(ss_control *control, const void *mine, size_t bytes, void *all,
                                       ss_code (*progress)(void *ctx, ss_error *err), void *ctx, ss_error *err)
{
    return guarded(*control, "exchange", -1, err, [&] {
        control->exchange(mine, bytes, all, [&] {
            ss_error error{};
            if (progress(ctx, &error) != SS_OK) {
                throw error;
            }
        });
    });
}

extern "C" ss_code ss_control_look(ss_control *control, int ask_store, ss_error *err)
{
    try {
        (void)control->look(ask_store != 0);
        return SS_OK;
    } catch (const Failure &failure) {
        return ss_fail_at(err, failure.code, failure.rank, -1, "%s", failure.text.c_str());
    }
}

extern "C" int ss_control_lost(ss_control *control) { return control->dead(); }

extern "C" void ss_control_waits(ss_control *control, uint64_t number) { control->waits('b', number); }

extern "C" void ss_control_missing(ss_control *control, uint64_t number, char *missing, size_t size)
{
    std::snprintf(missing, size, "%s", control->missing('b', number).c_str());
}

extern "C" void ss_control_tell(ss_control *control, ss_code code, int rank, const char *message)
{
    const bool lost = code == SS_ERR_PEER_LOST;
    control->tell(lost ? 'L' : 'A', lost ? rank : control->base->rank, message);
}

extern "C" void ss_control_fail(ss_control *control, const char *message)
{
    (void)guarded(*control, "fail", -1, nullptr, [&] { control->give_up(message); }); // not when one is known to all already
}

extern "C" void ss_control_close(ss_control *control)
{
    if (control != nullptr && control->any_pending()) {
        control->abandon_group();
    }
    delete control;
}
