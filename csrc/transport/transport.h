/*
 * What a transport must do for the engine. One vtable, several implementations (shm, c10d, nccl).
 *
 * Memory. Gradients and parameters live in flat buckets. Bucket b holds world * segment elements; rank r owns
 * elements [r * segment, (r + 1) * segment) of it. There are two planes: SS_PLANE_GRAD and SS_PLANE_PARAM.
 * Buckets are numbered from 0 in the order in which chunks are added; numbers are the same on every rank.
 *
 * A round. Every rank launches bucket b once per round; when all have, each rank's own segment of the gradient plane
 * becomes the sum over the ranks that contribute, in rank order where the transport can. The other segments of a
 * rank's gradient plane are then free for new gradients as soon as every peer has read them ("settled").
 *
 * Calls marked "never blocks" are made from autograd hooks; they must not wait for a peer. All others end within
 * `timeout` seconds, on the death of a peer (within one second), on a peer's ss_transport_fail, or on an interrupt.
 * The engine serialises all calls on one transport.
 */
#ifndef SHARDSTEP_TRANSPORT_H
#define SHARDSTEP_TRANSPORT_H

#include <stdint.h>

#include "core/dtype.h"
#include "core/region.h"
#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { SS_PLANE_GRAD = 0, SS_PLANE_PARAM = 1 } ss_plane;

typedef struct {
    int64_t segment;      /* elements that each rank owns; a multiple of 128, may not be 0 */
    ss_dtype grad_dtype;  /* SS_F32 or SS_F64 */
    ss_dtype param_dtype;
    size_t grad_offset;   /* bytes from the chunk's base, multiple of 256 */
    size_t param_offset;  /* likewise; SIZE_MAX when the chunk has no parameter plane for this bucket */
} ss_bucket_spec;

typedef enum {
    SS_REDUCE_PENDING, /* some rank has not launched it yet, or the sum is not finished */
    SS_REDUCE_DONE,    /* my segment holds the sum, but some peer may still read my other segments */
    SS_REDUCE_SETTLED  /* every peer has read what it needs from my bucket */
} ss_reduce_state;

typedef struct {
    /* Called for consecutive ranges [begin, end) of my segment (elements, relative to the segment) as they become
       final, while hot in cache; together they cover the segment once. May be NULL. */
    void (*reduced)(void *ctx, int bucket, int64_t begin, int64_t end);
    /* Called about every 100 ms while waiting; a non-zero answer ends the wait with SS_ERR_INTERRUPTED. May be NULL. */
    int (*interrupted)(void *ctx);
    void *ctx;
    /* Called around this thread's own work for the sum of a bucket; the end gets what the begin returned. Both or neither. */
    void *(*reduce_begin)(void *ctx, int bucket);
    void (*reduce_end)(void *ctx, void *span);
} ss_transport_callbacks;

typedef struct {
    uint64_t reduce_scatter_bytes; /* bytes this rank received over the wire (or read from peers' memory) */
    uint64_t all_gather_bytes;
    uint64_t control_bytes;
    uint64_t reduce_scatters;      /* buckets reduced with at least one contributing rank */
    uint64_t all_gathers;          /* buckets gathered */
    double wait_seconds;           /* time spent waiting for peers */
} ss_traffic;

typedef struct ss_transport ss_transport;

typedef struct {
    size_t size; /* sizeof(ss_transport_ops) */
    const char *name;
    int in_order; /* 1: rounds must be launched in the same bucket order on every rank */

    /* Collective. Adds `n` buckets in a new zeroed region of `bytes` bytes; *region holds one reference for the
       caller. Called on every rank with the same arguments. */
    ss_code (*add_chunk)(ss_transport *t, const ss_bucket_spec *specs, int n, size_t bytes, ss_region **region,
                         ss_error *err);

    /* Never blocks. My gradient of `bucket` is final for this round. When `contributes` is 0 its content counts as
       zeros on every rank whatever the memory holds. When no rank contributes, my segment is left as it is. */
    ss_code (*launch)(ss_transport *t, int bucket, int contributes, ss_error *err);

    /* Never blocks. Does what can be done for a launched bucket now (including the sum itself) and says where it is. */
    ss_code (*poll)(ss_transport *t, int bucket, ss_reduce_state *state, ss_error *err);

    /* Blocks until my segment of the launched bucket holds the sum. Other launched buckets may progress meanwhile. */
    ss_code (*reduce)(ss_transport *t, int bucket, ss_error *err);

    /* Blocks until all the buckets that I launched are settled; every rank calls it after the same launches. Ends the
       round: the same buckets may be launched again. */
    ss_code (*settle)(ss_transport *t, ss_error *err);

    /* Collective, blocks. all[k * bytes .. (k + 1) * bytes) becomes rank k's message. `bytes` is equal on all ranks and
       not limited. While waiting, launched buckets progress. Exchanges are independent of rounds. */
    ss_code (*exchange)(ss_transport *t, const void *mine, size_t bytes, void *all, ss_error *err);

    /* Never blocks. My own segment of `bucket` in `plane` is final; peers may read it. Buckets are published in the
       same order on every rank. */
    ss_code (*publish)(ss_transport *t, ss_plane plane, int bucket, ss_error *err);

    /* Blocks until all other segments of a published bucket are copied from their owners into mine. */
    ss_code (*collect)(ss_transport *t, ss_plane plane, int bucket, ss_error *err);

    /* Collective, blocks until every peer has collected what I published, so that I may write there again. */
    ss_code (*release)(ss_transport *t, ss_plane plane, ss_error *err);

    /* NULL where memory is the host's. Collective. all[k * bytes .. (k + 1) * bytes) in device memory becomes rank k's, behind
       what the caller's stream has got and before what it gets. Part of the one sequence of launches and publishes. */
    ss_code (*gather)(ss_transport *t, void *all, size_t bytes, ss_error *err);

    /* Tells all peers that this rank cannot go on, so that their waits end with SS_ERR_ABORTED and this message. Never
       blocks. The transport is of no use afterwards. */
    void (*fail)(ss_transport *t, const char *message);

    /* Never blocks. A peer whose process has ended, or that has closed its transport, as far as this rank can see; or -1. */
    int (*lost)(ss_transport *t);

    /* Frees everything but regions that are still referenced. Never blocks. */
    void (*close)(ss_transport *t);
} ss_transport_ops;

struct ss_transport {
    const ss_transport_ops *ops;
    int rank, world;
    double timeout; /* seconds, for every blocking call */
    ss_transport_callbacks callbacks;
    ss_traffic traffic;
};

static inline void *ss_reduce_begin(const ss_transport *t, int bucket)
{
    return t->callbacks.reduce_begin != NULL ? t->callbacks.reduce_begin(t->callbacks.ctx, bucket) : NULL;
}
static inline void ss_reduce_end(const ss_transport *t, void *span)
{
    if (t->callbacks.reduce_end != NULL) {
        t->callbacks.reduce_end(t->callbacks.ctx, span);
    }
}

#ifdef __cplusplus
}
#endif
#endif
