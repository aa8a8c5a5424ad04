/* What the two files of the wire between processes have in common. */
#ifndef SHARDSTEP_TRANSPORT_SHM_WIRE_PRIVATE_H
#define SHARDSTEP_TRANSPORT_SHM_WIRE_PRIVATE_H

#include <poll.h>
#include <unistd.h>

#include "transport/shm.h"

#define SS_WIRE_SLICE_SECONDS 0.1 /* no single wait is longer */

typedef struct {
    int socket, pidfd; /* -1: none */
} ss_wire_peer;

typedef struct {
    void *base;
    size_t bytes;
} ss_wire_mapping;

typedef struct {
    ss_shm_wire base;
    ss_wire_peer *peers;
    ss_wire_mapping *mappings; /* of peers' memory */
    size_t n_mappings;
    uint64_t serial;   /* of the last share */
    int broken;        /* a share failed: ranks no longer agree on the serial */
} ss_process_wire;

static inline void ss_close_fd(int *fd)
{
    if (*fd >= 0) {
        close(*fd);
        *fd = -1;
    }
}

/* The error that errno stands for. */
ss_code ss_wire_errno(ss_error *err, const char *what, int rank);

/* poll() in seconds; an interrupted call counts as one that found nothing. */
int ss_wire_poll(struct pollfd *fds, nfds_t n, double seconds);

/* Sends one packet, with a descriptor unless `fd` is -1. A peer that is gone is no error: whether it is needed shows
   when something is wanted from it, which it may have sent before. */
ss_code ss_wire_send(ss_process_wire *w, int rank, const void *data, size_t bytes, int fd, double deadline,
                     ss_error *err);

/* Receives one packet; *fd becomes the descriptor that came with it, or -1. */
ss_code ss_wire_receive(ss_process_wire *w, int rank, void *data, size_t bytes, int *fd, double deadline,
                        ss_error *err);

/* Fills in all peers; on failure some may be open. */
ss_code ss_wire_connect(ss_process_wire *w, const char *nonce, ss_error *err);

#endif
