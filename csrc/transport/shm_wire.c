/*
 * Makes the memory of processes on one host visible to each other.
 *
 * Every rank listens on an abstract socket named by the nonce and connects to all lower ranks, so that each pair has
 * one socket for life. Memory is a memfd per share(): it has no name in a file system, so a killed rank leaves nothing
 * behind, and /dev/shm's limit does not apply. Its descriptor travels by SCM_RIGHTS and is closed once mapped.
 *
 * A peer is gone when its pidfd says that its process has ended, or when its socket hangs up. The socket alone would
 * not do: a forked child's copy keeps it open. All descriptors are close-on-exec, and no step waits past its deadline.
 */
#define _GNU_SOURCE
#include "transport/shm.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "transport/shm_words.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

#define SLICE_SECONDS 0.1
#define CONNECT_SECONDS 10.0 /* how long an absent rank is waited for before the handshake is given up */
#define GREETING 0x73687264u /* also the version of this handshake */

typedef struct {
    uint32_t greeting;
    int32_t rank, world;
} hello;

/* Accompanies a descriptor. */
typedef struct {
    uint64_t serial, bytes;
} offer;

typedef struct {
    int socket, pidfd; /* -1: none */
} peer;

typedef struct {
    void *base;
    size_t bytes;
} mapping;

typedef struct {
    ss_shm_wire base;
    peer *peers;
    mapping *mappings; /* of peers' memory */
    size_t n_mappings;
    uint64_t serial;   /* of the last share */
    int broken;        /* a share failed: ranks no longer agree on the serial */
} process_wire;

/* Small helpers ---------------------------------------------------------------------------------------------------- */

static void close_fd(int *fd)
{
    if (*fd >= 0) {
        close(*fd);
        *fd = -1;
    }
}

static ss_code system_failure(ss_error *err, const char *what, int rank)
{
    int error = errno;
    char name[128];
    ss_code code = error == ENOMEM || error == ENOSPC ? SS_ERR_NO_MEMORY : SS_ERR_TRANSPORT;
    return ss_fail_at(err, code, rank, -1, "%s: %s", what, strerror_r(error, name, sizeof name));
}

static int poll_for(struct pollfd *fds, nfds_t n, double seconds)
{
    int r = poll(fds, n, seconds > 0 ? (int)(seconds * 1000) + 1 : 0);
    return r < 0 && errno == EINTR ? 0 : r;
}

static int process_alive(ss_shm_wire *wire, int rank)
{
    if (rank == wire->rank) {
        return 1;
    }
    const peer *p = &((process_wire *)wire)->peers[rank];
    struct pollfd fds[2] = {{p->pidfd, POLLIN, 0}, {p->socket, POLLRDHUP, 0}};
    if (p->socket < 0 || poll_for(fds, 2, 0) < 0) {
        return 0;
    }
    return fds[0].revents == 0 && fds[1].revents == 0;
}

/* Waits until the peer's socket is ready for `events`, which a hang-up is not unless something is left to read. */
static ss_code wait_socket(process_wire *w, int rank, short events, double deadline, ss_error *err)
{
    for (;;) {
        int alive = process_alive(&w->base, rank);
        struct pollfd fd = {w->peers[rank].socket, events, 0};
        double left = deadline - ss_now();
        double slice = left < SLICE_SECONDS ? left : SLICE_SECONDS;
        if (poll_for(&fd, 1, alive ? slice : 0) < 0) {
            return system_failure(err, "poll", rank);
        }
        if (fd.revents & events) {
            return SS_OK; /* also with nothing but an end of file to read */
        }
        if (w->base.waiting != NULL) {
            SS_TRY(w->base.waiting(w->base.waiting_ctx, err));
        }
        if (!alive || fd.revents != 0) {
            return ss_fail_at(err, SS_ERR_PEER_LOST, rank, -1, "rank %d has died while rank %d waited for its memory",
                              rank, w->base.rank);
        }
        if (left <= 0) {
            return ss_fail_at(err, SS_ERR_TIMEOUT, rank, -1, "rank %d has waited in vain for the memory of rank %d",
                              w->base.rank, rank);
        }
    }
}

/* Sends one packet, with a descriptor unless `fd` is -1. */
static ss_code send_packet(process_wire *w, int rank, const void *data, size_t bytes, int fd, double deadline,
                           ss_error *err)
{
    struct iovec part = {(void *)data, bytes};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        packet.msg_control = control.space;
        packet.msg_controllen = sizeof control.space;
        struct cmsghdr *c = CMSG_FIRSTHDR(&packet);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    for (;;) {
        ssize_t n = sendmsg(w->peers[rank].socket, &packet, MSG_NOSIGNAL);
        if (n == (ssize_t)bytes) {
            return SS_OK;
        }
        if (n < 0 && (errno == EPIPE || errno == ECONNRESET)) {
            /* Gone. Whether I need it shows when I want something from it: it may have sent that before. */
            return SS_OK;
        }
        if (n >= 0 || (errno != EAGAIN && errno != EINTR)) {
            return system_failure(err, "sending to a peer", rank);
        }
        SS_TRY(wait_socket(w, rank, POLLOUT, deadline, err));
    }
}

/* Receives one packet; *fd becomes the descriptor that came with it, or -1. */
static ss_code receive_packet(process_wire *w, int rank, void *data, size_t bytes, int *fd, double deadline,
                              ss_error *err)
{
    struct iovec part = {data, bytes};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    *fd = -1;
    for (;;) {
        struct msghdr packet = {.msg_iov = &part,
                                .msg_iovlen = 1,
                                .msg_control = control.space,
                                .msg_controllen = sizeof control.space};
        ssize_t n = recvmsg(w->peers[rank].socket, &packet, MSG_CMSG_CLOEXEC);
        if (n > 0) {
            struct cmsghdr *c = CMSG_FIRSTHDR(&packet);
            if (c != NULL && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
                memcpy(fd, CMSG_DATA(c), sizeof *fd);
            }
            if ((size_t)n == bytes && (packet.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0) {
                return SS_OK;
            }
            close_fd(fd);
            return ss_fail_at(err, SS_ERR_TRANSPORT, rank, -1,
                              "rank %d has sent something unexpected (or this process is out of descriptors)", rank);
        }
        if (n == 0 || errno == ECONNRESET) {
            if (w->base.waiting != NULL) {
                SS_TRY(w->base.waiting(w->base.waiting_ctx, err));
            }
            return ss_fail_at(err, SS_ERR_PEER_LOST, rank, -1, "rank %d has left while rank %d waited for its memory",
                              rank, w->base.rank);
        }
        if (errno != EAGAIN && errno != EINTR) {
            return system_failure(err, "receiving from a peer", rank);
        }
        SS_TRY(wait_socket(w, rank, POLLIN, deadline, err));
    }
}

/* Sharing ---------------------------------------------------------------------------------------------------------- */

static size_t page_rounded(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

static void unmap_region(ss_region *region)
{
    munmap(region->base, page_rounded(region->bytes));
    free(region);
}

/* My own memory, all of it allocated now: a lack of memory is an error here rather than a SIGBUS later. */
static ss_code make_memory(size_t bytes, int *fd, ss_region **made, ss_error *err)
{
    ss_code code;
    size_t mapped = page_rounded(bytes);
    ss_region *region = calloc(1, sizeof *region);
    if (region == NULL) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "out of memory");
    }
    *fd = memfd_create("shardstep", MFD_CLOEXEC);
    if (*fd < 0 || ftruncate(*fd, (off_t)mapped) != 0) {
        goto failed;
    }
    while (fallocate(*fd, 0, 0, (off_t)mapped) != 0) {
        if (errno != EINTR) {
            goto failed;
        }
    }
    void *base = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, *fd, 0);
    if (base == MAP_FAILED) {
        goto failed;
    }
    region->base = base;
    region->bytes = bytes;
    region->destroy = unmap_region;
    atomic_init(&region->references, 1);
    *made = region;
    return SS_OK;

failed:
    code = system_failure(err, "allocating shared memory", -1);
    ss_error_prefix(err, "%zu bytes", bytes);
    close_fd(fd);
    free(region);
    return code;
}

static ss_code map_peer(process_wire *w, int rank, size_t bytes, ss_shm_access access, double deadline, void **base,
                        ss_error *err)
{
    offer theirs;
    int fd;
    SS_TRY(receive_packet(w, rank, &theirs, sizeof theirs, &fd, deadline, err));
    struct stat status;
    size_t mapped = page_rounded(bytes);
    if (theirs.serial != w->serial || theirs.bytes != bytes) {
        close_fd(&fd);
        return ss_fail_at(err, SS_ERR_MISMATCH, rank, -1, "rank %d shares %llu bytes and rank %d shares %zu", rank,
                          (unsigned long long)theirs.bytes, w->base.rank, bytes);
    }
    if (fd < 0 || fstat(fd, &status) != 0 || (uint64_t)status.st_size < mapped) {
        close_fd(&fd);
        return ss_fail_at(err, SS_ERR_TRANSPORT, rank, -1, "rank %d has sent no usable memory", rank);
    }
    int protection = access == SS_SHM_PEERS_WRITE ? PROT_READ | PROT_WRITE : PROT_READ;
    void *address = mmap(NULL, mapped, protection, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) {
        ss_code code = system_failure(err, "mapping a peer's memory", rank);
        close_fd(&fd);
        return code;
    }
    close_fd(&fd);
    w->mappings[w->n_mappings++] = (mapping){address, mapped};
    *base = address;
    return SS_OK;
}

/* Names all the ranks from `first` on that have sent nothing. */
static ss_code share_timed_out(process_wire *w, int first, ss_error *err)
{
    char ranks[128] = "";
    for (int k = first; k < w->base.world; k++) {
        struct pollfd fd = {w->peers[k].socket, POLLIN, 0};
        size_t used = strlen(ranks);
        if (k != w->base.rank && poll_for(&fd, 1, 0) == 0) {
            snprintf(ranks + used, sizeof ranks - used, "%s%d", used > 0 ? ", " : "", k);
        }
    }
    return ss_fail_at(err, SS_ERR_TIMEOUT, first, -1, "rank %d has waited %g s in vain for the memory of rank%s %s",
                      w->base.rank, w->base.timeout, strchr(ranks, ',') != NULL ? "s" : "", ranks);
}

static ss_code share_with_peers(process_wire *w, size_t bytes, ss_shm_access access, int fd, void **bases, ss_error *err)
{
    double deadline = ss_now() + w->base.timeout;
    offer mine = {w->serial, bytes};
    for (int k = 0; k < w->base.world; k++) {
        if (k != w->base.rank) {
            SS_TRY(send_packet(w, k, &mine, sizeof mine, fd, deadline, err));
        }
    }
    for (int k = 0; k < w->base.world; k++) {
        ss_code code = k != w->base.rank ? map_peer(w, k, bytes, access, deadline, &bases[k], err) : SS_OK;
        if (code != SS_OK) {
            return code == SS_ERR_TIMEOUT ? share_timed_out(w, k, err) : code;
        }
    }
    return SS_OK;
}

static ss_code process_share(ss_shm_wire *wire, size_t bytes, ss_shm_access access, ss_region **region, void **bases,
                             ss_error *err)
{
    process_wire *w = (process_wire *)wire;
    if (w->broken) {
        return ss_fail(err, SS_ERR_TRANSPORT, "sharing memory failed before; ranks are no longer in step");
    }
    mapping *mappings = realloc(w->mappings, (w->n_mappings + (size_t)wire->world) * sizeof *mappings);
    if (mappings == NULL) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "out of memory");
    }
    w->mappings = mappings;

    int fd = -1;
    ss_region *mine = NULL;
    w->serial++;
    w->broken = 1;
    SS_TRY(make_memory(bytes, &fd, &mine, err));
    ss_code code = share_with_peers(w, bytes, access, fd, bases, err);
    close_fd(&fd);
    if (code != SS_OK) {
        ss_region_release(mine);
        return code;
    }
    w->broken = 0;
    bases[wire->rank] = mine->base;
    *region = mine;
    return SS_OK;
}

static void process_close(ss_shm_wire *wire)
{
    process_wire *w = (process_wire *)wire;
    for (size_t i = 0; i < w->n_mappings; i++) {
        munmap(w->mappings[i].base, w->mappings[i].bytes);
    }
    for (int k = 0; w->peers != NULL && k < wire->world; k++) {
        close_fd(&w->peers[k].socket);
        close_fd(&w->peers[k].pidfd);
    }
    free(w->mappings);
    free(w->peers);
    free(w);
}

static const ss_shm_wire_ops process_ops = {process_share, process_alive, process_close};

/* Connecting ------------------------------------------------------------------------------------------------------- */

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
        return system_failure(err, "asking who a peer is", rank);
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

static ss_code check_hello(const process_wire *w, const hello *theirs, ss_error *err)
{
    if (theirs->greeting != GREETING || theirs->world != w->base.world) {
        return ss_fail(err, SS_ERR_TRANSPORT, "a peer speaks another version, or of %d ranks instead of %d",
                       (int)theirs->world, w->base.world);
    }
    return SS_OK;
}

static ss_code connect_to(process_wire *w, const char *nonce, int rank, double deadline, ss_error *err)
{
    peer *p = &w->peers[rank];
    struct sockaddr_un address;
    socklen_t size = address_of(nonce, rank, &address);
    p->socket = new_socket();
    if (p->socket < 0) {
        return system_failure(err, "socket", rank);
    }
    while (connect(p->socket, (struct sockaddr *)&address, size) != 0) {
        if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR) {
            return system_failure(err, "connecting to a peer", rank);
        }
        if (ss_now() >= deadline) {
            return ss_fail_at(err, SS_ERR_TRANSPORT, rank, -1, "rank %d does not listen on this host", rank);
        }
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    SS_TRY(identify(p->socket, rank, &p->pidfd, err));
    hello mine = {GREETING, w->base.rank, w->base.world};
    return send_packet(w, rank, &mine, sizeof mine, -1, deadline, err);
}

static ss_code await_answer(process_wire *w, int rank, double deadline, ss_error *err)
{
    hello theirs;
    int fd;
    SS_TRY(receive_packet(w, rank, &theirs, sizeof theirs, &fd, deadline, err));
    close_fd(&fd);
    return check_hello(w, &theirs, err);
}

/* Accepts one higher rank. A connection's hello is read through the slot of my own rank, which is otherwise unused,
   until it says whose it is. */
static ss_code accept_one(process_wire *w, int listener, double deadline, ss_error *err)
{
    peer *unknown = &w->peers[w->base.rank];
    while ((unknown->socket = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) < 0) {
        if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
            return system_failure(err, "accept", -1);
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
        poll_for(&fd, 1, left < SLICE_SECONDS ? left : SLICE_SECONDS);
    }
    hello theirs;
    int fd;
    SS_TRY(identify(unknown->socket, -1, &unknown->pidfd, err));
    SS_TRY(receive_packet(w, w->base.rank, &theirs, sizeof theirs, &fd, deadline, err));
    close_fd(&fd);
    SS_TRY(check_hello(w, &theirs, err));
    if (theirs.rank <= w->base.rank || theirs.rank >= w->base.world || w->peers[theirs.rank].socket >= 0) {
        return ss_fail_at(err, SS_ERR_TRANSPORT, theirs.rank, -1, "two peers claim to be rank %d", (int)theirs.rank);
    }
    w->peers[theirs.rank] = *unknown;
    *unknown = (peer){-1, -1};
    hello mine = {GREETING, w->base.rank, w->base.world};
    return send_packet(w, theirs.rank, &mine, sizeof mine, -1, deadline, err);
}

static ss_code connect_all(process_wire *w, const char *nonce, int listener, ss_error *err)
{
    double deadline = ss_now() + (w->base.timeout < CONNECT_SECONDS ? w->base.timeout : CONNECT_SECONDS);
    struct sockaddr_un address;
    socklen_t size = address_of(nonce, w->base.rank, &address);
    if (bind(listener, (struct sockaddr *)&address, size) != 0 || listen(listener, w->base.world) != 0) {
        return system_failure(err, "listening for peers", -1);
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

ss_code ss_shm_wire_open(const char *nonce, int rank, int world, double timeout, ss_shm_wire **wire, ss_error *err)
{
    struct sockaddr_un address;
    if (world < 1 || rank < 0 || rank >= world || !(timeout > 0)) {
        return ss_fail(err, SS_ERR_USAGE, "rank %d of %d ranks, with a timeout of %g s, makes no sense", rank, world,
                       timeout);
    }
    if (nonce == NULL || strlen(nonce) + 32 > sizeof address.sun_path) {
        return ss_fail(err, SS_ERR_USAGE, "the nonce must have at most %zu characters", sizeof address.sun_path - 32);
    }
    process_wire *w = calloc(1, sizeof *w);
    peer *peers = calloc((size_t)world, sizeof *peers);
    if (w == NULL || peers == NULL) {
        free(w);
        free(peers);
        return ss_fail(err, SS_ERR_NO_MEMORY, "out of memory for a wire of %d ranks", world);
    }
    for (int k = 0; k < world; k++) {
        peers[k] = (peer){-1, -1};
    }
    w->base = (ss_shm_wire){.ops = &process_ops, .rank = rank, .world = world, .timeout = timeout};
    w->peers = peers;

    if (world > 1) {
        int listener = new_socket();
        ss_code code =
            listener >= 0 ? connect_all(w, nonce, listener, err) : system_failure(err, "socket", -1);
        close_fd(&listener);
        if (code != SS_OK) {
            ss_error_prefix(err, "no shared memory among these ranks");
            if (err != NULL) {
                err->code = SS_ERR_TRANSPORT;
            }
            process_close(&w->base);
            return SS_ERR_TRANSPORT;
        }
    }
    *wire = &w->base;
    return SS_OK;
}

ss_code ss_shm_identity(char *line, size_t size, ss_error *err)
{
    char boot[64] = "";
    struct stat network;
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, boot, sizeof boot - 1) : -1;
    close_fd(&fd);
    if (n <= 0 || stat("/proc/self/ns/net", &network) != 0) {
        return ss_fail(err, SS_ERR_TRANSPORT, "this host does not say which it is (no /proc?)");
    }
    boot[strcspn(boot, "\n")] = '\0';
    int length = snprintf(line, size, "%s net:%llu uid:%u", boot, (unsigned long long)network.st_ino,
                          (unsigned)geteuid());
    return length > 0 && (size_t)length < size ? SS_OK : ss_fail(err, SS_ERR_USAGE, "a buffer of %zu bytes is too small", size);
}
