#define _GNU_SOURCE
/*
 * Groups of collectives on their way through NCCL: filled, queued, issued (which a non-blocking communicator may do in the
 * background), running on the device, done. And the thread that watches those which do not get done.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "transport/nccl_private.h"

#define GROUP_BYTES ((size_t)1 << 20) /* collectives below it cost mostly their launch, which a group shares */
#define SUSPICIOUS 0.5                /* seconds after which a collective is looked at */
#define TELL_AFTER 1.0                /* and after which peers are told that this rank waits for it */
#define STORE_EVERY 0.5
#define NAP_NS 20000

double ss_nccl_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

const char *ss_nccl_phase(ss_nccl_kind kind) { return kind == SS_NCCL_REDUCE ? "reduce-scatter" : "all-gather"; }

size_t ss_nccl_segment_bytes(const ss_nccl_bucket *b, ss_nccl_kind kind)
{
    return (size_t)b->spec.segment * ss_dtype_size(kind == SS_NCCL_GATHER_PARAM ? b->spec.param_dtype : b->spec.grad_dtype);
}

char *ss_nccl_plane(const ss_nccl_bucket *b, ss_nccl_kind kind)
{
    return (char *)b->region->base + (kind == SS_NCCL_GATHER_PARAM ? b->spec.param_offset : b->spec.grad_offset);
}

/* Failures --------------------------------------------------------------------------------------------------------- */

ss_code ss_nccl_usable(const ss_nccl *t, ss_error *err)
{
    if (t->failed.code != SS_OK && err != NULL) {
        *err = t->failed;
    }
    return t->failed.code;
}

ss_code ss_nccl_fail(ss_nccl *t, const ss_error *error, ss_error *err)
{
    if (t->failed.code == SS_OK) {
        t->failed = *error;
    }
    if (t->comm != NULL) { /* ends what is running, so that the device goes on */
        t->api.comm_abort(t->comm);
        t->comm = NULL;
    }
    return ss_nccl_usable(t, err);
}

ss_code ss_nccl_failed(ss_nccl *t, int result, const char *phase, int bucket, ss_error *err)
{
    ss_error error = {0};
    char of[32] = "";
    if (bucket >= 0) {
        snprintf(of, sizeof of, " of bucket %d", bucket);
    }
    const char *detail = t->comm != NULL ? t->api.get_last_error(t->comm) : NULL;
    ss_fail_at(&error, SS_ERR_TRANSPORT, -1, bucket, "nccl, rank %d, %s%s: NCCL says: %s%s%s; the communicator was aborted",
               t->base.rank, phase, of, t->api.get_error_string(result), detail != NULL && *detail != '\0' ? ": " : "",
               detail != NULL ? detail : "");
    return ss_nccl_fail(t, &error, err);
}

/* Is NCCL busy with a call that it took? */
static ss_code busy(ss_nccl *t, const char *phase, int bucket, bool *is_busy, ss_error *err)
{
    SS_TRY(ss_nccl_usable(t, err));
    int state = SS_NCCL_SUCCESS, result = t->api.comm_get_async_error(t->comm, &state);
    result = result == SS_NCCL_SUCCESS ? state : result;
    *is_busy = result == SS_NCCL_IN_PROGRESS;
    if (result != SS_NCCL_SUCCESS && result != SS_NCCL_IN_PROGRESS) {
        return ss_nccl_failed(t, result, phase, bucket, err);
    }
    return SS_OK;
}

/* The sequence ----------------------------------------------------------------------------------------------------- */

static ss_nccl_batch *new_batch(ss_nccl *t)
{
    ss_nccl_batch *b = t->spare;
    if (b != NULL) {
        t->spare = b->next;
    } else {
        b = calloc(1, sizeof *b);
        if (b == NULL || (b->end = t->device->ops->new_event(t->device)) == NULL) {
            free(b);
            return NULL;
        }
    }
    b->next = NULL;
    b->number = ++t->numbers;
    b->bytes = 0;
    b->n = 0;
    b->issuing = b->told = false;
    return b;
}

ss_code ss_nccl_add(ss_nccl *t, ss_nccl_task task, uint64_t *number, ss_error *err)
{
    if (t->open == NULL && (t->open = new_batch(t)) == NULL) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "nccl, rank %d: out of memory for a group of collectives", t->base.rank);
    }
    ss_nccl_batch *b = t->open;
    if (b->n == b->capacity) {
        int capacity = 2 * b->capacity + 8;
        ss_nccl_task *tasks = realloc(b->tasks, (size_t)capacity * sizeof *tasks);
        if (tasks == NULL) {
            return ss_fail(err, SS_ERR_NO_MEMORY, "nccl, rank %d: out of memory for a group of collectives", t->base.rank);
        }
        b->tasks = tasks;
        b->capacity = capacity;
    }
    b->tasks[b->n++] = task;
    b->bytes += task.bytes * (size_t)t->base.world;
    *number = b->number;
    if (b->bytes >= GROUP_BYTES) {
        ss_nccl_cut(t);
    }
    return SS_OK;
}

void ss_nccl_cut(ss_nccl *t)
{
    if (t->open != NULL) {
        *t->queued_end = t->open;
        t->queued_end = &t->open->next;
        t->open = NULL;
    }
}

static int issue_task(ss_nccl *t, const ss_nccl_task *task)
{
    char *all = task->memory, *mine = all + (size_t)t->base.rank * task->bytes;
    uint64_t moved = (uint64_t)(t->base.world - 1) * task->bytes;
    if (task->kind == SS_NCCL_REDUCE) {
        const ss_bucket_spec *spec = &t->buckets[task->bucket].spec;
        t->base.traffic.reduce_scatter_bytes += moved;
        t->base.traffic.reduce_scatters++;
        int type = spec->grad_dtype == SS_F64 ? SS_NCCL_FLOAT64 : SS_NCCL_FLOAT32;
        return t->api.reduce_scatter(all, mine, (size_t)spec->segment, type, SS_NCCL_SUM, t->comm, t->stream.native);
    }
    if (task->kind == SS_NCCL_GATHER_MEMORY) {
        t->base.traffic.control_bytes += moved;
    } else {
        t->base.traffic.all_gather_bytes += moved;
        t->base.traffic.all_gathers++;
    }
    return t->api.all_gather(mine, all, task->bytes, SS_NCCL_INT8, t->comm, t->stream.native);
}

static ss_code issue(ss_nccl *t, ss_nccl_batch *b, ss_error *err)
{
    int result = t->api.group_start(), failed = -1;
    for (int k = 0; k < b->n && (result == SS_NCCL_SUCCESS || result == SS_NCCL_IN_PROGRESS); k++) {
        void *span = b->tasks[k].kind == SS_NCCL_REDUCE ? ss_reduce_begin(&t->base, b->tasks[k].bucket) : NULL;
        result = issue_task(t, &b->tasks[k]);
        ss_reduce_end(&t->base, span);
        failed = k;
    }
    int ended = t->api.group_end(); /* also after a failure: groups nest */
    b->issuing = true;
    b->since = ss_nccl_now();
    result = result == SS_NCCL_SUCCESS || result == SS_NCCL_IN_PROGRESS ? ended : result;
    if (result != SS_NCCL_SUCCESS && result != SS_NCCL_IN_PROGRESS) {
        const ss_nccl_task *task = &b->tasks[failed < 0 ? 0 : failed];
        return ss_nccl_failed(t, result, ss_nccl_phase(task->kind), task->bucket, err);
    }
    return SS_OK;
}

static ss_code retire(ss_nccl *t, ss_error *err)
{
    while (t->running != NULL) {
        ss_nccl_batch *b = t->running;
        int done = 0;
        SS_TRY(t->device->ops->done(t->device, b->end, &done, err));
        if (!done) {
            break;
        }
        t->running = b->next;
        t->running_end = t->running == NULL ? &t->running : t->running_end;
        t->retired = b->number;
        b->next = t->spare;
        t->spare = b;
    }
    return SS_OK;
}

static ss_code issue_queued(ss_nccl *t, ss_error *err)
{
    while (t->queued != NULL) {
        ss_nccl_batch *b = t->queued;
        bool is_busy = false;
        const char *phase = ss_nccl_phase(b->tasks[0].kind);
        int bucket = b->tasks[0].bucket;
        SS_TRY(busy(t, phase, bucket, &is_busy, err)); /* or failed, since it was asked last */
        if (!is_busy && !b->issuing) {
            SS_TRY(issue(t, b, err));
            SS_TRY(busy(t, phase, bucket, &is_busy, err));
        }
        if (is_busy) { /* the kernel may not be in the stream yet: an event now would mark too little */
            return SS_OK;
        }
        SS_TRY(t->device->ops->record(t->device, b->end, t->stream, err));
        t->queued = b->next;
        t->queued_end = t->queued == NULL ? &t->queued : t->queued_end;
        b->next = NULL;
        *t->running_end = b;
        t->running_end = &b->next;
        t->issued = b->number;
    }
    return SS_OK;
}

ss_code ss_nccl_pump(ss_nccl *t, ss_error *err)
{
    SS_TRY(ss_nccl_usable(t, err));
    int before = t->device->ops->enter(t->device);
    ss_code code = issue_queued(t, err);
    t->device->ops->leave(t->device, before);
    SS_TRY(code);
    return retire(t, err);
}

ss_event *ss_nccl_end_of(const ss_nccl *t, uint64_t number)
{
    for (ss_nccl_batch *b = t->running; b != NULL; b = b->next) {
        if (b->number == number) {
            return b->end;
        }
    }
    return NULL;
}

/* Waiting for NCCL's host side ------------------------------------------------------------------------------------- */

typedef struct {
    double begin, interrupt_at, store_at;
} nccl_wait;

static ss_code lost(ss_nccl *t, const ss_error *found, const char *phase, int bucket, ss_error *err)
{
    ss_error error = {0};
    char of[32] = "";
    if (bucket >= 0) {
        snprintf(of, sizeof of, " of bucket %d", bucket);
    }
    ss_fail_at(&error, found->code, found->rank, bucket, "nccl, rank %d, %s%s: %s; the communicator was aborted", t->base.rank,
               phase, of, found->message);
    pthread_mutex_lock(&t->lock);
    ss_code code = ss_nccl_fail(t, &error, err);
    pthread_mutex_unlock(&t->lock);
    ss_control_tell(t->control, found->code, found->rank, error.message);
    return code;
}

static ss_code too_late(ss_nccl *t, uint64_t number, const char *phase, int bucket, ss_error *err)
{
    ss_error found = {0};
    char missing[256] = "";
    ss_control_missing(t->control, number, missing, sizeof missing);
    ss_fail(&found, SS_ERR_TIMEOUT, "not done within %g seconds%s", t->base.timeout, missing);
    return lost(t, &found, phase, bucket, err);
}

/* One turn of waiting, without the lock. */
static ss_code nap(ss_nccl *t, nccl_wait *w, uint64_t number, const char *phase, int bucket, ss_error *err)
{
    struct timespec pause = {0, NAP_NS};
    nanosleep(&pause, NULL);
    double now = ss_nccl_now();
    t->base.traffic.wait_seconds += 1e-9 * NAP_NS;
    if (now >= w->interrupt_at) {
        ss_error found = {0};
        w->interrupt_at = now + 0.1;
        if (t->base.callbacks.interrupted != NULL && t->base.callbacks.interrupted(t->base.callbacks.ctx)) {
            return ss_fail_at(err, SS_ERR_INTERRUPTED, -1, bucket, "nccl, rank %d, %s: interrupted while waiting for peers",
                              t->base.rank, phase);
        }
        bool ask = now >= w->store_at;
        w->store_at = ask ? now + STORE_EVERY : w->store_at;
        if (ss_control_look(t->control, ask, &found) != SS_OK) {
            return lost(t, &found, phase, bucket, err);
        }
    }
    return now - w->begin < t->base.timeout ? SS_OK : too_late(t, number, phase, bucket, err);
}

ss_code ss_nccl_await_issued(ss_nccl *t, uint64_t number, const char *phase, int bucket, ss_error *err)
{
    double now = ss_nccl_now();
    nccl_wait w = {now, now + 0.1, now + STORE_EVERY};
    while (true) {
        pthread_mutex_lock(&t->lock);
        ss_code code = ss_nccl_pump(t, err);
        bool there = number != 0 ? number <= t->issued : t->queued == NULL;
        pthread_mutex_unlock(&t->lock);
        if (code != SS_OK || there) {
            return code;
        }
        SS_TRY(nap(t, &w, number, phase, bucket, err));
    }
}

ss_code ss_nccl_complete(ss_nccl *t, int result, const char *phase, ss_error *err)
{
    double now = ss_nccl_now();
    nccl_wait w = {now, now + 0.1, now + STORE_EVERY};
    bool is_busy = result == SS_NCCL_IN_PROGRESS;
    if (!is_busy && result != SS_NCCL_SUCCESS) {
        pthread_mutex_lock(&t->lock);
        ss_code code = ss_nccl_failed(t, result, phase, -1, err);
        pthread_mutex_unlock(&t->lock);
        return code;
    }
    while (is_busy) {
        pthread_mutex_lock(&t->lock);
        ss_code code = busy(t, phase, -1, &is_busy, err);
        pthread_mutex_unlock(&t->lock);
        SS_TRY(code);
        if (is_busy) {
            SS_TRY(nap(t, &w, 0, phase, -1, err));
        }
    }
    return SS_OK;
}

/* The watching thread ---------------------------------------------------------------------------------------------- */

/* What the device, or NCCL, has been busy with for so long that somebody should look. With the lock held. */
static ss_nccl_batch *suspect(ss_nccl *t)
{
    ss_nccl_batch *oldest = t->running != NULL ? t->running : t->queued != NULL && t->queued->issuing ? t->queued : NULL;
    return oldest != NULL && ss_nccl_now() - oldest->since >= SUSPICIOUS ? oldest : NULL;
}

/* Looks once. With the lock held on entry and at the end, not in between. */
static void look(ss_nccl *t, double *store_at)
{
    ss_error err = {0};
    if (t->failed.code != SS_OK || retire(t, &err) != SS_OK) {
        return;
    }
    ss_nccl_batch *b = suspect(t);
    if (b == NULL) {
        return;
    }
    uint64_t number = b->number;
    int bucket = b->tasks[0].bucket;
    const char *phase = ss_nccl_phase(b->tasks[0].kind);
    double now = ss_nccl_now(), age = now - b->since;
    bool is_busy, tell = !b->told && age >= (t->base.timeout < 4.0 ? t->base.timeout / 4.0 : TELL_AFTER);
    b->told |= tell;
    if (busy(t, phase, bucket, &is_busy, &err) != SS_OK) {
        pthread_mutex_unlock(&t->lock);
        ss_control_tell(t->control, err.code, t->base.rank, err.message);
        pthread_mutex_lock(&t->lock);
        return;
    }
    pthread_mutex_unlock(&t->lock);
    bool ask = now >= *store_at;
    *store_at = ask ? now + STORE_EVERY : *store_at;
    if (tell) {
        ss_control_waits(t->control, number);
    }
    if (ss_control_look(t->control, ask, &err) != SS_OK) {
        lost(t, &err, phase, bucket, NULL);
    } else if (age >= t->base.timeout) {
        too_late(t, number, phase, bucket, NULL);
    }
    pthread_mutex_lock(&t->lock);
}

void *ss_nccl_watch(void *transport)
{
    ss_nccl *t = transport;
    double store_at = 0.0;
    pthread_mutex_lock(&t->lock);
    while (!t->stop) {
        look(t, &store_at);
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += 100000000;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        if (!t->stop) {
            pthread_cond_timedwait(&t->stopped, &t->lock, &until);
        }
    }
    pthread_mutex_unlock(&t->lock);
    ss_nccl_release(t);
    return NULL;
}

static void free_list(ss_nccl *t, ss_nccl_batch *b)
{
    while (b != NULL) {
        ss_nccl_batch *next = b->next;
        t->device->ops->free_event(t->device, b->end);
        free(b->tasks);
        free(b);
        b = next;
    }
}

void ss_nccl_free_batches(ss_nccl *t)
{
    free_list(t, t->open);
    free_list(t, t->queued);
    free_list(t, t->running);
    free_list(t, t->spare);
}
