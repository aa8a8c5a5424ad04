/*
 * The `nccl` transport: the vtable of transport.h over a communicator of its own, on a stream of its own.
 *
 * Order. Launches and publishes are one sequence, the same on every rank. Bucket b's collective waits, on the
 * communication stream, for what the caller's stream had got at the launch; reduce() and collect() make the caller's
 * stream wait for the collective. No call waits for the device. That a bucket is reduced (SS_REDUCE_SETTLED) is said only
 * when the device is done, which also means that no peer reads it any more.
 *
 * Groups. Small buckets share one group call. Ranks that group differently could choose different algorithms for one
 * collective, so groups are cut by bytes, and where the sequence is at the same place on every rank (reduce, settle,
 * collect, release), never by what happens to be ready.
 *
 * Memory. Chunks come from ncclMemAlloc and are registered with the communicator where the version has that.
 * At least one rank must contribute to every launched bucket, as in c10d.
 *
 * Failures. The communicator is non-blocking. A thread looks at collectives that are not done after half a second: for an
 * asynchronous error of NCCL's, a dead peer, a peer that has given up, and the timeout. It then aborts the communicator, so
 * that whoever waits for the device goes on, and every later call raises.
 */
#ifndef SHARDSTEP_TRANSPORT_NCCL_H
#define SHARDSTEP_TRANSPORT_NCCL_H

#include "core/device.h"
#include "transport/nccl_api.h"
#include "transport/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char *override, *wheel; /* where NCCL may be: see ss_nccl_load */
    const char *control_group;    /* see ss_control_open; NULL where there is one rank */
    const char *identity;         /* equal for ranks that use the same GPU */
    int rank, world;
    double timeout;
} ss_nccl_options;

/* Collective; ends within `timeout` seconds. Holds a reference to `device`. */
ss_code ss_nccl_open(const ss_nccl_options *config, ss_device *device, ss_transport **transport, ss_error *err);

#ifdef __cplusplus
}
#endif
#endif
