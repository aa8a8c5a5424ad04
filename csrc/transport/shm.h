/*
 * The embedded transport: ranks on one host that read each other's memory.
 *
 * The protocol (shm.c) works on base pointers and epoch words; how a peer's memory comes to be visible is the matter of
 * a small "wire": memfds passed over abstract sockets between processes (shm_wire.c), or plain heap pointers between
 * threads for the race detector (in the tests).
 */
#ifndef SHARDSTEP_TRANSPORT_SHM_H
#define SHARDSTEP_TRANSPORT_SHM_H

#include "kernels/kernels.h"
#include "transport/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ss_shm_wire ss_shm_wire;
typedef struct {
    /* Collective: makes `bytes` of zeroed memory of mine visible to all peers. bases[k] becomes where rank k's memory is
       seen here (bases[rank] is mine, writable; the others may be read-only but for the control area). */
    ss_code (*share)(ss_shm_wire *wire, size_t bytes, ss_region **region, void **bases, ss_error *err);
    /* Is this peer still alive? Never blocks. */
    int (*alive)(ss_shm_wire *wire, int rank);
    void (*close)(ss_shm_wire *wire);
} ss_shm_wire_ops;

struct ss_shm_wire {
    const ss_shm_wire_ops *ops;
    int rank, world;
    double timeout;
};

/* Collective. Connects `world` processes of one host and one user that know the same `nonce`. */
ss_code ss_shm_wire_open(const char *nonce, int rank, int world, double timeout, ss_shm_wire **wire, ss_error *err);

/* Takes the wire over (also when it fails). */
ss_code ss_shm_open(ss_shm_wire *wire, const ss_kernels *kernels, const ss_transport_callbacks *callbacks,
                    ss_transport **transport, ss_error *err);

#ifdef __cplusplus
}
#endif
#endif
