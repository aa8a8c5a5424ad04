/*
 * The accumulation window on one rank: what happens to a parameter's slot and to its bucket between two closes. Nothing
 * here waits for a peer.
 *
 * The framework's .grad is the truth and may be changed by the user at any time, so every entry first reconciles the
 * state with it.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/engine_state.h"
#include "core/work.h"

static ss_code absorb(ss_engine *e, int32_t i, bool add, ss_error *err);

static void forget(ss_engine *e, int32_t i)
{
    ss_param *p = &e->params[i];
    if (p->sent) {
        p->stale = true;
    }
    if (p->state == SS_BESIDE) {
        e->framework.drop_beside(e->framework.ctx, i);
    }
    p->carried = false;
    p->kept = false;
    p->handing = p->accumulating = false;
    p->state = SS_NONE;
}

/* The user has dropped the gradient (.grad = None, zero_grad, a new tensor), but may hold the tensor. */
ss_code ss_window_drop(ss_engine *e, int32_t i, ss_error *err)
{
    ss_param *p = &e->params[i];
    ss_kept kept = SS_KEPT_NOTHING;
    int64_t begin = 0, numel = 0;
    double norm = NAN;
    if (p->state == SS_NONE) {
        return SS_OK;
    }
    if (p->state == SS_HELD) {
        kept = SS_KEPT_PIECE;
        begin = p->piece.in_param;
        numel = p->piece.numel;
        norm = e->norms_valid && !e->unsettled && e->norm_order == 2.0 ? sqrt(p->norm_total) * fabs(p->scale) : NAN;
    } else if ((p->state == SS_LOCAL || p->state == SS_ZERO) && !p->carried) {
        kept = SS_KEPT_ALL;
        numel = p->state == SS_LOCAL ? p->spec.numel : 0;
    }
    SS_TRY(e->framework.dropped(e->framework.ctx, i, kept, begin, numel, norm, err));
    forget(e, i);
    return SS_OK;
}

static ss_code kept_too_long(const ss_param *p, ss_error *err)
{
    return ss_fail(err, SS_ERR_USAGE,
                   "the gradient of parameter '%s' was set to a tensor kept from an earlier window, which does not hold all "
                   "of it; keep a copy (model.full_grad) and assign that instead", p->name);
}

/* Brings the state in line with the framework's .grad. A tensor the user has put there is this rank's local gradient; only
   when a closed window is being closed again is it, as in DDP, the averaged gradient to step with. */
ss_code ss_window_reconcile(ss_engine *e, int32_t i, bool closing, ss_error *err)
{
    ss_param *p = &e->params[i];
    ss_grad_kind kind = e->framework.kind(e->framework.ctx, i);
    if (kind == SS_GRAD_BOUND) {
        p->handing = false;
        if (p->state == SS_NONE && p->absent) {
            e->framework.unbind(e->framework.ctx, i);
            return SS_OK;
        }
        if (p->state == SS_NONE) {
            return kept_too_long(p, err);
        }
        return SS_OK;
    }
    if (kind == SS_GRAD_STALE) {
        return kept_too_long(p, err);
    }
    if (kind == SS_GRAD_NONE) {
        return p->handing ? SS_OK : ss_window_drop(e, i, err);
    }
    if (p->handing) { /* a close from a hook of the user's that runs inside the accumulation */
        p->handing = false;
        return absorb(e, i, p->state == SS_LOCAL, err);
    }
    if (closing && p->state == SS_HELD && e->buckets[e->layout.placements[i].bucket].phase == SS_CLOSED) {
        if (p->piece.numel > 0) {
            SS_TRY(e->framework.fold_piece(e->framework.ctx, i, p->piece.in_param, p->piece.numel, ss_piece_grad(e, i),
                                           err));
        }
        p->scale = 1.0;
        e->edits++;
        e->norms_valid = false;
        e->buckets[e->layout.placements[i].bucket].norms_ready = false;
        e->framework.bind(e->framework.ctx, i);
        return SS_OK;
    }
    SS_TRY(ss_window_drop(e, i, err));
    return absorb(e, i, false, err);
}

bool ss_window_has_local(const ss_engine *e, int32_t b)
{
    SS_EACH_MEMBER(e, b, i) {
        if (e->params[i].state == SS_LOCAL) {
            return true;
        }
    }
    return false;
}

static ss_code ensure_carry(ss_engine *e, int32_t b, ss_error *err)
{
    ss_bucket *bucket = &e->buckets[b];
    const ss_bucket_shape *shape = &e->layout.buckets[b];
    if (bucket->carry == NULL) {
        size_t bytes = (size_t)shape->segment * ss_dtype_size(shape->grad_dtype);
        SS_TRY(ss_work_memory(e, bytes, &bucket->carry_region, err));
        bucket->carry = bucket->carry_region->base;
    }
    return SS_OK;
}

/* New gradient arrives for a closed bucket: what is still held moves to the carry, the memory becomes ours again. */
ss_code ss_window_reopen_closed(ss_engine *e, int32_t b, ss_error *err)
{
    ss_bucket *bucket = &e->buckets[b];
    bucket->phase = SS_OPEN;
    bucket->norms_ready = false;
    e->norms_valid = false;
    SS_EACH_MEMBER(e, b, i) {
        ss_param *p = &e->params[i];
        if (p->state != SS_HELD) {
            continue;
        }
        ss_grad_kind kind = e->framework.kind(e->framework.ctx, i);
        if (kind == SS_GRAD_STALE) {
            return kept_too_long(p, err);
        }
        if (kind == SS_GRAD_NONE) {
            SS_TRY(ss_window_drop(e, i, err));
            continue;
        }
        SS_TRY(ensure_carry(e, b, err));
        if (kind == SS_GRAD_BOUND) {
            ss_piece_to_carry(e, i, p->scale);
        } else { /* assigned after the close: as in DDP, the averaged gradient */
            if (p->piece.numel > 0) {
                SS_TRY(e->framework.fold_piece(e->framework.ctx, i, p->piece.in_param, p->piece.numel,
                                               ss_piece_carry(e, i), err));
            }
            e->framework.bind(e->framework.ctx, i);
        }
        p->carried = true;
        p->state = SS_ZERO;
    }
    return SS_OK;
}

/* More gradient arrives for a launched bucket that every peer has read: the sum so far moves to the carry. */
ss_code ss_window_reopen_launched(ss_engine *e, int32_t b, ss_error *err)
{
    ss_bucket *bucket = &e->buckets[b];
    SS_TRY(ensure_carry(e, b, err));
    bucket->phase = SS_OPEN;
    bucket->norms_ready = false;
    double scale = 1.0 / e->divide_factor;
    SS_EACH_MEMBER(e, b, i) {
        ss_param *p = &e->params[i];
        if (p->carried) {
            ss_piece_add_carry(e, i, scale);
            ss_piece_to_carry(e, i, 1.0);
        } else {
            ss_piece_to_carry(e, i, scale);
        }
        p->carried = true;
        if (p->state == SS_SENT) {
            p->state = SS_ZERO;
        } else if (p->state == SS_BESIDE) {
            SS_TRY(e->framework.fold_beside(e->framework.ctx, i, err));
            p->state = SS_LOCAL;
        }
    }
    return SS_OK;
}

/* What this round's gradients have come on, the current stream is behind from now on: what the engine and the transport do next
   is ordered by it. */
static void join_streams(ss_engine *e, int32_t b)
{
    ss_bucket *bucket = &e->buckets[b];
    for (int32_t k = 0; k < bucket->n_streams; k++) {
        ss_work_join(e, bucket->streams[k]);
    }
    bucket->n_streams = 0;
}

static ss_code try_reopen(ss_engine *e, int32_t b, ss_error *err)
{
    ss_reduce_state state;
    SS_TRY(e->transport->ops->poll(e->transport, b, &state, err));
    return state == SS_REDUCE_SETTLED ? ss_window_reopen_launched(e, b, err) : SS_OK;
}

/* The OTHER gradient of a parameter becomes the content of its slot, or is added to it, or waits beside it while the slot is
   in flight. */
static ss_code absorb(ss_engine *e, int32_t i, bool add, ss_error *err)
{
    ss_param *p = &e->params[i];
    int32_t b = e->layout.placements[i].bucket;
    ss_bucket *bucket = &e->buckets[b];
    if (bucket->phase == SS_LAUNCHED && p->state != SS_BESIDE) {
        SS_TRY(try_reopen(e, b, err));
    }
    if (bucket->phase == SS_LAUNCHED) {
        SS_TRY(e->framework.add_beside(e->framework.ctx, i, err));
        e->framework.bind(e->framework.ctx, i);
        p->state = SS_BESIDE;
        return try_reopen(e, b, err);
    }
    if (bucket->phase == SS_CLOSED) {
        SS_TRY(ss_window_reopen_closed(e, b, err));
    }
    SS_TRY(e->framework.fold(e->framework.ctx, i, add, err));
    e->framework.bind(e->framework.ctx, i);
    p->state = SS_LOCAL;
    return SS_OK;
}

/* A gradient of this bucket has come, or is read, on the calling thread's current stream. */
static ss_code note_stream(ss_engine *e, int32_t b, ss_error *err)
{
    ss_bucket *bucket = &e->buckets[b];
    ss_stream current;
    if (e->device == NULL) {
        return SS_OK;
    }
    SS_TRY(e->device->ops->current(e->device, &current, err));
    for (int32_t k = 0; k < bucket->n_streams; k++) {
        if (bucket->streams[k].id == current.id) {
            return SS_OK;
        }
    }
    if (bucket->n_streams == SS_BUCKET_STREAMS) {
        join_streams(e, b);
    }
    bucket->streams[bucket->n_streams++] = current;
    return SS_OK;
}

/* My gradient of an open bucket is final for this round. */
ss_code ss_window_launch(ss_engine *e, int32_t b, ss_error *err)
{
    ss_bucket *bucket = &e->buckets[b];
    const ss_bucket_shape *shape = &e->layout.buckets[b];
    SS_EACH_MEMBER(e, b, i) { /* what the user has dropped or replaced since and no backward has come by */
        if (e->params[i].state == SS_LOCAL) {
            SS_TRY(ss_window_reconcile(e, i, false, err));
        }
    }
    bool contributes = ss_window_has_local(e, b);
    join_streams(e, b);
    size_t element = ss_dtype_size(shape->grad_dtype);
    SS_EACH_MEMBER(e, b, i) {
        ss_param *p = &e->params[i];
        if (p->state == SS_LOCAL) {
            p->sent = true;
            p->state = SS_SENT;
            continue;
        }
        if (contributes) {
            ss_work_zero(e, ss_grad_at(e, b, e->layout.placements[i].offset), (size_t)p->spec.numel * element);
        } else { /* when no rank contributes, the transport leaves my segment as it is: that must be a sum of zeros */
            ss_piece_zero(e, i, false);
        }
        if (p->state == SS_ZERO) {
            p->state = SS_SENT;
        }
    }
    ss_norms_begin(e, b);
    bucket->phase = SS_LAUNCHED;
    bucket->launched = true;
    bucket->reduced = false;
    bucket->late_backward = e->backward;
    return e->transport->ops->launch(e->transport, b, contributes, err);
}

/* Launches what may be launched, in order where the transport asks for it, and lets launched buckets progress. */
static ss_code launch_ready(ss_engine *e, int32_t only, bool at_end, ss_error *err)
{
    bool in_order = e->transport->ops->in_order;
    int32_t from = in_order || at_end ? 0 : only, to = in_order || at_end ? e->layout.n_buckets : only + 1;
    if (in_order) {
        from = e->next_launch;
    }
    for (int32_t b = from; b < to; b++) {
        ss_bucket *bucket = &e->buckets[b];
        if (!bucket->launched) {
            bool complete = bucket->learned && bucket->defer == 0 && bucket->n_expected > 0 &&
                            bucket->n_arrived >= bucket->n_expected;
            bool due = complete || (at_end && bucket->defer < 2);
            if (due && bucket->phase == SS_OPEN && bucket->adding == 0) {
                SS_TRY(ss_window_launch(e, b, err));
                if (at_end) {
                    e->stats.launched_at_end++;
                } else {
                    e->stats.launched_early++;
                }
            } else if (in_order) {
                break;
            }
        }
        if (in_order) {
            e->next_launch = b + 1;
        }
    }
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        ss_bucket *bucket = &e->buckets[b];
        if (bucket->phase == SS_LAUNCHED && !bucket->reduced) {
            ss_reduce_state state;
            SS_TRY(e->transport->ops->poll(e->transport, b, &state, err));
            bucket->reduced = state != SS_REDUCE_PENDING;
        }
    }
    return SS_OK;
}

static bool synchronising(const ss_engine *e)
{
    return e->sync && e->last_backward && (e->accumulate <= 1 || e->window_backwards % e->accumulate == e->accumulate - 1);
}

static ss_code before_accumulate(ss_engine *e, int32_t i, ss_error *err)
{
    ss_param *p = &e->params[i];
    int32_t b = e->layout.placements[i].bucket;
    SS_TRY(ss_check_usable(e, err)); /* in a forked child the memory is its parent's */
    SS_TRY(ss_window_reconcile(e, i, false, err));
    e->buckets[b].adding++;
    switch ((ss_param_state)p->state) {
    case SS_NONE:
        return SS_OK;
    case SS_LOCAL:
        if (!e->framework.casts(e->framework.ctx, i)) {
            p->accumulating = true;
            return SS_OK;
        }
        break;
    case SS_HELD:
        SS_TRY(ss_window_reopen_closed(e, b, err));
        break;
    case SS_SENT:
    case SS_BESIDE:
        SS_TRY(try_reopen(e, b, err));
        if (p->state == SS_LOCAL && !e->framework.casts(e->framework.ctx, i)) {
            p->accumulating = true;
            return SS_OK;
        }
        break;
    case SS_PHANTOM:
    case SS_ZERO:
        break;
    }
    p->handing = true;
    /* The memory behind .grad has no value of this round (or one that autograd would add to in three passes): without a
       .grad autograd hands the gradient over, and the post-hook writes it (or adds it, in one). That saves the pass that would
       zero the slot and the pass that would add. */
    e->framework.unbind(e->framework.ctx, i);
    return SS_OK;
}

static ss_code after_accumulate(ss_engine *e, int32_t i, ss_error *err)
{
    ss_param *p = &e->params[i];
    int32_t b = e->layout.placements[i].bucket;
    ss_bucket *bucket = &e->buckets[b];
    ss_grad_kind kind = e->framework.kind(e->framework.ctx, i);
    bool add = p->handing && p->state == SS_LOCAL;
    p->handing = p->accumulating = false;
    e->unsettled = true;
    bucket->adding -= bucket->adding > 0;
    SS_TRY(note_stream(e, b, err));
    e->aborted_by_peer = false; /* a new window has begun */
    if (kind == SS_GRAD_NONE) { /* a hook of the user's took it */
        return ss_window_reconcile(e, i, false, err);
    }
    if (kind == SS_GRAD_OTHER) { /* handed over; or made by create_graph, out of place, from all that the slot held */
        SS_TRY(absorb(e, i, add, err));
    }
    if (bucket->launched) {
        uint8_t defer = bucket->late_backward == e->backward ? 1 : 2;
        bucket->defer = bucket->defer > defer ? bucket->defer : defer;
    }
    if (!p->arrived) {
        p->arrived = true;
        bucket->n_arrived += p->expected;
    } else if (bucket->defer == 0) { /* re-entrant checkpointing of a layer used twice: its sums stay those of one process */
        bucket->defer = 1;
    }
    return synchronising(e) && !e->framework_synchronises ? launch_ready(e, b, false, err) : SS_OK;
}

/* A clip must see the same parameters on every rank: show those that only another rank may have used. */
static ss_code bind_phantoms(ss_engine *e, ss_error *err)
{
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        ss_param *p = &e->params[i];
        int32_t b = e->layout.placements[i].bucket;
        if (b >= 0 && e->framework.kind(e->framework.ctx, i) == SS_GRAD_NONE) {
            SS_TRY(ss_window_drop(e, i, err)); /* model.zero_grad() has set .grad to None, and nobody looked at it since */
            e->framework.bind(e->framework.ctx, i);
            p->state = SS_PHANTOM;
            e->norms_valid = false;
        }
    }
    return SS_OK;
}

static ss_code end_backward(ss_engine *e, ss_error *err)
{
    if (synchronising(e) && e->framework_synchronises) {
        e->sync_due = true;
    } else if (synchronising(e)) {
        SS_TRY(launch_ready(e, -1, true, err));
        if (!e->sharded) {
            ss_close_request request = {SS_AT_SYNC, SS_WANT_NOTHING, 0.0, -1};
            SS_TRY(ss_close_locked(e, &request, NULL, err));
        }
    }
    e->unsettled = true;
    if (e->sharded && e->world > 1) {
        SS_TRY(bind_phantoms(e, err));
    }
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        e->buckets[b].n_arrived = 0;
    }
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        e->params[i].arrived = e->params[i].absent = false;
    }
    e->backward++;
    e->window_backwards++;
    e->stats.backwards++;
    return SS_OK;
}

/* ---- public ---- */

ss_code ss_engine_before_accumulate(ss_engine *e, int32_t i, ss_error *err)
{
    pthread_mutex_lock(&e->lock);
    ss_code code = before_accumulate(e, i, err);
    pthread_mutex_unlock(&e->lock);
    return code;
}

ss_code ss_engine_after_accumulate(ss_engine *e, int32_t i, ss_error *err)
{
    pthread_mutex_lock(&e->lock);
    double begin = synchronising(e) ? ss_now() : 0.0;
    ss_code code = after_accumulate(e, i, err);
    if (begin > 0.0) {
        e->stats.overlapped_seconds += ss_now() - begin;
    }
    pthread_mutex_unlock(&e->lock);
    return code;
}

ss_code ss_engine_end_backward(ss_engine *e, ss_error *err)
{
    pthread_mutex_lock(&e->lock);
    ss_code code = end_backward(e, err);
    pthread_mutex_unlock(&e->lock);
    return code;
}

void ss_engine_by_framework(ss_engine *e, int synchronises, int averages)
{
    e->framework_synchronises = synchronises != 0;
    e->framework_averages = averages != 0;
}

int ss_engine_sync_due(ss_engine *e)
{
    pthread_mutex_lock(&e->lock);
    int due = e->sync_due;
    e->sync_due = false;
    pthread_mutex_unlock(&e->lock);
    return due;
}

ss_code ss_engine_zero(ss_engine *e, int32_t i, ss_error *err)
{
    pthread_mutex_lock(&e->lock);
    ss_code code = ss_window_reconcile(e, i, false, err);
    ss_param *p = &e->params[i];
    if (code == SS_OK && p->state != SS_NONE && p->state != SS_PHANTOM) {
        int32_t b = e->layout.placements[i].bucket;
        bool in_flight = p->state == SS_SENT || p->state == SS_BESIDE;
        if (p->state == SS_HELD) { /* the bucket may be stepped as it is, so the value must be there */
            ss_piece_zero(e, i, false);
            e->buckets[b].norms_ready = false;
            e->norms_valid = false;
        }
        forget(e, i);
        p->state = in_flight ? SS_SENT : SS_ZERO;
    }
    pthread_mutex_unlock(&e->lock);
    return code;
}

void ss_engine_set_sync(ss_engine *e, int sync) { e->sync = sync != 0; }
int ss_engine_sync(const ss_engine *e) { return e->sync; }
void ss_engine_set_last_backward(ss_engine *e, int last) { e->last_backward = last != 0; }

int ss_engine_local(ss_engine *e, int32_t i)
{
    pthread_mutex_lock(&e->lock);
    const ss_param *p = &e->params[i];
    int32_t b = e->layout.placements[i].bucket;
    bool local = (p->state == SS_LOCAL || p->state == SS_ZERO) && !p->carried && e->buckets[b].phase == SS_OPEN;
    if (local && p->state == SS_ZERO) { /* after zero_(): so far the zeros were only noted */
        ss_work_zero(e, ss_grad_at(e, b, e->layout.placements[i].offset),
                     (size_t)p->spec.numel * ss_dtype_size(e->layout.buckets[b].grad_dtype));
    }
    pthread_mutex_unlock(&e->lock);
    return local;
}
