/*
 * Closing a round: the one place where ranks wait for each other before the weights change.
 *
 *   1. Reconcile with the framework; exchange one control message: what each rank launched, what it still holds, which
 *      parameters it used, and why it is here (a read, a step, an abort).
 *   2. Round one: whatever any rank launched or still holds is launched by all, reduced and settled.
 *   3. Round two, only for buckets for which some rank has gradient that round one did not carry.
 *   4. Agree on presence: a parameter that any rank used is held, the others have no gradient.
 *   5. Serve what any rank asked for (norms, a full gradient), on every rank, whatever brought it here.
 *
 * All ranks decide from the same messages, so they take the same branches and raise the same errors.
 */
#include <stdlib.h>
#include <string.h>

#include "core/engine_state.h"
#include "core/message.h"
#include "core/work.h"

/* The sum of this round and what was carried become the held gradient. */
static void combine(ss_engine *e, int32_t b)
{
    ss_bucket *bucket = &e->buckets[b];
    double scale = 1.0 / e->divide_factor;
    bool late = bucket->late, materialise = late;
    SS_EACH_MEMBER(e, b, i) {
        materialise |= (e->verdict[i] & VERDICT_KEPT) != 0;
    }
    SS_EACH_MEMBER(e, b, i) {
        ss_param *p = &e->params[i];
        if ((e->verdict[i] & VERDICT_DISCARD) && !late) { /* else round two has sorted it out */
            ss_piece_zero(e, i, false);
            bucket->norms_ready = false;
        }
        p->scale = scale;
        if (p->carried) {
            ss_piece_add_carry(e, i, scale);
            p->scale = 1.0;
            bucket->norms_ready = false;
        } else if (materialise) { /* so that pending scales are the same on all ranks */
            ss_piece_scale(e, i);
        }
    }
    bucket->phase = SS_CLOSED;
    e->norms_valid = false;
    e->edits = 0;
}

/* Nobody has anything for this bucket: what is present here is zero, or carried from before. */
static void combine_nothing(ss_engine *e, int32_t b)
{
    ss_bucket *bucket = &e->buckets[b];
    SS_EACH_MEMBER(e, b, i) {
        ss_param *p = &e->params[i];
        if (bucket->phase == SS_CLOSED && p->state == SS_HELD) {
            continue;
        }
        if (p->carried || (e->verdict[i] & VERDICT_PRESENT)) {
            ss_piece_zero(e, i, false);
            if (p->carried) {
                ss_piece_add_carry(e, i, 1.0);
            }
            p->scale = 1.0;
            bucket->norms_ready = false;
            e->norms_valid = false;
        }
    }
    bucket->phase = SS_CLOSED;
}

static ss_code reduce_all(ss_engine *e, uint8_t which, ss_error *err)
{
    const ss_transport_ops *ops = e->transport->ops;
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        if (which == BUCKET_LATE ? e->buckets[b].late : (ss_all_bits(e, b) & which) != 0) {
            SS_TRY(ops->reduce(e->transport, b, err));
        }
    }
    return ops->settle(e->transport, err);
}

/* What this rank holds of a bucket that it has not launched waits for round two. */
static ss_code set_aside(ss_engine *e, int32_t b, ss_error *err)
{
    SS_EACH_MEMBER(e, b, i) {
        if (e->params[i].state == SS_LOCAL) {
            SS_TRY(e->framework.add_beside(e->framework.ctx, i, err));
            e->params[i].state = SS_BESIDE;
        }
    }
    return SS_OK;
}

static ss_code round_one(ss_engine *e, ss_error *err)
{
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        if (!(ss_all_bits(e, b) & (BUCKET_LAUNCHED | BUCKET_CONTENT))) {
            continue;
        }
        if (!e->buckets[b].launched) {
            if (e->buckets[b].phase == SS_CLOSED) {
                SS_TRY(ss_window_reopen_closed(e, b, err));
            }
            if (ss_message_discards(e, b)) {
                SS_TRY(set_aside(e, b, err));
            }
            SS_TRY(ss_window_launch(e, b, err));
            e->stats.launched_at_close++;
        }
    }
    return reduce_all(e, BUCKET_LAUNCHED | BUCKET_CONTENT, err);
}

static ss_code round_two(ss_engine *e, ss_error *err)
{
    bool any = false;
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        if (!e->buckets[b].late) {
            continue;
        }
        any = true;
        if (e->buckets[b].phase == SS_LAUNCHED) {
            SS_TRY(ss_window_reopen_launched(e, b, err));
        }
        SS_EACH_MEMBER(e, b, i) {
            if ((e->verdict[i] & VERDICT_DISCARD) && e->params[i].carried) {
                ss_piece_zero(e, i, true);
            }
        }
        SS_TRY(ss_window_launch(e, b, err));
    }
    if (!any) {
        return SS_OK;
    }
    e->stats.late_rounds++;
    return reduce_all(e, BUCKET_LATE, err);
}

/* Sharded: a parameter that any rank used is held everywhere, the others have no gradient. */
static void hold(ss_engine *e)
{
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        ss_param *p = &e->params[i];
        if (e->layout.placements[i].bucket < 0) {
            continue;
        }
        bool present = e->verdict[i] & VERDICT_PRESENT;
        ss_grad_kind kind = e->framework.kind(e->framework.ctx, i);
        if (present && kind != SS_GRAD_BOUND) {
            e->framework.bind(e->framework.ctx, i);
        } else if (!present && kind == SS_GRAD_BOUND) {
            e->framework.unbind(e->framework.ctx, i);
            p->absent = true;
        }
        p->state = present ? SS_HELD : SS_NONE;
        p->kept = present;
    }
}

/* Replicated: what any rank used has a gradient on every rank, and the next backward adds to it. */
static void show_averages(ss_engine *e)
{
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        if (e->layout.placements[i].bucket >= 0 && (e->verdict[i] & VERDICT_PRESENT)) {
            e->framework.bind(e->framework.ctx, i);
            e->params[i].state = SS_LOCAL;
        }
    }
}

/* The framework will average: every slot holds what this rank has, or zeros. */
static void expose(ss_engine *e)
{
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        SS_EACH_MEMBER(e, b, i) {
            if (e->params[i].state != SS_LOCAL) {
                size_t element = ss_dtype_size(e->layout.buckets[b].grad_dtype);
                ss_work_zero(e, ss_grad_at(e, b, e->layout.placements[i].offset), (size_t)e->params[i].spec.numel * element);
            }
        }
    }
}

/* Replicated: every rank gets all of the average, as torch DDP leaves it. */
static ss_code replicate(ss_engine *e, ss_error *err)
{
    const ss_transport_ops *ops = e->transport->ops;
    uint8_t any = BUCKET_LAUNCHED | BUCKET_CONTENT | BUCKET_LATE;
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        if (ss_all_bits(e, b) & any) {
            SS_EACH_MEMBER(e, b, i) {
                ss_piece_scale(e, i);
            }
            SS_TRY(ops->publish(e->transport, SS_PLANE_GRAD, b, err));
        }
    }
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        if (ss_all_bits(e, b) & any) {
            SS_TRY(ops->collect(e->transport, SS_PLANE_GRAD, b, err));
        }
    }
    SS_TRY(ops->release(e->transport, SS_PLANE_GRAD, err));
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        e->buckets[b].phase = SS_OPEN;
    }
    show_averages(e);
    return SS_OK;
}

/* The next round begins. */
static void begin_round(ss_engine *e)
{
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        ss_bucket *bucket = &e->buckets[b];
        bucket->launched = false;
        bucket->n_arrived = bucket->adding = 0;
        ss_region_release(bucket->carry_region);
        bucket->carry_region = NULL;
        bucket->carry = NULL;
    }
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        ss_param *p = &e->params[i];
        p->sent = p->stale = p->carried = p->arrived = p->accumulating = false;
    }
    e->next_launch = 0;
}

/* Which parameters to wait for before a bucket is launched early: those that this rank used in this round. */
static void learn_expected(ss_engine *e)
{
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        if (!e->buckets[b].launched) {
            continue;
        }
        int32_t n = 0;
        SS_EACH_MEMBER(e, b, i) {
            e->params[i].expected = e->params[i].sent;
            n += e->params[i].sent;
        }
        e->buckets[b].n_expected = n;
        e->buckets[b].learned = true;
    }
}

/* Is rank k's request one that no rank before it has made? */
static bool first_of_kind(const ss_engine *e, int k)
{
    const ss_close_header *h = ss_header_of(e, k);
    for (int j = 0; j < k; j++) {
        const ss_close_header *earlier = ss_header_of(e, j);
        bool same = h->want == SS_WANT_FULL ? earlier->param == h->param : earlier->order == h->order;
        if (earlier->want == h->want && same) {
            return false;
        }
    }
    return true;
}

static ss_code serve(ss_engine *e, ss_error *err)
{
    for (int k = 0; k < e->world; k++) {
        const ss_close_header *h = ss_header_of(e, k);
        if (h->want != SS_WANT_FULL || !first_of_kind(e, k)) {
            continue;
        }
        int32_t b = e->layout.placements[h->param].bucket;
        SS_EACH_MEMBER(e, b, i) {
            if (e->params[i].state == SS_HELD) {
                ss_piece_scale(e, i);
            }
        }
        SS_TRY(e->transport->ops->publish(e->transport, SS_PLANE_GRAD, b, err));
        SS_TRY(e->transport->ops->collect(e->transport, SS_PLANE_GRAD, b, err));
        SS_TRY(e->transport->ops->release(e->transport, SS_PLANE_GRAD, err));
    }
    for (int k = 0; k < e->world; k++) { /* norms after that: scaling a piece invalidates them */
        const ss_close_header *h = ss_header_of(e, k), *mine = ss_header_of(e, e->rank);
        if (h->want == SS_WANT_NORM && first_of_kind(e, k)) {
            e->norms_asked |= h->order == 2.0;
            SS_TRY(ss_norms_agree(e, h->order, mine->want != SS_WANT_NORM || mine->order == h->order, err));
        }
    }
    return SS_OK;
}

/* Some rank aborts: what is in flight is finished and thrown away, on every rank. */
static ss_code settle_abort(ss_engine *e, ss_error *err)
{
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        if ((ss_all_bits(e, b) & BUCKET_LAUNCHED) && !e->buckets[b].launched) {
            SS_TRY(e->transport->ops->launch(e->transport, b, 0, err));
        }
    }
    SS_TRY(reduce_all(e, BUCKET_LAUNCHED, err));
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        e->buckets[b].phase = SS_OPEN;
        e->buckets[b].norms_ready = false;
    }
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        if (e->layout.placements[i].bucket >= 0) {
            e->framework.unbind(e->framework.ctx, i);
            SS_TRY(ss_window_drop(e, i, err));
        }
    }
    e->norms_valid = e->unsettled = false;
    e->window_backwards = 0;
    begin_round(e);
    return SS_OK;
}

ss_code ss_close_locked(ss_engine *e, const ss_close_request *request, ss_close_need *need, ss_error *err)
{
    SS_TRY(ss_check_usable(e, err));
    SS_TRY(ss_message_compose(e, request, err));
    ss_code code = e->transport->ops->exchange(e->transport, e->message, e->message_bytes, e->messages, err);
    if (code != SS_OK) {
        return ss_broke(e, code, ss_close_point_name(request->at), err);
    }
    SS_TRY(ss_message_verify(e, err));
    e->sequence++;
    e->stats.closes++;
    e->all_at_step = true;
    int aborter = -1;
    for (int k = 0; k < e->world; k++) {
        e->all_at_step &= ss_header_of(e, k)->at == SS_AT_STEP || ss_header_of(e, k)->at == SS_AT_JOINED;
        aborter = ss_header_of(e, k)->at == SS_AT_ABORT ? k : aborter;
    }
    if (aborter >= 0) {
        code = settle_abort(e, err);
        if (code != SS_OK) {
            return ss_broke(e, code, "abort_window()", err);
        }
        if (request->at == SS_AT_ABORT) {
            return SS_OK;
        }
        e->aborted_by_peer = true;
        return ss_fail_at(err, SS_ERR_ABORTED, aborter, -1,
                          "rank %d aborted the accumulation window while rank %d was at %s; the window's gradients are "
                          "dropped on all ranks and the next window can begin", aborter, e->rank, ss_close_point_name(request->at));
    }
    SS_TRY(ss_message_judge(e, err));
    if (need != NULL) {
        for (int32_t i = 0; i < e->layout.n_params; i++) {
            if (e->verdict[i] & VERDICT_WANTS) {
                *need = SS_NEED_PLACE;
                return SS_OK;
            }
        }
    }
    if (e->framework_averages && request->at == SS_AT_SYNC) {
        expose(e);
        return SS_OK;
    }
    code = ss_message_agree_scales(e, need, err);
    if (code == SS_ERR_MISMATCH || (need != NULL && *need != SS_NEED_NOTHING)) {
        return code;
    }
    SS_TRY_GOTO(code, code, failed);
    SS_TRY_GOTO(code, round_one(e, err), failed);
    SS_TRY_GOTO(code, round_two(e, err), failed);
    learn_expected(e);
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        if (e->buckets[b].phase == SS_LAUNCHED) {
            combine(e, b);
        } else {
            combine_nothing(e, b);
        }
    }
    e->unsettled = false;
    if (e->sharded) {
        hold(e);
        begin_round(e);
        SS_TRY_GOTO(code, serve(e, err), failed);
    } else {
        SS_TRY_GOTO(code, replicate(e, err), failed);
        begin_round(e);
    }
    SS_TRY_GOTO(code, ss_work_result(e, err), failed);
    return SS_OK;
failed:
    return ss_broke(e, code, ss_close_point_name(request->at), err);
}

/* ---- public ---- */

ss_code ss_engine_close(ss_engine *e, const ss_close_request *request, ss_close_need *need, ss_error *err)
{
    pthread_mutex_lock(&e->lock);
    double begin = ss_now();
    void *span = ss_span_begin(e, "shardstep::close", -1);
    ss_code code = SS_OK;
    bool to_step = request->at == SS_AT_STEP;
    *need = SS_NEED_NOTHING;
    e->stepping &= to_step; /* still, when this continues a close that needed something first */
    if (request->at == SS_AT_ABORT && e->aborted_by_peer) {
        e->aborted_by_peer = false; /* that peer's abort has settled this window here as well */
    } else {
        e->aborted_by_peer = false;
        code = ss_close_locked(e, request, need, err);
        if (code == SS_OK && *need == SS_NEED_NOTHING) {
            e->stepping = to_step && !e->all_at_step;
            *need = (to_step || request->at == SS_AT_JOINED) && !e->all_at_step ? SS_NEED_STEPS : SS_NEED_NOTHING;
        }
        e->stepping &= code == SS_OK;
    }
    ss_span_end(e, span);
    e->stats.exposed_seconds += ss_now() - begin;
    pthread_mutex_unlock(&e->lock);
    return code;
}

ss_code ss_engine_averaged(ss_engine *e, ss_error *err)
{
    pthread_mutex_lock(&e->lock);
    ss_code code = ss_check_usable(e, err);
    if (code == SS_OK) {
        show_averages(e);
        begin_round(e);
    }
    pthread_mutex_unlock(&e->lock);
    return code;
}

int32_t ss_engine_wanted(ss_engine *e, int32_t *params)
{
    int32_t n = 0;
    pthread_mutex_lock(&e->lock);
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        if (e->layout.placements[i].bucket < 0 && (e->verdict[i] & VERDICT_WANTS)) {
            params[n++] = i;
        }
    }
    pthread_mutex_unlock(&e->lock);
    return n;
}

int ss_engine_edited_by(const ss_engine *e) { return e->edited_by; }
