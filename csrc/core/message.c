/* The control message of a close: written, checked, and turned into what all ranks do. See close.c for the protocol. */
#include "core/message.h"

#include <string.h>

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

ss_code ss_message_compose(ss_engine *e, const ss_close_request *request, ss_error *err)
{
    ss_close_header *h = (ss_close_header *)e->message;
    uint8_t *buckets = (uint8_t *)(h + 1), *params = buckets + e->layout.n_buckets;
    memset(e->message, 0, e->message_bytes);
    *h = (ss_close_header){.sequence = e->sequence,
                  .divide_factor = e->divide_factor,
                  .order = request->order,
                  .at = request->at,
                  .want = request->want,
                  .param = request->param,
                  .n_params = e->layout.n_params,
                  .n_buckets = e->layout.n_buckets,
                  .sharded = e->sharded,
                  .stepping = e->stepping || request->at == SS_AT_JOINED};
    bool any = false;
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
        any |= p->state != SS_NONE;
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
    if (!e->stepping) {
        e->came_empty = !any;
    }
    h->idle = (e->stepping && e->came_empty) || request->at == SS_AT_JOINED;
    h->scales = hash_scales(e); /* after reconciling, which may set scales */
    h->edits = any_kept(e) ? e->edits : 0; /* those of gradients dropped since do not matter */
    return SS_OK;
}

const char *ss_close_point_name(int at)
{
    static const char *const names[] = {"reading or clipping gradients", "step()", "abort_window()", "the end of backward",
                                        "join()"};
    return at >= 0 && at < 5 ? names[at] : "?";
}

ss_code ss_message_verify(const ss_engine *e, ss_error *err)
{
    const ss_close_header *mine = ss_header_of(e, e->rank);
    int stepper = -1;
    for (int k = 0; k < e->world; k++) {
        const ss_close_header *h = ss_header_of(e, k);
        if (h->sequence != mine->sequence || h->n_params != mine->n_params || h->n_buckets != mine->n_buckets ||
            h->sharded != mine->sharded) {
            return ss_fail_at(err, SS_ERR_MISMATCH, k, -1,
                              "ranks are out of step: rank %d closes its round %llu (at %s), rank %d its round %llu (at %s); "
                              "every rank must use the same wrapped models in the same order",
                              e->rank, (unsigned long long)mine->sequence, ss_close_point_name(mine->at), k,
                              (unsigned long long)h->sequence, ss_close_point_name(h->at));
        }
        if (h->divide_factor != ss_header_of(e, 0)->divide_factor) {
            return ss_fail_at(err, SS_ERR_MISMATCH, k, -1,
                              "set_gradient_divide_factor differs: rank 0 has %g, rank %d has %g; set it alike on all ranks",
                              ss_header_of(e, 0)->divide_factor, k, h->divide_factor);
        }
        if (h->at != SS_AT_STEP) {
            continue;
        }
        stepper = stepper < 0 ? k : stepper;
        if (h->param != ss_header_of(e, stepper)->param) {
            return ss_fail_at(err, SS_ERR_MISMATCH, k, -1,
                              "ranks step different optimizers of this model: rank %d is in step() of number %d (in the order in "
                              "which they were sharded), rank %d in that of number %d; step them in the same order on all ranks",
                              stepper, ss_header_of(e, stepper)->param, k, h->param);
        }
    }
    return SS_OK;
}

bool ss_message_discards(const ss_engine *e, int32_t b)
{
    SS_EACH_MEMBER(e, b, i) {
        if (e->verdict[i] & VERDICT_DISCARD) {
            return true;
        }
    }
    return false;
}

/* Have all ranks that could see this reduced gradient dropped it, and idle ones could not? Then these drop it, too. */
static bool idle_follow(const ss_engine *e, int32_t i)
{
    bool idle_kept = false, dropped = false;
    for (int k = 0; k < e->world; k++) {
        bool kept = ss_params_of(e, k)[i] & PARAM_KEPT;
        if (!ss_header_of(e, k)->idle && kept) {
            return false;
        }
        idle_kept |= kept;
        dropped |= !ss_header_of(e, k)->idle;
    }
    return idle_kept && dropped;
}

/* What the ranks say together about each parameter, and which buckets need a round two. */
ss_code ss_message_judge(ss_engine *e, ss_error *err)
{
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        int kept = -1, dropped = -1, sent = -1, stale = -1;
        bool follow = idle_follow(e, i);
        uint8_t all = 0;
        for (int k = 0; k < e->world; k++) {
            uint8_t bits = ss_params_of(e, k)[i];
            if (follow && ss_header_of(e, k)->idle) {
                continue;
            }
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
        if (follow && ss_header_of(e, e->rank)->idle) {
            e->framework.unbind(e->framework.ctx, i);
            SS_TRY(ss_window_drop(e, i, err));
        }
        e->verdict[i] = (uint8_t)((all & PARAM_PRESENT ? VERDICT_PRESENT : 0) | (stale >= 0 ? VERDICT_DISCARD : 0) |
                                  (all & PARAM_WANTS ? VERDICT_WANTS : 0) | (kept >= 0 ? VERDICT_KEPT : 0));
    }
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        uint8_t bits = ss_all_bits(e, b);
        e->buckets[b].late = (bits & BUCKET_LATE) || (ss_message_discards(e, b) && (bits & BUCKET_CONTENT));
    }
    return SS_OK;
}

/*
 * Held gradients must be scaled alike. A rank that went into its step before the gradient was reduced (it had no part in
 * this window, so its clip saw nothing) takes the scales of those that read it; readers must agree among themselves. Edits
 * of other kinds are repeated, but only by a rank that had no gradient at all.
 */
ss_code ss_message_agree_scales(ss_engine *e, ss_close_need *need, ss_error *err)
{
    int reader = -1, other = -1;
    bool kept = false;
    for (int32_t i = 0; i < e->layout.n_params; i++) {
        kept |= (e->verdict[i] & VERDICT_KEPT) != 0;
    }
    for (int k = 0; kept && k < e->world; k++) {
        if (reader < 0 && !ss_header_of(e, k)->stepping) {
            reader = k;
        }
        if (ss_header_of(e, k)->scales != ss_header_of(e, 0)->scales || ss_header_of(e, k)->edits != ss_header_of(e, 0)->edits) {
            other = k;
        }
    }
    if (other < 0) {
        return SS_OK;
    }
    reader = reader < 0 ? 0 : reader;
    bool idle_lack = false;
    for (int k = 0; k < e->world; k++) {
        const ss_close_header *h = ss_header_of(e, k), *theirs = ss_header_of(e, reader);
        if (h->idle && h->edits < theirs->edits) {
            idle_lack = true;
        } else if (h->edits != theirs->edits) {
            return ss_fail_at(err, SS_ERR_MISMATCH, k, -1,
                              "rank %d changed reduced gradients in place %llu times (clamp_, add_, ...), rank %d %llu times; "
                              "edit them on all ranks alike", reader, (unsigned long long)theirs->edits, k,
                              (unsigned long long)h->edits);
        }
    }
    if (idle_lack && need != NULL) {
        e->edited_by = reader;
        *need = SS_NEED_EDITS;
        return SS_OK;
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
            if (!same && !ss_header_of(e, k)->stepping) {
                return ss_fail_at(err, SS_ERR_MISMATCH, k, e->layout.placements[i].bucket,
                                  "the gradient of parameter '%s' is scaled by %g on rank %d and by %g on rank %d (clipping, "
                                  "unscaling, mul_); scale it on all ranks alike", e->params[i].name, wanted, reader, scale, k);
            }
        }
        e->params[i].scale = wanted;
    }
    return SS_OK;
}
