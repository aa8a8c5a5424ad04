/*
 * Connects the processes of one host and one user that know the same nonce, pairwise and for life.
 *
 * Every rank listens on an abstract socket named by the nonce, connects to all lower ranks and accepts all higher ones.
 * A connection waits in the listener's backlog until it is accepted, so no order of arrival can block. The kernel says
 * who is at the other end; what the peer says is only its rank. All descriptors are close-on-exec.
 */
#define _GNU_SOURCE
#include "transport/shm_wire_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include "transport/shm_words.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

#define CONNECT_SECONDS 10.0 /* how long an absent rank is waited for before the handshake is given up */
#define GREETING 0x73687264u /* also the version of this handshake */

typedef struct {
    uint32_t greeting;
    int32_t rank, world;
} hello;

static socklen_t address_of(const char *nonce, int rank, struct sockaddr_un *address)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    int n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "shardstep-%s-%d", nonce, rank);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static int new_socket(void) { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }

/* Is the process at the other end of `socket` one of my user's? Opens its pidfd; without one (another pid namespace)
   only the socket's end tells of its death. */
static ss_code identify(int socket, int rank, int *pidfd, ss_error *err)
{
    struct ucred who;
    socklen_t size = sizeof who;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) {
        return ss_wire_errno(err, "asking who a peer is", rank);
    }
    if (who.uid != geteuid()) {
        return ss_fail_at(err, SS_ERR_TRANSPORT, rank, -1, "a peer runs as user %u and this process as user %u",
                          (unsigned)who.uid, (unsigned)geteuid());
    }
    size = sizeof *pidfd;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, pidfd, &size) != 0) {
        *pidfd = who.pid > 0 ? (int)syscall(SYS_pidfd_open, who.pid, 0) : -1;
    }
    return SS_OK;
}

static ss_code check_hello(const ss_process_wire *w, const hello *theirs, ss_error *err)
{
    if (theirs->greeting != GREETING || theirs->world != w->base.world) {
        return ss_fail(err, SS_ERR_TRANSPORT, "a peer speaks another version, or of %d ranks instead of %d",
                       (int)theirs->world, w->base.world);
    }
    return SS_OK;
}

static ss_code connect_to(ss_process_wire *w, const char *nonce, int rank, double deadline, ss_error *err)
{
    ss_wire_peer *p = &w->peers[rank];
    struct sockaddr_un address;
    socklen_t size = address_of(nonce, rank, &address);
    p->socket = new_socket();
    if (p->socket < 0) {
        return ss_wire_errno(err, "socket", rank);
    }
    while (connect(p->socket, (struct sockaddr *)&address, size) != 0) {
        if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR) {
            return ss_wire_errno(err, "connecting to a peer", rank);
        }
        if (ss_now() >= deadline) {
            return ss_fail_at(err, SS_ERR_TRANSPORT, rank, -1, "rank %d does not listen on this host", rank);
        }
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    SS_TRY(identify(p->socket, rank, &p->pidfd, err));
    hello mine = {GREETING, w->base.rank, w->base.world};
    return ss_wire_send(w, rank, &mine, sizeof mine, -1, deadline, err);
}

static ss_code await_answer(ss_process_wire *w, int rank, double deadline, ss_error *err)
{
    hello theirs;
    int fd;
    SS_TRY(ss_wire_receive(w, rank, &theirs, sizeof theirs, &fd, deadline, err));
    ss_close_fd(&fd);
    return check_hello(w, &theirs, err);
}

/* Accepts one higher rank. A connection's hello is read through the slot of my own rank, which is otherwise unused,
   until it says whose it is. */
static ss_code accept_one(ss_process_wire *w, int listener, double deadline, ss_error *err)
{
    ss_wire_peer *unknown = &w->peers[w->base.rank];
    while ((unknown->socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) < 0) {
        if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
            return ss_wire_errno(err, "accept", -1);
        }
        double left = deadline - ss_now();
        if (left <= 0) {
            int missing = w->base.rank + 1;
            while (missing + 1 < w->base.world && w->peers[missing].socket >= 0) {
                missing++;
            }
            return ss_fail_at(err, SS_ERR_TRANSPORT, missing, -1, "rank %d has not connected to rank %d", missing,
                              w->base.rank);
        }
        struct pollfd fd = {listener, POLLIN, 0};
        ss_wire_poll(&fd, 1, left < SS_WIRE_SLICE_SECONDS ? left : SS_WIRE_SLICE_SECONDS);
    }
    hello theirs;
    int fd;
    SS_TRY(identify(unknown->socket, -1, &unknown->pidfd, err));
    SS_TRY(ss_wire_receive(w, w->base.rank, &theirs, sizeof theirs, &fd, deadline, err));
    ss_close_fd(&fd);
    SS_TRY(check_hello(w, &theirs, err));
    if (theirs.rank <= w->base.rank || theirs.rank >= w->base.world || w->peers[theirs.rank].socket >= 0) {
        return ss_fail_at(err, SS_ERR_TRANSPORT, theirs.rank, -1, "two peers claim to be rank %d", (int)theirs.rank);
    }
    w->peers[theirs.rank] = *unknown;
    *unknown = (ss_wire_peer){-1, -1};
    hello mine = {GREETING, w->base.rank, w->base.world};
    return ss_wire_send(w, theirs.rank, &mine, sizeof mine, -1, deadline, err);
}

static ss_code connect_all(ss_process_wire *w, const char *nonce, int listener, ss_error *err)
{
    double deadline = ss_now() + (w->base.timeout < CONNECT_SECONDS ? w->base.timeout : CONNECT_SECONDS);
    struct sockaddr_un address;
    socklen_t size = address_of(nonce, w->base.rank, &address);
    if (bind(listener, (struct sockaddr *)&address, size) != 0 || listen(listener, w->base.world) != 0) {
        return ss_wire_errno(err, "listening for peers", -1);
    }
    for (int k = 0; k < w->base.rank; k++) {
        SS_TRY(connect_to(w, nonce, k, deadline, err));
    }
    for (int k = w->base.rank + 1; k < w->base.world; k++) {
        SS_TRY(accept_one(w, listener, deadline, err));
    }
    for (int k = 0; k < w->base.rank; k++) {
        SS_TRY(await_answer(w, k, deadline, err));
    }
    return SS_OK;
}

ss_code ss_wire_connect(ss_process_wire *w, const char *nonce, ss_error *err)
{
    if (w->base.world == 1) {
        return SS_OK;
    }
    int listener = new_socket();
    if (listener < 0) {
        return ss_wire_errno(err, "socket", -1);
    }
    ss_code code = connect_all(w, nonce, listener, err);
    ss_close_fd(&listener);
    return code;
}

ss_code ss_shm_identity(char *line, size_t size, ss_error *err)
{
    char boot[64] = "";
    struct stat network;
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, boot, sizeof boot - 1) : -1;
    ss_close_fd(&fd);
    if (n <= 0 || stat("/proc/self/ns/net", &network) != 0) {
        return ss_fail(err, SS_ERR_TRANSPORT, "this host does not say which it is (no /proc?)");
    }
    boot[strcspn(boot, "\n")] = '\0';
    int length = snprintf(line, size, "%s net:%llu uid:%u", boot, (unsigned long long)network.st_ino,
                          (unsigned)geteuid());
    if (length <= 0 || (size_t)length >= size) {
        return ss_fail(err, SS_ERR_USAGE, "a buffer of %zu bytes is too small", size);
    }
    return SS_OK;
}
