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

typedef struct {
    uint64_t sequence;
    double divide_factor, order;
    uint64_t scales; /* hash of the pending scales of all held gradients */
    uint64_t edits;  /* in-place edits of held gradients since they were reduced */
    int32_t at, want, param;
    int32_t n_params, n_buckets, sharded;
    int32_t stepping; /* this rank is in its step already and only waits for others */
    int32_t unused;
} header;

enum { BUCKET_LAUNCHED = 1, BUCKET_CONTENT = 2, BUCKET_LATE = 4 };
enum { PARAM_PRESENT = 1, PARAM_SENT = 2, PARAM_STALE = 4, PARAM_KEPT = 8, PARAM_WANTS = 16 };
enum { VERDICT_PRESENT = 1, VERDICT_DISCARD = 2, VERDICT_WANTS = 4, VERDICT_KEPT = 8 };

static const header *header_of(const ss_engine *e, int rank)
{
    return (const header *)(e->messages + (size_t)rank * e->message_bytes);
}
static const uint8_t *buckets_of(const ss_engine *e, int rank) { return (const uint8_t *)(header_of(e, rank) + 1); }
static const uint8_t *params_of(const ss_engine *e, int rank)
{
    return buckets_of(e, rank) + e->layout.n_buckets;
}

static uint64_t hash_scales(const ss_engine *e)
{
    uint64_t hash = 1469598103934665603u; /* FNV-1a over the bits */
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        if (e->params[i].kept) {
            uint64_t bits;
            memcpy(&bits, &e->params[i].scale, sizeof bits);
            hash = (hash ^ bits) * 1099511628211u;
        }
    }
    return hash;
}

static bool any_kept(const ss_engine *e)
{
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        if (e->params[i].kept) {
            return true;
        }
    }
    return false;
}

static ss_code compose(ss_engine *e, const ss_close_request *request, ss_error *err)
{
    header *h = (header *)e->message;
    uint8_t *buckets = (uint8_t *)(h + 1), *params = buckets + e->layout.n_buckets;
    memset(e->message, 0, e->message_bytes);
    *h = (header){.sequence = e->sequence,
                  .divide_factor = e->divide_factor,
                  .order = request->order,
                  .at = request->at,
                  .want = request->want,
                  .param = request->param,
                  .n_params = e->layout.n_params,
                  .n_buckets = e->layout.n_buckets,
                  .sharded = e->sharded,
                  .stepping = e->stepping};
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        ss_param *p = &e->params[i];
        int32_t b = e->layout.placements[i].bucket;
        if (b < 0) {
            params[i] = e->framework.wants_place(e->framework.ctx, i) ? PARAM_WANTS : 0;
            continue;
        }
        if (request->at != SS_AT_ABORT) {
            SS_TRY(ss_window_reconcile(e, i, true, err));
        }
        bool local = p->state == SS_LOCAL || p->state == SS_BESIDE;
        params[i] = (uint8_t)((p->state != SS_NONE && p->state != SS_PHANTOM ? PARAM_PRESENT : 0) |
                              (p->sent ? PARAM_SENT : 0) | (p->stale ? PARAM_STALE : 0) | (p->kept ? PARAM_KEPT : 0));
        if (local) {
            buckets[b] |= e->buckets[b].launched ? BUCKET_LATE : BUCKET_CONTENT;
        }
    }
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        if (e->buckets[b].launched) { /* reopened: all ranks take it through round two, so that its scales stay the same */
            buckets[b] |= e->buckets[b].phase == SS_OPEN ? BUCKET_LAUNCHED | BUCKET_LATE : BUCKET_LAUNCHED;
        }
    }
    h->scales = hash_scales(e); /* after reconciling, which may set scales */
    h->edits = any_kept(e) ? e->edits : 0; /* those of gradients dropped since do not matter */
    return SS_OK;
}

static const char *point_name(int at)
{
    static const char *const names[] = {"reading or clipping gradients", "step()", "abort_window()", "the end of backward"};
    return at >= 0 && at < 4 ? names[at] : "?";
}

static ss_code verify(const ss_engine *e, ss_error *err)
{
    const header *mine = header_of(e, e->rank);
    for (int k = 0; k < e->world; k++) {
        const header *h = header_of(e, k);
        if (h->sequence != mine->sequence || h->n_params != mine->n_params || h->n_buckets != mine->n_buckets ||
            h->sharded != mine->sharded) {
            return ss_fail_at(err, SS_ERR_MISMATCH, k, -1,
                              "ranks are out of step: rank %d closes its round %llu (at %s), rank %d its round %llu (at %s); "
                              "every rank must use the same wrapped models in the same order",
                              e->rank, (unsigned long long)mine->sequence, point_name(mine->at), k,
                              (unsigned long long)h->sequence, point_name(h->at));
        }
        if (h->divide_factor != header_of(e, 0)->divide_factor) {
            return ss_fail_at(err, SS_ERR_MISMATCH, k, -1,
                              "set_gradient_divide_factor differs: rank 0 has %g, rank %d has %g; set it alike on all ranks",
                              header_of(e, 0)->divide_factor, k, h->divide_factor);
        }
    }
    return SS_OK;
}

static uint8_t all_bits(const ss_engine *e, int32_t b)
{
    uint8_t bits = 0;
    for (int k = 0; k < e->world; k++) {
        bits |= buckets_of(e, k)[b];
    }
    return bits;
}

/* Does round one carry gradient that has been dropped since? Then what came later must not be mixed with it. */
static bool discards(const ss_engine *e, int32_t b)
{
    SS_EACH_MEMBER(e, b, i) {
        if (e->verdict[i] & VERDICT_DISCARD) {
            return true;
        }
    }
    return false;
}

/* What the ranks say together about each parameter, and which buckets need a round two. */
static ss_code judge(ss_engine *e, ss_error *err)
{
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        int kept = -1, dropped = -1, sent = -1, stale = -1;
        uint8_t all = 0;
        for (int k = 0; k < e->world; k++) {
            uint8_t bits = params_of(e, k)[i];
            all |= bits;
            if (bits & PARAM_KEPT) {
                kept = k;
            } else {
                dropped = k;
            }
            if (bits & PARAM_STALE) {
                stale = k;
            } else if (bits & PARAM_SENT) {
                sent = k;
            }
        }
        if (kept >= 0 && dropped >= 0) {
            return ss_fail_at(err, SS_ERR_MISMATCH, dropped, e->layout.placements[i].bucket,
                              "rank %d dropped the reduced gradient of parameter '%s' (zero_grad or .grad = None), rank %d "
                              "kept it; do it on all ranks or on none, or call abort_window() on all ranks",
                              dropped, e->params[i].name, kept);
        }
        if (stale >= 0 && sent >= 0) {
            return ss_fail_at(err, SS_ERR_MISMATCH, stale, e->layout.placements[i].bucket,
                              "rank %d dropped the gradient of parameter '%s' (zero_grad or .grad = None) after it had been "
                              "sent, rank %d did not; do it on all ranks or on none, or call abort_window() on all ranks",
                              stale, e->params[i].name, sent);
        }
        e->verdict[i] = (uint8_t)((all & PARAM_PRESENT ? VERDICT_PRESENT : 0) | (stale >= 0 ? VERDICT_DISCARD : 0) |
                                  (all & PARAM_WANTS ? VERDICT_WANTS : 0) | (kept >= 0 ? VERDICT_KEPT : 0));
    }
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        uint8_t bits = all_bits(e, b);
        e->buckets[b].late = (bits & BUCKET_LATE) || (discards(e, b) && (bits & BUCKET_CONTENT));
    }
    return SS_OK;
}

/*
 * Held gradients must be scaled alike. A rank that went into its step before the gradient was reduced (it had no part in
 * this window, so its clip saw nothing) takes the scales of those that read it; readers must agree among themselves.
 */
static ss_code agree_scales(ss_engine *e, ss_error *err)
{
    int reader = -1, other = -1;
    for (int k = 0; k < e->world; k++) {
        if (reader < 0 && !header_of(e, k)->stepping) {
            reader = k;
        }
        if (header_of(e, k)->scales != header_of(e, 0)->scales || header_of(e, k)->edits != header_of(e, 0)->edits) {
            other = k;
        }
    }
    if (other < 0) {
        return SS_OK;
    }
    reader = reader < 0 ? 0 : reader;
    for (int k = 0; k < e->world; k++) {
        if (header_of(e, k)->edits != header_of(e, reader)->edits) {
            return ss_fail_at(err, SS_ERR_MISMATCH, k, -1,
                              "rank %d changed reduced gradients in place %llu times (clamp_, add_, ...), rank %d %llu times; "
                              "edit them on all ranks alike", reader, (unsigned long long)header_of(e, reader)->edits, k,
                              (unsigned long long)header_of(e, k)->edits);
        }
    }
    int32_t n = e->layout.n_params;
    double *mine = e->partials, *all = e->partials + n;
    for (int32_t i = 0; i < n; i++) {
        mine[i] = e->params[i].scale;
    }
    SS_TRY(e->transport->ops->exchange(e->transport, mine, (size_t)n * sizeof *mine, all, err));
    for (int32_t i = 0; i < n; i++) {
        if (!(e->verdict[i] & VERDICT_KEPT)) {
            continue;
        }
        double wanted = all[(int64_t)reader * n + i];
        for (int k = 0; k < e->world; k++) {
            double scale = all[(int64_t)k * n + i];
            bool same = memcmp(&scale, &wanted, sizeof scale) == 0;
            if (!same && !header_of(e, k)->stepping) {
                return ss_fail_at(err, SS_ERR_MISMATCH, k, e->layout.placements[i].bucket,
                                  "the gradient of parameter '%s' is scaled by %g on rank %d and by %g on rank %d (clipping, "
                                  "unscaling, mul_); scale it on all ranks alike", e->params[i].name, wanted, reader, scale, k);
            }
        }
        e->params[i].scale = wanted;
    }
    return SS_OK;
}

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
        if (which == BUCKET_LATE ? e->buckets[b].late : (all_bits(e, b) & which) != 0) {
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
        if (!(all_bits(e, b) & (BUCKET_LAUNCHED | BUCKET_CONTENT))) {
            continue;
        }
        if (!e->buckets[b].launched) {
            if (e->buckets[b].phase == SS_CLOSED) {
                SS_TRY(ss_window_reopen_closed(e, b, err));
            }
            if (discards(e, b)) {
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

/* Replicated: every rank gets all of the average, as torch DDP leaves it. */
static ss_code replicate(ss_engine *e, ss_error *err)
{
    const ss_transport_ops *ops = e->transport->ops;
    uint8_t any = BUCKET_LAUNCHED | BUCKET_CONTENT | BUCKET_LATE;
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        if (all_bits(e, b) & any) {
            SS_EACH_MEMBER(e, b, i) {
                ss_piece_scale(e, i);
            }
            SS_TRY(ops->publish(e->transport, SS_PLANE_GRAD, b, err));
        }
    }
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        if (all_bits(e, b) & any) {
            SS_TRY(ops->collect(e->transport, SS_PLANE_GRAD, b, err));
        }
    }
    SS_TRY(ops->release(e->transport, SS_PLANE_GRAD, err));
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        e->buckets[b].phase = SS_OPEN;
    }
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        if (e->layout.placements[i].bucket >= 0 && (e->verdict[i] & VERDICT_PRESENT)) {
            e->framework.bind(e->framework.ctx, i);
            e->params[i].state = SS_LOCAL;
        }
    }
    return SS_OK;
}

/* The next round begins. */
static void begin_round(ss_engine *e)
{
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        ss_bucket *bucket = &e->buckets[b];
        bucket->launched = false;
        bucket->n_arrived = bucket->adding = 0;
        free(bucket->carry);
        bucket->carry = NULL;
    }
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        ss_param *p = &e->params[i];
        p->sent = p->stale = p->carried = p->arrived = false;
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
    const header *h = header_of(e, k);
    for (int j = 0; j < k; j++) {
        const header *earlier = header_of(e, j);
        if (earlier->want == h->want && earlier->order == h->order && earlier->param == h->param) {
            return false;
        }
    }
    return true;
}

static ss_code serve(ss_engine *e, ss_error *err)
{
    for (int k = 0; k < e->world; k++) {
        const header *h = header_of(e, k);
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
        const header *h = header_of(e, k), *mine = header_of(e, e->rank);
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
        if ((all_bits(e, b) & BUCKET_LAUNCHED) && !e->buckets[b].launched) {
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
            ss_window_drop(e, i);
        }
    }
    e->norms_valid = e->unsettled = false;
    e->window_backwards = 0;
    begin_round(e);
    return SS_OK;
}

ss_code ss_close_locked(ss_engine *e, const ss_close_request *request, int *place_needed, ss_error *err)
{
    SS_TRY(ss_check_usable(e, err));
    SS_TRY(compose(e, request, err));
    ss_code code = e->transport->ops->exchange(e->transport, e->message, e->message_bytes, e->messages, err);
    if (code != SS_OK) {
        return ss_broke(e, code, point_name(request->at), err);
    }
    SS_TRY(verify(e, err));
    e->sequence++;
    e->stats.closes++;
    e->all_at_step = true;
    int aborter = -1;
    for (int k = 0; k < e->world; k++) {
        e->all_at_step &= header_of(e, k)->at == SS_AT_STEP;
        aborter = header_of(e, k)->at == SS_AT_ABORT ? k : aborter;
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
                          "dropped on all ranks and the next window can begin", aborter, e->rank, point_name(request->at));
    }
    SS_TRY(judge(e, err));
    if (place_needed != NULL) {
        for (int32_t i = 0; i < e->layout.n_params; i++) {
            if (e->verdict[i] & VERDICT_WANTS) {
                *place_needed = 1;
            }
        }
        if (*place_needed) {
            return SS_OK;
        }
    }
    code = agree_scales(e, err);
    if (code == SS_ERR_MISMATCH) {
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
    return SS_OK;
failed:
    return ss_broke(e, code, point_name(request->at), err);
}

/* ---- public ---- */

ss_code ss_engine_close(ss_engine *e, const ss_close_request *request, int *place_needed, ss_error *err)
{
    pthread_mutex_lock(&e->lock);
    double begin = ss_now();
    ss_code code = SS_OK;
    *place_needed = 0;
    if (request->at == SS_AT_ABORT && e->aborted_by_peer) {
        e->aborted_by_peer = false; /* that peer's abort has settled this window here as well */
    } else {
        e->aborted_by_peer = false;
        do {
            code = ss_close_locked(e, request, place_needed, err);
            e->stepping = request->at == SS_AT_STEP;
        } while (code == SS_OK && request->at == SS_AT_STEP && !*place_needed && !e->all_at_step);
        e->stepping = false;
    }
    e->stats.exposed_seconds += ss_now() - begin;
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

ss_code ss_engine_is_closed(ss_engine *e, int *closed, ss_error *err)
{
    pthread_mutex_lock(&e->lock);
    ss_code code = SS_OK;
    *closed = 1;
    for (int32_t i = 0; code == SS_OK && i < e->layout.n_params; i++) {
        if (e->layout.placements[i].bucket < 0) {
            *closed &= !e->framework.wants_place(e->framework.ctx, i);
            continue;
        }
        code = ss_window_reconcile(e, i, true, err);
        *closed &= e->params[i].state == SS_NONE || e->params[i].state == SS_HELD;
    }
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        *closed &= !e->buckets[b].launched;
    }
    pthread_mutex_unlock(&e->lock);
    return code;
}
