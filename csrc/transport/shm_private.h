/* What the files of the shared-memory protocol have in common. */
#ifndef SHARDSTEP_TRANSPORT_SHM_PRIVATE_H
#define SHARDSTEP_TRANSPORT_SHM_PRIVATE_H

#include "core/origin.h"
#include "transport/shm.h"
#include "transport/shm_words.h"

/* One add_chunk. */
typedef struct ss_shm_chunk ss_shm_chunk;
struct ss_shm_chunk {
    ss_region *region, *words_region; /* my own memory; peers' belongs to the wire */
    ss_shm_chunk *next;
    void *bases[]; /* [0, world): the planes of each rank; [world, 2 * world): its ss_shm_bucket_words */
};

typedef enum { SS_UNPUBLISHED, SS_PUBLISHED, SS_COLLECTED } ss_shm_publication;

typedef struct {
    ss_bucket_spec spec;
    ss_shm_chunk *chunk;
    int index;                 /* within the chunk */
    uint32_t round;            /* launches so far */
    int launched;              /* and not settled */
    int reduced;               /* in this round */
    uint32_t publications[2];  /* per plane */
    ss_shm_publication publication[2];
} ss_shm_bucket;

typedef struct {
    ss_transport base;
    ss_shm_wire *wire;
    const ss_kernels *kernels;
    ss_origin origin; /* a forked child must not write words */

    ss_region *bells_region, *control_region;
    ss_shm_bell **bells;       /* per rank */
    ss_shm_control **controls; /* per rank */

    ss_shm_chunk *chunks;
    ss_shm_bucket *buckets;
    int n_buckets;
    int *launched, n_launched; /* buckets launched and not settled, in order of launch */
    int unreduced;             /* launched[0 .. unreduced) are all reduced already */

    uint32_t exchanged;        /* pieces posted */
    int exchange_broken;       /* an exchange ended half-way; ranks no longer agree on the piece */
    uint32_t releases[2];      /* per plane */
    int releasing[2];          /* a release was entered and did not end */

    int spins;
    double next_check; /* when deaths and interrupts are looked for again */
} ss_shm;

static inline ss_shm_bucket_words *ss_shm_words(const ss_shm *t, int bucket, int rank)
{
    const ss_shm_bucket *b = &t->buckets[bucket];
    return (ss_shm_bucket_words *)b->chunk->bases[t->base.world + rank] + b->index;
}

/* What a rank can wait for. */
typedef enum {
    SS_AWAIT_GRADIENTS, /* peers to launch the bucket */
    SS_AWAIT_READERS,   /* peers to have read the bucket */
    SS_AWAIT_SEGMENT,   /* an owner to publish its segment of the bucket */
    SS_AWAIT_COLLECTED, /* peers to have collected the plane */
    SS_AWAIT_MESSAGE    /* peers to post a piece of an exchange */
} ss_shm_phase;

typedef struct {
    ss_shm_phase phase;
    ss_plane plane;
    int bucket; /* -1 when the phase concerns none */
    uint32_t target;
} ss_shm_await;

#define SS_SHM_ALL (-1)

/* Has `rank` done what is awaited? */
int ss_shm_arrived(const ss_shm *t, const ss_shm_await *what, int rank);

/* Have all ranks? */
int ss_shm_all_arrived(const ss_shm *t, const ss_shm_await *what);

/* Waits until `rank`, or every rank if SS_SHM_ALL, has done what is awaited, or fails at `deadline` (of ss_now) at the
   latest. Meanwhile sums launched buckets whose gradients have arrived. */
ss_code ss_shm_wait(ss_shm *t, const ss_shm_await *what, int rank, double deadline, ss_error *err);

/* Sums the launched buckets for which all gradients have arrived; says whether there were any. Never blocks. */
int ss_shm_progress(ss_shm *t);

/* Wakes all peers that sleep. */
void ss_shm_ring(ss_shm *t);

/* May this transport be used at all? */
ss_code ss_shm_usable(const ss_shm *t, ss_error *err);

/* Passes on that a peer has failed, or that the user wants to stop; for the waits of the wire. */
ss_code ss_shm_while_sharing(void *transport, ss_error *err);

#endif
