/*
 * The `c10d` transport: the vtable of transport.h over any torch process group on CPU tensors.
 *
 * Rounds. Launches and publishes go through one first-in-first-out queue onto the data group, so every rank must make
 * them in the same order, launches and publishes taken together. At least one rank must contribute to every launched
 * bucket: this transport has no way to leave a segment as it is when none does, it would be set to zero.
 *
 * How a bucket is reduced depends on the backend, and the same way is taken on every rank:
 *   Gloo, one host or at most four ranks   every rank scatters its bucket, each sums its own segment in rank order:
 *                                          (W-1)/W of the bucket on the wire, the bits of the shm transport
 *   Gloo otherwise                         all-reduce in place, 2(W-1)/W on the wire, its ring beats the scatters' roots
 *   any other backend                      reduce-scatter into a scratch segment (MPI forbids aliased buffers)
 * Gloo's own reduce-scatter and all-gather make full-size temporaries and take twice to five times as long.
 * Segments are gathered by one broadcast per owner, in place on every backend.
 *
 * Memory beyond the buckets: receive buffers of (W-1)/W of a bucket for each bucket in flight (Gloo's scatters), or of
 * one segment (reduce-scatter), 64 MiB or one bucket at most; further launches wait in the queue.
 *
 * Failures. A death on this host is seen through pidfds; one elsewhere through the backend's own error. fail() and
 * what one rank learnt reach the others through a key in the control group's store, looked at every 250 ms of waiting.
 * After any failure but a timeout or an interrupt the transport only repeats it. Collectives that are still pending
 * then end when the process group does or at its own timeout; the memory they use stays alive until then.
 *
 * Completion is polled, so the backend's work must tell it through its future or isCompleted() (Gloo's own flat
 * reduce-scatter, not used here, would need a wait()).
 *
 * No function needs the GIL, and the groups must have been created before. A group that is implemented in Python
 * must be kept alive by its owner until close.
 */
#ifndef SHARDSTEP_TRANSPORT_C10D_H
#define SHARDSTEP_TRANSPORT_C10D_H

#include "transport/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Collective; ends within `timeout` seconds. `data_group` carries buckets; `control_group` carries exchange() and must
 * be another group of the same ranks, so that control messages never interleave with collectives of buckets. Both are
 * torch's group_name; `rank` and `world` are those within the groups. `callbacks` is copied and may be NULL.
 */
ss_code ss_c10d_open(const char *data_group, const char *control_group, int rank, int world, double timeout,
                     const ss_transport_callbacks *callbacks, ss_transport **transport, ss_error *err);

#ifdef __cplusplus
}
#endif
#endif
