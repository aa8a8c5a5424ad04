// How a transport knows its peers: who they are, whether they live, and what they have to say about failures.
#ifndef SHARDSTEP_SHIM_C10D_PEERS_HPP
#define SHARDSTEP_SHIM_C10D_PEERS_HPP

#include <poll.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/status.h"

namespace shardstep {

// An error on its way out of this file; only `guarded` turns it into an ss_code.
struct Failure {
    ss_code code;
    int rank;
    std::string text;
};

inline uint64_t fnv1a(const std::string &text)
{
    uint64_t hash = 14695981039346656037u;
    for (unsigned char c : text) {
        hash = (hash ^ c) * 1099511628211u;
    }
    return hash;
}

// Field 22 of /proc/<pid>/stat: with the pid it names a process for good.
inline uint64_t start_time(int64_t pid)
{
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string line;
    std::getline(file, line);
    size_t after_name = line.rfind(')'); // the name may hold spaces
    unsigned long long ticks = 0;
    if (after_name == std::string::npos ||
        std::sscanf(line.c_str() + after_name + 1,
                    " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &ticks) != 1) {
        return 0;
    }
    return ticks;
}

// What every rank tells the others when a transport is opened.
struct Identity {
    uint64_t nonce;       // rank 0's names this transport among all that ever used the store
    uint64_t host;        // equal where pids mean the same: boot id and pid namespace
    int64_t pid;
    uint64_t started;
    uint64_t backend;     // of the data group

    static Identity mine(const std::string &backend)
    {
        Identity id{};
        if (getrandom(&id.nonce, sizeof id.nonce, 0) != static_cast<ssize_t>(sizeof id.nonce)) {
            id.nonce = static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()) ^ static_cast<uint64_t>(getpid());
        }
        std::string boot;
        std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
        char space[64] = "";
        ssize_t length = readlink("/proc/self/ns/pid", space, sizeof space - 1);
        id.host = fnv1a(boot + (length > 0 ? std::string(space, static_cast<size_t>(length)) : ""));
        id.pid = getpid();
        id.started = start_time(id.pid);
        id.backend = fnv1a(backend);
        return id;
    }
};

class Peers {
  public:
    Peers(const std::vector<Identity> &ids, int rank)
    {
        for (int k = 0; k < static_cast<int>(ids.size()); ++k) {
            const Identity &peer = ids[k], &me = ids[rank];
            if (peer.host != me.host) {
                one_host_ = false;
            } else if (peer.pid != me.pid) {
                int fd = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(peer.pid), 0));
                if (fd >= 0 && start_time(peer.pid) != peer.started) { // gone, and its pid already somebody else's
                    close(fd);
                } else if (fd >= 0) {
                    fds_.push_back({fd, POLLIN, 0});
                    ranks_.push_back(k);
                }
            }
        }
    }
    ~Peers()
    {
        for (const pollfd &p : fds_) {
            close(p.fd);
        }
    }
    Peers(const Peers &) = delete;
    Peers &operator=(const Peers &) = delete;

    bool one_host() const { return one_host_; }

    // A rank on this host whose process has ended, or -1.
    int dead()
    {
        if (!fds_.empty() && poll(fds_.data(), fds_.size(), 0) > 0) {
            for (size_t i = 0; i < fds_.size(); ++i) {
                if (fds_[i].revents != 0) {
                    return ranks_[i];
                }
            }
        }
        return -1;
    }

  private:
    std::vector<pollfd> fds_;
    std::vector<int> ranks_;
    bool one_host_ = true;
};

// The key through which one rank tells the others that all is over. "A<rank> <message>": that rank called fail();
// "L<rank> <message>": that rank (or -1) was found lost.
class Notices {
  public:
    Notices(const c10::intrusive_ptr<c10d::Store> &store, uint64_t nonce)
    {
        char key[48];
        std::snprintf(key, sizeof key, "shardstep/fail/%016llx", static_cast<unsigned long long>(nonce));
        key_ = key;
        try {
            // A connection of our own: another thread's blocking get() would hold the shared one for minutes.
            store_ = store ? store->clone() : nullptr;
            if (store_) {
                store_->check({key_});
            }
        } catch (const std::exception &) {
            store_ = nullptr; // a store that cannot be asked: backend errors, pidfds and timeouts are left
        }
    }

    // Throws the failure that some rank published. False when the store itself is gone.
    bool look()
    {
        if (!store_) {
            return !lost_;
        }
        std::string text;
        try {
            if (!store_->check({key_})) {
                return true;
            }
            std::vector<uint8_t> raw = store_->get(key_);
            text.assign(raw.begin(), raw.end());
        } catch (const std::exception &) {
            store_ = nullptr;
            lost_ = true;
            return false;
        }
        int rank = -1, length = 0;
        char kind = 'A';
        std::sscanf(text.c_str(), "%c%d %n", &kind, &rank, &length);
        throw Failure{kind == 'L' ? SS_ERR_PEER_LOST : SS_ERR_ABORTED, rank, text.substr(length)};
    }

    // This rank has waited for long, for number `number` of a kind of its own count.
    void waits(char kind, int rank, uint64_t number) noexcept
    {
        try {
            if (store_) {
                store_->set(waiting(kind, rank), std::to_string(number));
            }
        } catch (...) {
            store_ = nullptr;
        }
    }

    // The ranks that have not said that they wait for this number or a later one. Others may yet have come and gone on.
    std::vector<int> missing(char kind, int me, int world, uint64_t number) noexcept
    {
        std::vector<int> ranks;
        try {
            for (int k = 0; store_ && k < world; ++k) {
                const std::string key = waiting(kind, k);
                if (k == me) {
                    continue;
                }
                if (store_->check({key})) {
                    const std::vector<uint8_t> raw = store_->get(key);
                    if (std::stoull(std::string(raw.begin(), raw.end())) >= number) {
                        continue;
                    }
                }
                ranks.push_back(k);
            }
        } catch (...) {
            store_ = nullptr;
            ranks.clear();
        }
        return ranks;
    }

    void publish(char kind, int rank, const std::string &message) noexcept
    {
        try {
            if (store_) {
                std::string text = kind + std::to_string(rank) + " " + message;
                if (kind == 'A') {
                    store_->set(key_, text); // a send that awaits no answer
                } else {
                    store_->compareSet(key_, "", text); // never over somebody's fail(): that is the cause
                }
            }
        } catch (...) {
            store_ = nullptr;
        }
    }

  private:
    std::string waiting(char kind, int rank) const { return key_ + "/" + kind + std::to_string(rank); }

    c10::intrusive_ptr<c10d::Store> store_;
    std::string key_;
    bool lost_ = false;
};

} // namespace shardstep

#endif
