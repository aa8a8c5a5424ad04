/* The control message of a close, and what the ranks conclude from it together. Private to close.c and message.c. */
#ifndef SHARDSTEP_CORE_MESSAGE_H
#define SHARDSTEP_CORE_MESSAGE_H

#include "core/engine_state.h"

/* A message is this header, one byte of BUCKET_ bits per bucket, and one of PARAM_ bits per parameter. */
typedef struct {
    uint64_t sequence;
    double divide_factor, order;
    uint64_t scales; /* hash of the pending scales of all held gradients */
    uint64_t edits;  /* in-place edits of held gradients since they were reduced */
    int32_t at, want, param;
    int32_t n_params, n_buckets, sharded;
    int32_t stepping; /* this rank is in its step already and only waits for others, or it has joined */
    int32_t idle;     /* and came there without any gradient, or has joined: it follows what the others do to theirs */
} ss_close_header;

enum { BUCKET_LAUNCHED = 1, BUCKET_CONTENT = 2, BUCKET_LATE = 4 };
enum { PARAM_PRESENT = 1, PARAM_SENT = 2, PARAM_STALE = 4, PARAM_KEPT = 8, PARAM_WANTS = 16 };
enum { VERDICT_PRESENT = 1, VERDICT_DISCARD = 2, VERDICT_WANTS = 4, VERDICT_KEPT = 8 };

static inline const ss_close_header *ss_header_of(const ss_engine *e, int rank)
{
    return (const ss_close_header *)(e->messages + (size_t)rank * e->message_bytes);
}
static inline const uint8_t *ss_buckets_of(const ss_engine *e, int rank) { return (const uint8_t *)(ss_header_of(e, rank) + 1); }
static inline const uint8_t *ss_params_of(const ss_engine *e, int rank)
{
    return ss_buckets_of(e, rank) + e->layout.n_buckets;
}

/* What any rank says of a bucket. */
static inline uint8_t ss_all_bits(const ss_engine *e, int32_t b)
{
    uint8_t bits = 0;
    for (int k = 0; k < e->world; k++) {
        bits |= ss_buckets_of(e, k)[b];
    }
    return bits;
}

/* Reconciles with the framework and writes this rank's message. */
ss_code ss_message_compose(ss_engine *e, const ss_close_request *request, ss_error *err);
/* Are the ranks at the same round of the same model? */
ss_code ss_message_verify(const ss_engine *e, ss_error *err);
/* What the ranks say together about each parameter (e->verdict), and which buckets need a round two (late). */
ss_code ss_message_judge(ss_engine *e, ss_error *err);
/* Does round one carry gradient that has been dropped since? Then what came later must not be mixed with it. */
bool ss_message_discards(const ss_engine *e, int32_t bucket);
/* Makes pending scales of held gradients equal on all ranks, or raises; or only says that idle ranks need others' edits first.
   May communicate. */
ss_code ss_message_agree_scales(ss_engine *e, ss_close_need *need, ss_error *err);

const char *ss_close_point_name(int at);

#endif
