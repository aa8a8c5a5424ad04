/*
 * Makes the memory of connected processes visible to each other.
 *
 * Memory is a memfd per share(): it has no name in a file system, so a killed rank leaves nothing behind, and
 * /dev/shm's limit does not apply. Its descriptor travels by SCM_RIGHTS over the pair's socket and is closed once
 * mapped. No step waits past its deadline.
 *
 * A peer is gone when its pidfd says that its process has ended, or when its socket hangs up. The socket alone would
 * not do: a forked child's copy keeps it open.
 */
#define _GNU_SOURCE
#include "transport/shm_wire_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "transport/shm_words.h"

/* Accompanies a descriptor. */
typedef struct {
    uint64_t serial, bytes;
} offer;

/* Packets ---------------------------------------------------------------------------------------------------------- */

ss_code ss_wire_errno(ss_error *err, const char *what, int rank)
{
    int error = errno;
    char name[128];
    ss_code code = error == ENOMEM || error == ENOSPC ? SS_ERR_NO_MEMORY : SS_ERR_TRANSPORT;
    return ss_fail_at(err, code, rank, -1, "%s: %s", what, strerror_r(error, name, sizeof name));
}

int ss_wire_poll(struct pollfd *fds, nfds_t n, double seconds)
{
    int r = poll(fds, n, seconds > 0 ? (int)(seconds * 1000) + 1 : 0);
    return r < 0 && errno == EINTR ? 0 : r;
}

static int process_alive(ss_shm_wire *wire, int rank)
{
    if (rank == wire->rank) {
        return 1;
    }
    const ss_wire_peer *p = &((ss_process_wire *)wire)->peers[rank];
    struct pollfd fds[2] = {{p->pidfd, POLLIN, 0}, {p->socket, POLLRDHUP, 0}};
    if (p->socket < 0 || ss_wire_poll(fds, 2, 0) < 0) {
        return 0;
    }
    return fds[0].revents == 0 && fds[1].revents == 0;
}

/* Waits until the peer's socket is ready for `events`, which a hang-up is not unless something is left to read. */
static ss_code wait_socket(ss_process_wire *w, int rank, short events, double deadline, ss_error *err)
{
    for (;;) {
        int alive = process_alive(&w->base, rank);
        struct pollfd fd = {w->peers[rank].socket, events, 0};
        double left = deadline - ss_now();
        double slice = left < SS_WIRE_SLICE_SECONDS ? left : SS_WIRE_SLICE_SECONDS;
        if (ss_wire_poll(&fd, 1, alive ? slice : 0) < 0) {
            return ss_wire_errno(err, "poll", rank);
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

ss_code ss_wire_send(ss_process_wire *w, int rank, const void *data, size_t bytes, int fd, double deadline,
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
            return SS_OK;
        }
        if (n >= 0 || (errno != EAGAIN && errno != EINTR)) {
            return ss_wire_errno(err, "sending to a peer", rank);
        }
        SS_TRY(wait_socket(w, rank, POLLOUT, deadline, err));
    }
}

ss_code ss_wire_receive(ss_process_wire *w, int rank, void *data, size_t bytes, int *fd, double deadline,
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
            ss_close_fd(fd);
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
            return ss_wire_errno(err, "receiving from a peer", rank);
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
    code = ss_wire_errno(err, "allocating shared memory", -1);
    ss_error_prefix(err, "%zu bytes", bytes);
    ss_close_fd(fd);
    free(region);
    return code;
}

static ss_code map_peer(ss_process_wire *w, int rank, size_t bytes, ss_shm_access access, double deadline, void **base,
                        ss_error *err)
{
    offer theirs;
    int fd;
    SS_TRY(ss_wire_receive(w, rank, &theirs, sizeof theirs, &fd, deadline, err));
    struct stat status;
    size_t mapped = page_rounded(bytes);
    if (theirs.serial != w->serial || theirs.bytes != bytes) {
        ss_close_fd(&fd);
        return ss_fail_at(err, SS_ERR_MISMATCH, rank, -1, "rank %d shares %llu bytes and rank %d shares %zu", rank,
                          (unsigned long long)theirs.bytes, w->base.rank, bytes);
    }
    if (fd < 0 || fstat(fd, &status) != 0 || (uint64_t)status.st_size < mapped) {
        ss_close_fd(&fd);
        return ss_fail_at(err, SS_ERR_TRANSPORT, rank, -1, "rank %d has sent no usable memory", rank);
    }
    int protection = access == SS_SHM_PEERS_WRITE ? PROT_READ | PROT_WRITE : PROT_READ;
    void *address = mmap(NULL, mapped, protection, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) {
        ss_code code = ss_wire_errno(err, "mapping a peer's memory", rank);
        ss_close_fd(&fd);
        return code;
    }
    ss_close_fd(&fd);
    w->mappings[w->n_mappings++] = (ss_wire_mapping){address, mapped};
    *base = address;
    return SS_OK;
}

/* Names all the ranks from `first` on that have sent nothing. */
static ss_code share_timed_out(ss_process_wire *w, int first, ss_error *err)
{
    char ranks[128] = "";
    for (int k = first; k < w->base.world; k++) {
        struct pollfd fd = {w->peers[k].socket, POLLIN, 0};
        size_t used = strlen(ranks);
        if (k != w->base.rank && ss_wire_poll(&fd, 1, 0) == 0) {
            snprintf(ranks + used, sizeof ranks - used, "%s%d", used > 0 ? ", " : "", k);
        }
    }
    return ss_fail_at(err, SS_ERR_TIMEOUT, first, -1, "rank %d has waited %g s in vain for the memory of rank%s %s",
                      w->base.rank, w->base.timeout, strchr(ranks, ',') != NULL ? "s" : "", ranks);
}

static ss_code share_with_peers(ss_process_wire *w, size_t bytes, ss_shm_access access, int fd, void **bases,
                                ss_error *err)
{
    double deadline = ss_now() + w->base.timeout;
    offer mine = {w->serial, bytes};
    for (int k = 0; k < w->base.world; k++) {
        if (k != w->base.rank) {
            SS_TRY(ss_wire_send(w, k, &mine, sizeof mine, fd, deadline, err));
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
    ss_process_wire *w = (ss_process_wire *)wire;
    if (w->broken) {
        return ss_fail(err, SS_ERR_TRANSPORT, "sharing memory failed before; ranks are no longer in step");
    }
    ss_wire_mapping *mappings = realloc(w->mappings, (w->n_mappings + (size_t)wire->world) * sizeof *mappings);
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
    ss_close_fd(&fd);
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
    ss_process_wire *w = (ss_process_wire *)wire;
    for (size_t i = 0; i < w->n_mappings; i++) {
        munmap(w->mappings[i].base, w->mappings[i].bytes);
    }
    for (int k = 0; w->peers != NULL && k < wire->world; k++) {
        ss_close_fd(&w->peers[k].socket);
        ss_close_fd(&w->peers[k].pidfd);
    }
    free(w->mappings);
    free(w->peers);
    free(w);
}

static const ss_shm_wire_ops process_ops = {process_share, process_alive, process_close};

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
    ss_process_wire *w = calloc(1, sizeof *w);
    ss_wire_peer *peers = calloc((size_t)world, sizeof *peers);
    if (w == NULL || peers == NULL) {
        free(w);
        free(peers);
        return ss_fail(err, SS_ERR_NO_MEMORY, "out of memory for a wire of %d ranks", world);
    }
    for (int k = 0; k < world; k++) {
        peers[k] = (ss_wire_peer){-1, -1};
    }
    w->base = (ss_shm_wire){.ops = &process_ops, .rank = rank, .world = world, .timeout = timeout};
    w->peers = peers;

    if (ss_wire_connect(w, nonce, err) != SS_OK) {
        ss_error_prefix(err, "no shared memory among these ranks");
        if (err != NULL) {
            err->code = SS_ERR_TRANSPORT; /* also when a peer came too late, or died */
        }
        process_close(&w->base);
        return SS_ERR_TRANSPORT;
    }
    *wire = &w->base;
    return SS_OK;
}
