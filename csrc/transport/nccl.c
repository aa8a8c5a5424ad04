/* The vtable of the nccl transport. See nccl.h. */
#include "transport/nccl.h"

#include "transport/nccl_private.h"

static ss_code find(ss_nccl *t, ss_nccl_kind kind, int bucket, ss_error *err)
{
    if (bucket < 0 || bucket >= t->n_buckets) {
        return ss_fail_at(err, SS_ERR_USAGE, -1, bucket, "nccl, rank %d: there are only %d buckets", t->base.rank, t->n_buckets);
    }
    if (kind == SS_NCCL_GATHER_PARAM && t->buckets[bucket].spec.param_offset == SIZE_MAX) {
        return ss_fail_at(err, SS_ERR_USAGE, -1, bucket, "nccl, rank %d: bucket %d has no parameter plane", t->base.rank, bucket);
    }
    return SS_OK;
}

static ss_code misuse(const ss_nccl *t, int bucket, const char *what, ss_error *err)
{
    return ss_fail_at(err, SS_ERR_USAGE, -1, bucket, "nccl, rank %d: bucket %d %s", t->base.rank, bucket, what);
}

static ss_nccl_kind gather_of(ss_plane plane) { return plane == SS_PLANE_GRAD ? SS_NCCL_GATHER_GRAD : SS_NCCL_GATHER_PARAM; }

/* From here on the communication stream is behind the caller's, and the collective is in the sequence. */
static ss_code begin(ss_nccl *t, ss_event *ready, ss_nccl_task task, uint64_t *number, ss_error *err)
{
    const ss_device_ops *device = t->device->ops;
    ss_stream current;
    SS_TRY(device->current(t->device, &current, err));
    SS_TRY(device->record(t->device, ready, current, err));
    pthread_mutex_lock(&t->lock);
    ss_code code;
    SS_TRY_GOTO(code, ss_nccl_usable(t, err), out);
    SS_TRY_GOTO(code, device->wait(t->device, ready, t->stream, err), out);
    SS_TRY_GOTO(code, ss_nccl_add(t, task, number, err), out);
    code = ss_nccl_pump(t, err);
out:
    pthread_mutex_unlock(&t->lock);
    return code;
}

static ss_code begin_bucket(ss_nccl *t, int bucket, ss_nccl_kind kind, ss_error *err)
{
    ss_nccl_bucket *b = &t->buckets[bucket];
    ss_nccl_task task = {bucket, kind, ss_nccl_plane(b, kind), ss_nccl_segment_bytes(b, kind)};
    return begin(t, b->ready, task, &b->batch[kind], err);
}

/* From here on the caller's stream is behind the collective. */
static ss_code follow(ss_nccl *t, uint64_t number, ss_nccl_kind kind, int bucket, ss_error *err)
{
    SS_TRY(ss_nccl_await_issued(t, number, ss_nccl_phase(kind), bucket, err));
    pthread_mutex_lock(&t->lock);
    ss_event *end = ss_nccl_end_of(t, number);
    pthread_mutex_unlock(&t->lock);
    if (end != NULL) { /* only this thread issues, so the event keeps its mark */
        ss_stream current;
        SS_TRY(t->device->ops->current(t->device, &current, err));
        SS_TRY(t->device->ops->wait(t->device, end, current, err));
    }
    pthread_mutex_lock(&t->lock);
    ss_code code = ss_nccl_usable(t, err);
    pthread_mutex_unlock(&t->lock);
    return code;
}

static ss_code follow_bucket(ss_nccl *t, int bucket, ss_nccl_kind kind, ss_error *err)
{
    ss_nccl_bucket *b = &t->buckets[bucket];
    if (!b->awaited[kind]) {
        SS_TRY(follow(t, b->batch[kind], kind, bucket, err));
        b->awaited[kind] = true;
    }
    return SS_OK;
}

static void cut(ss_nccl *t)
{
    pthread_mutex_lock(&t->lock);
    ss_nccl_cut(t);
    pthread_mutex_unlock(&t->lock);
}

/* Ends a round of one kind. */
static ss_code finish(ss_nccl *t, ss_nccl_kind kind, ss_error *err)
{
    cut(t);
    for (int b = 0; b < t->n_buckets; b++) {
        if (t->buckets[b].batch[kind] != 0) {
            SS_TRY(follow_bucket(t, b, kind, err));
        }
    }
    for (int b = 0; b < t->n_buckets; b++) {
        t->buckets[b].batch[kind] = 0;
        t->buckets[b].awaited[kind] = false;
    }
    pthread_mutex_lock(&t->lock);
    ss_code code = ss_nccl_usable(t, err);
    pthread_mutex_unlock(&t->lock);
    return code;
}

static ss_code nccl_launch(ss_transport *base, int bucket, int contributes, ss_error *err)
{
    ss_nccl *t = ss_nccl_of(base);
    SS_TRY(find(t, SS_NCCL_REDUCE, bucket, err));
    const ss_nccl_bucket *b = &t->buckets[bucket];
    if (b->batch[SS_NCCL_REDUCE] != 0) {
        return misuse(t, bucket, "was already launched in this round", err);
    }
    if (!contributes) {
        size_t bytes = ss_nccl_segment_bytes(b, SS_NCCL_REDUCE) * (size_t)base->world;
        SS_TRY(t->device->ops->zero(t->device, ss_nccl_plane(b, SS_NCCL_REDUCE), bytes, err));
    }
    return begin_bucket(t, bucket, SS_NCCL_REDUCE, err);
}

static ss_code nccl_poll(ss_transport *base, int bucket, ss_reduce_state *state, ss_error *err)
{
    ss_nccl *t = ss_nccl_of(base);
    SS_TRY(find(t, SS_NCCL_REDUCE, bucket, err));
    uint64_t number = t->buckets[bucket].batch[SS_NCCL_REDUCE];
    if (number == 0) {
        return misuse(t, bucket, "was not launched in this round", err);
    }
    pthread_mutex_lock(&t->lock);
    ss_code code = ss_nccl_pump(t, err);
    *state = number <= t->retired || t->buckets[bucket].awaited[SS_NCCL_REDUCE] ? SS_REDUCE_SETTLED : SS_REDUCE_PENDING;
    pthread_mutex_unlock(&t->lock);
    return code;
}

static ss_code nccl_reduce(ss_transport *base, int bucket, ss_error *err)
{
    ss_nccl *t = ss_nccl_of(base);
    SS_TRY(find(t, SS_NCCL_REDUCE, bucket, err));
    if (t->buckets[bucket].batch[SS_NCCL_REDUCE] == 0) {
        return misuse(t, bucket, "was not launched in this round", err);
    }
    cut(t);
    return follow_bucket(t, bucket, SS_NCCL_REDUCE, err);
}

static ss_code nccl_settle(ss_transport *base, ss_error *err) { return finish(ss_nccl_of(base), SS_NCCL_REDUCE, err); }

static ss_code progress(void *transport, ss_error *err)
{
    ss_nccl *t = transport;
    pthread_mutex_lock(&t->lock);
    ss_code code = ss_nccl_pump(t, err);
    pthread_mutex_unlock(&t->lock);
    return code;
}

/* Not a place to cut: one rank launches before an exchange what another launches after it. */
static ss_code nccl_exchange(ss_transport *base, const void *mine, size_t bytes, void *all, ss_error *err)
{
    ss_nccl *t = ss_nccl_of(base);
    SS_TRY(progress(t, err));
    return ss_control_exchange(t->control, mine, bytes, all, progress, t, err);
}

static ss_code nccl_publish(ss_transport *base, ss_plane plane, int bucket, ss_error *err)
{
    ss_nccl *t = ss_nccl_of(base);
    ss_nccl_kind kind = gather_of(plane);
    SS_TRY(find(t, kind, bucket, err));
    if (t->buckets[bucket].batch[kind] != 0) {
        return misuse(t, bucket, "was already published", err);
    }
    return begin_bucket(t, bucket, kind, err);
}

static ss_code nccl_collect(ss_transport *base, ss_plane plane, int bucket, ss_error *err)
{
    ss_nccl *t = ss_nccl_of(base);
    ss_nccl_kind kind = gather_of(plane);
    SS_TRY(find(t, kind, bucket, err));
    if (t->buckets[bucket].batch[kind] == 0) {
        return misuse(t, bucket, "was not published", err);
    }
    cut(t);
    return follow_bucket(t, bucket, kind, err);
}

/* A collective that is done has left my memory, so there is no need to hear from the peers. */
static ss_code nccl_release(ss_transport *base, ss_plane plane, ss_error *err)
{
    return finish(ss_nccl_of(base), gather_of(plane), err);
}

static ss_code nccl_gather(ss_transport *base, void *all, size_t bytes, ss_error *err)
{
    ss_nccl *t = ss_nccl_of(base);
    uint64_t number = 0;
    SS_TRY(begin(t, t->ready, (ss_nccl_task){-1, SS_NCCL_GATHER_MEMORY, all, bytes}, &number, err));
    cut(t);
    return follow(t, number, SS_NCCL_GATHER_MEMORY, -1, err);
}

static void nccl_fail(ss_transport *base, const char *message)
{
    ss_nccl *t = ss_nccl_of(base);
    ss_error error = {0};
    ss_fail_at(&error, SS_ERR_ABORTED, base->rank, -1, "nccl, rank %d: this rank had given up: %s", base->rank, message);
    pthread_mutex_lock(&t->lock);
    if (t->failed.code == SS_OK) {
        ss_nccl_fail(t, &error, NULL);
    }
    pthread_mutex_unlock(&t->lock);
    ss_control_fail(t->control, message);
}

static int nccl_lost(ss_transport *base)
{
    return ss_control_lost(ss_nccl_of(base)->control);
}

const ss_transport_ops ss_nccl_ops = {
    .size = sizeof(ss_transport_ops),
    .name = "nccl",
    .in_order = 1,
    .add_chunk = ss_nccl_add_chunk,
    .launch = nccl_launch,
    .poll = nccl_poll,
    .reduce = nccl_reduce,
    .settle = nccl_settle,
    .exchange = nccl_exchange,
    .publish = nccl_publish,
    .collect = nccl_collect,
    .release = nccl_release,
    .gather = nccl_gather,
    .fail = nccl_fail,
    .lost = nccl_lost,
    .close = ss_nccl_close,
};
