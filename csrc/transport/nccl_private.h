/* What the files of the nccl transport share: nccl.c (the vtable), nccl_batch.c (groups of collectives and what watches
   them), nccl_open.c (beginning, memory and end). */
#ifndef SHARDSTEP_TRANSPORT_NCCL_PRIVATE_H
#define SHARDSTEP_TRANSPORT_NCCL_PRIVATE_H

#include <pthread.h>
#include <stdbool.h>

#include "core/origin.h"
#include "transport/control.h"
#include "transport/nccl.h"

typedef enum {
    SS_NCCL_REDUCE,
    SS_NCCL_GATHER_GRAD,
    SS_NCCL_GATHER_PARAM,
    SS_NCCL_KINDS,                    /* those of buckets */
    SS_NCCL_GATHER_MEMORY = SS_NCCL_KINDS
} ss_nccl_kind;

typedef struct {
    int bucket; /* or -1, with memory of the caller's: */
    ss_nccl_kind kind;
    char *memory;
    size_t bytes; /* of each rank */
} ss_nccl_task;

/* The collectives of one group call. */
typedef struct ss_nccl_batch ss_nccl_batch;
struct ss_nccl_batch {
    ss_nccl_batch *next;
    uint64_t number;
    ss_event *end;   /* on the communication stream, after the last collective */
    double since;    /* when it was issued */
    size_t bytes;
    int n, capacity;
    ss_nccl_task *tasks;
    bool issuing, told; /* given to NCCL, which may be busy with it still; peers know that this rank waits for it */
};

typedef struct {
    ss_bucket_spec spec;
    ss_region *region;
    ss_event *ready;                /* on the caller's stream, at the last launch or publish */
    uint64_t batch[SS_NCCL_KINDS];  /* the number of its batch; 0 for none since settle or release */
    bool awaited[SS_NCCL_KINDS];    /* the caller's stream waits for it */
} ss_nccl_bucket;

typedef struct ss_nccl_chunk ss_nccl_chunk;
struct ss_nccl_chunk {
    ss_nccl_chunk *next;
    ss_region *region;
    void *handle; /* of its registration, or NULL */
};

typedef struct {
    ss_transport base;
    ss_nccl_api api;
    ss_device *device;
    ss_stream stream; /* the communication stream */
    ss_event *ready;  /* as of a bucket, for memory of the caller's */
    ss_control *control;
    ss_origin origin;
    ss_nccl_bucket *buckets;
    int n_buckets;
    ss_nccl_chunk *chunks;

    /* The rest is shared with the watching thread and belongs to the lock. */
    pthread_mutex_t lock;
    pthread_cond_t stopped;
    ss_nccl_comm_t comm; /* NULL once aborted */
    ss_nccl_batch *open;                            /* being filled */
    ss_nccl_batch *queued, **queued_end;            /* complete; the first may be issuing */
    ss_nccl_batch *running, **running_end;          /* issued */
    ss_nccl_batch *spare;
    uint64_t numbers, issued, retired; /* of batches made, issued, done */
    ss_error failed;                   /* its code is SS_OK while all is well */
    int owners;                        /* the transport's user, and the watching thread */
    bool stop;
} ss_nccl;

static inline ss_nccl *ss_nccl_of(ss_transport *t) { return (ss_nccl *)t; }
double ss_nccl_now(void);
const char *ss_nccl_phase(ss_nccl_kind kind);
size_t ss_nccl_segment_bytes(const ss_nccl_bucket *bucket, ss_nccl_kind kind);
char *ss_nccl_plane(const ss_nccl_bucket *bucket, ss_nccl_kind kind);

/* nccl_batch.c. With the lock held: */
/* SS_OK, or the failure that has ended this transport. */
ss_code ss_nccl_usable(const ss_nccl *t, ss_error *err);
/* Ends the transport: aborts the communicator, and repeats this error from now on. Returns its code. */
ss_code ss_nccl_fail(ss_nccl *t, const ss_error *error, ss_error *err);
/* The same for what NCCL has answered; `result` may be any failure. */
ss_code ss_nccl_failed(ss_nccl *t, int result, const char *phase, int bucket, ss_error *err);
/* Adds a collective to the sequence. *number becomes that of its batch. */
ss_code ss_nccl_add(ss_nccl *t, ss_nccl_task task, uint64_t *number, ss_error *err);
/* No more is added to the last group. */
void ss_nccl_cut(ss_nccl *t);
/* Issues what can be issued and notices what is done. Never waits. */
ss_code ss_nccl_pump(ss_nccl *t, ss_error *err);
/* The event that ends an issued batch, or NULL when the device is done with it. */
ss_event *ss_nccl_end_of(const ss_nccl *t, uint64_t number);
/* Without the lock: */
/* Waits until NCCL has taken the batch (number 0: everything that is queued), which it does at once except for the first ones. */
ss_code ss_nccl_await_issued(ss_nccl *t, uint64_t number, const char *phase, int bucket, ss_error *err);
/* Waits until NCCL is done with the call that answered `result`. */
ss_code ss_nccl_complete(ss_nccl *t, int result, const char *phase, ss_error *err);
void *ss_nccl_watch(void *transport); /* the watching thread */
void ss_nccl_free_batches(ss_nccl *t);

/* nccl_open.c */
ss_code ss_nccl_add_chunk(ss_transport *t, const ss_bucket_spec *specs, int n, size_t bytes, ss_region **region,
                          ss_error *err);
void ss_nccl_close(ss_transport *t);
/* One of the two owners lets go. */
void ss_nccl_release(ss_nccl *t);

/* nccl.c */
extern const ss_transport_ops ss_nccl_ops;

#endif
