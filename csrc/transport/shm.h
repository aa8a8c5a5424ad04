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

typedef enum {
    SS_SHM_PEERS_READ, /* only its owner writes there */
    SS_SHM_PEERS_WRITE /* peers write there too: the doorbells, nothing else */
} ss_shm_access;

typedef struct ss_shm_wire ss_shm_wire;
typedef struct {
    /* Collective: makes `bytes` of zeroed memory of mine visible to all peers. bases[k] becomes where rank k's memory
       is seen here: bases[rank] is mine, writable, alive as long as *region is referenced; the others stay until close
       and may be mapped read-only unless `access` is SS_SHM_PEERS_WRITE. Bases are aligned to a page. */
    ss_code (*share)(ss_shm_wire *wire, size_t bytes, ss_shm_access access, ss_region **region, void **bases,
                     ss_error *err);
    /* Is this peer still there, neither dead nor disconnected? Never blocks. */
    int (*alive)(ss_shm_wire *wire, int rank);
    /* Drops the mappings of peers' memory and the wire itself. Never blocks. */
    void (*close)(ss_shm_wire *wire);
} ss_shm_wire_ops;

struct ss_shm_wire {
    const ss_shm_wire_ops *ops;
    int rank, world;
    double timeout;
    /* Called about every 100 ms while share() waits, unless NULL; a code other than SS_OK ends the wait with it. */
    ss_code (*waiting)(void *ctx, ss_error *err);
    void *waiting_ctx;
};

/*
 * Writes a line that two processes have in common exactly when ss_shm_wire_open can connect them (same kernel, same
 * network namespace, same user), so that ranks can compare it through a store they already have before they try.
 */
ss_code ss_shm_identity(char *line, size_t size, ss_error *err);

/*
 * Collective. Connects `world` processes of one host and one user that know the same `nonce` (a short string, unique to
 * this call, as abstract socket names are global to the host). Ranks should enter together: a rank waits for the others
 * for 10 seconds, or `timeout` when that is less. Every failure is SS_ERR_TRANSPORT (SS_ERR_USAGE for bad arguments,
 * SS_ERR_NO_MEMORY) and leaves nothing behind; another transport can then be chosen, on all ranks alike.
 *
 * A forked child shares the memory with its parent (it sees live weights, and would change them by writing), but not
 * the connection: it must not use the transport, except to close it.
 */
ss_code ss_shm_wire_open(const char *nonce, int rank, int world, double timeout, ss_shm_wire **wire, ss_error *err);

/* Takes the wire over (also when it fails). */
ss_code ss_shm_open(ss_shm_wire *wire, const ss_kernels *kernels, const ss_transport_callbacks *callbacks,
                    ss_transport **transport, ss_error *err);

#ifdef __cplusplus
}
#endif
#endif
