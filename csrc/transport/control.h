/*
 * The control channel of a transport whose data goes elsewhere: small messages between the hosts of the ranks, over a torch
 * process group with a backend for CPU tensors (Gloo), and what the ranks know of each other's failures. Implemented by
 * the shim; c10d and nccl share it.
 *
 * Failures. A death on this host is seen through pidfds; one elsewhere through the backend's own error. fail() and what
 * one rank learnt reach the others through a key in the group's store. After any failure but a timeout or an interrupt
 * the channel only repeats it.
 */
#ifndef SHARDSTEP_TRANSPORT_CONTROL_H
#define SHARDSTEP_TRANSPORT_CONTROL_H

#include "transport/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ss_control ss_control;

/* Collective; ends within base->timeout seconds. `group` is torch's group_name; NULL where there is one rank only. Rank,
   world, timeout and callbacks are read from `base`, whose traffic is counted and whose name begins every message. */
ss_code ss_control_open(const char *group, ss_transport *base, ss_control **control, ss_error *err);

/* Collective; see ss_transport_ops.exchange. `progress` is called again and again while waiting; its failure ends the wait. */
ss_code ss_control_exchange(ss_control *control, const void *mine, size_t bytes, void *all,
                            ss_code (*progress)(void *ctx, ss_error *err), void *ctx, ss_error *err);

/* Never waits for a peer, and may be called by any thread: has a peer died, or (asking the store, which is a round trip) has
   some rank given up? SS_OK when not. */
ss_code ss_control_look(ss_control *control, int ask_store, ss_error *err);

/* See ss_transport_ops.lost. */
int ss_control_lost(ss_control *control);

/* For whom does this rank wait? Ranks that wait for long say so, by the number of what they wait for; on a timeout those that
   have not come so far are named. `missing` gets " (ranks 1 and 3 were not seen there)" or "". Any thread. */
void ss_control_waits(ss_control *control, uint64_t number);
void ss_control_missing(ss_control *control, uint64_t number, char *missing, size_t size);

/* Tells the others what this rank has found out (SS_ERR_PEER_LOST: of `rank`), so that their waits end. Any thread. */
void ss_control_tell(ss_control *control, ss_code code, int rank, const char *message);

/* Tells the others that this rank has given up. Never waits for a peer. */
void ss_control_fail(ss_control *control, const char *message);
void ss_control_close(ss_control *control);

#ifdef __cplusplus
}
#endif
#endif
