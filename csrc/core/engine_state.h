/* The engine's private state, shared by window.c, message.c, close.c, pieces.c, norms.c, update.c, work.c and engine.c. */
#ifndef SHARDSTEP_CORE_ENGINE_STATE_H
#define SHARDSTEP_CORE_ENGINE_STATE_H

#include <pthread.h>
#include <stdbool.h>

#include "core/device.h"
#include "core/engine.h"
#include "core/origin.h"

/*
 * What a parameter's slot holds on this rank. "Bound" means that .grad is the tensor over the slot.
 *
 *   NONE     .grad is None
 *   PHANTOM  bound, no gradient of ours; another rank may have one, so a clip must see the parameter
 *   ZERO     bound, the local gradient of this round is zero, whatever the memory holds (see also `carried`)
 *   LOCAL    bound, the memory holds the local gradient of this round
 *   SENT     bound, the bucket is launched and the memory is in flight
 *   BESIDE   bound, as SENT, and what came late is kept beside (a user who scales or reads .grad must meet the guard)
 *   HELD     bound, the bucket is closed: my piece holds the reduced gradient, to be multiplied by `scale`
 */
typedef enum { SS_NONE, SS_PHANTOM, SS_ZERO, SS_LOCAL, SS_SENT, SS_BESIDE, SS_HELD } ss_param_state;

typedef enum {
    SS_OPEN,     /* the memory is this rank's to accumulate into */
    SS_LAUNCHED, /* in flight */
    SS_CLOSED    /* reduced; my segment is what counts */
} ss_bucket_phase;

typedef struct {
    ss_param_spec spec;
    char *name;
    ss_piece piece;
    uint8_t state;
    bool sent;     /* this round carried a local gradient of it ... */
    bool stale;    /* ... which the user has dropped since */
    bool handing;  /* between the hooks of an accumulation: .grad was unbound by us, autograd hands the gradient over */
    bool accumulating; /* between those hooks, and autograd adds in place */
    bool carried;  /* my piece of the bucket's carry counts for it */
    bool kept;     /* it was held at the last close, and nobody dropped it here since */
    bool absent;   /* shown as PHANTOM, the close found that no rank has one; `p.grad /= n` assigns it again */
    bool arrived;  /* a gradient came in this backward */
    bool expected; /* a gradient is expected in every synchronising backward */
    double scale;  /* pending factor of a held gradient */
    double norm_partial; /* sum of squares over my piece, valid with the bucket's norms_ready */
    double norm_total;   /* over all ranks, unscaled; of order `norm_order` */
} ss_param;

/* Gradients of one bucket that come on more streams are joined to the current one as they come. */
#define SS_BUCKET_STREAMS 4

typedef struct {
    uint8_t phase;
    bool launched;   /* in this round */
    bool late;       /* some rank has gradient that round one does not carry: the ranks agreed on a round two */
    bool norms_ready;
    bool reduced;    /* in flight, but my segment is summed: nothing more to do for it before the close */
    bool published;
    bool learned;    /* a round has shown which gradients to expect, and whether they come once per backward */
    uint8_t defer;   /* 0: launch with the last expected gradient; 1: at the end of backward; 2: at the close */
    int32_t n_expected, n_arrived;
    int32_t adding;  /* accumulations under way: another thread's backward must not launch the bucket now */
    uint64_t late_backward;  /* backward counter when it was launched, to tell the two kinds of lateness apart */
    char *grad, *param;      /* this rank's planes */
    void *carry;             /* my segment of gradient kept from before this round, in final units; or NULL */
    float *master;           /* FP32 masters of my segment; NULL when the parameter is its own */
    ss_region *region, *master_region, *carry_region;
    ss_stream streams[SS_BUCKET_STREAMS]; /* of the device, on which this round's gradients have come */
    int32_t n_streams;
    double lanes[SS_NORM_LANES]; /* running sums of the member under the cursor */
    int32_t cursor;              /* member index for the running sums */
} ss_bucket;

struct ss_engine {
    pthread_mutex_t lock;
    ss_transport *transport;
    ss_device *device;     /* NULL: the CPU. Element work goes through work.h, which looks at it */
    ss_event *joined;      /* for one stream to wait for another */
    ss_region *workspace;  /* of the device's kernels for the update */
    ss_region *clip_region; /* see clip.c; what it holds counts for the step under way, or is NULL */
    const double *clip_norm, *clip_coefficient;
    const int32_t *clip_skip;
    ss_error work_failed;  /* of work that was enqueued: see work.h */
    const ss_kernels *kernels;
    ss_framework framework;
    int (*interrupted)(void *);

    ss_origin origin; /* a forked child must not go on with it */
    int rank, world;
    bool sharded, sync, last_backward;
    bool framework_synchronises, framework_averages, sync_due; /* replicated: see ss_engine_by_framework */
    int accumulate;
    int64_t bucket_bytes;
    double divide_factor;

    ss_layout layout;
    ss_param_spec *specs; /* [n_params], as the layout wants them */
    ss_param *params;     /* [n_params] */
    ss_bucket *buckets;   /* [layout.n_buckets] */
    int32_t next_launch;  /* for transports that launch in order */

    uint64_t sequence;       /* closes so far; equal on all ranks */
    uint64_t backward;       /* backwards ended so far */
    int window_backwards;    /* in this window, for `accumulate` */
    bool want_norms;         /* the last window asked for L2 norms: compute them while the sums are in cache */
    bool norms_asked;        /* this window did */
    bool all_at_step;        /* in the last close every rank was in its step */
    bool stepping;           /* this rank is, and waits for the others */
    bool came_empty;         /* it came into its step without any gradient */
    int edited_by;           /* whose edits SS_NEED_EDITS asks for */
    uint64_t edits;          /* in-place edits of held gradients, as counted on this rank */
    bool unsettled;          /* a backward ran here since the last close: other ranks may have added to any gradient */
    bool norms_valid;
    double norm_order;
    bool aborted_by_peer;    /* the last close was aborted by a peer and this rank has been told */

    uint8_t *message, *messages; /* mine, and everybody's */
    size_t message_bytes;
    double *partials;            /* [(world + 1) * n_params] */
    uint8_t *verdict;            /* [n_params] what the ranks agreed in a close */

    ss_code broken;       /* a failure that cannot be mended: every later collective repeats it */
    ss_error broken_error;
    ss_stats stats;
};

/* engine.c */
double ss_now(void);
ss_code ss_check_usable(const ss_engine *e, ss_error *err);
/* Records an unmendable failure of a collective and adds names to it. Returns `code`. */
ss_code ss_broke(ss_engine *e, ss_code code, const char *phase, ss_error *err);

static inline void *ss_span_begin(const ss_engine *e, const char *what, int32_t bucket)
{
    return e->framework.span_begin != NULL ? e->framework.span_begin(e->framework.ctx, what, bucket) : NULL;
}
static inline void ss_span_end(const ss_engine *e, void *span)
{
    if (span != NULL) {
        e->framework.span_end(span);
    }
}

static inline void *ss_grad_at(const ss_engine *e, int32_t bucket, int64_t element)
{
    return e->buckets[bucket].grad + element * (int64_t)ss_dtype_size(e->layout.buckets[bucket].grad_dtype);
}
/* My piece's gradient. */
static inline void *ss_piece_grad(const ss_engine *e, int32_t param)
{
    int32_t b = e->layout.placements[param].bucket;
    return ss_grad_at(e, b, e->rank * e->layout.buckets[b].segment + e->params[param].piece.in_segment);
}
static inline void *ss_piece_carry(const ss_engine *e, int32_t param)
{
    int32_t b = e->layout.placements[param].bucket;
    return (char *)e->buckets[b].carry +
           e->params[param].piece.in_segment * (int64_t)ss_dtype_size(e->layout.buckets[b].grad_dtype);
}
#define SS_EACH_MEMBER(e, bucket, i)                                                                                 \
    for (int32_t m_ = (e)->layout.buckets[bucket].first_member,                                                      \
                 end_ = m_ + (e)->layout.buckets[bucket].n_members, i;                                               \
         m_ < end_ && ((i = (e)->layout.members[m_]), true); m_++)

/* window.c (the lock is held) */
ss_code ss_window_reconcile(ss_engine *e, int32_t param, bool closing, ss_error *err);
ss_code ss_window_launch(ss_engine *e, int32_t bucket, ss_error *err);
ss_code ss_window_reopen_closed(ss_engine *e, int32_t bucket, ss_error *err);
ss_code ss_window_reopen_launched(ss_engine *e, int32_t bucket, ss_error *err);
bool ss_window_has_local(const ss_engine *e, int32_t bucket);
ss_code ss_window_drop(ss_engine *e, int32_t param, ss_error *err);

/* close.c (the lock is held) */
ss_code ss_close_locked(ss_engine *e, const ss_close_request *request, ss_close_need *need, ss_error *err);

/* pieces.c: element work on my piece of one parameter */
void ss_piece_scale(ss_engine *e, int32_t param);
void ss_piece_zero(ss_engine *e, int32_t param, bool carry);
void ss_piece_add_carry(ss_engine *e, int32_t param, double scale);
void ss_piece_to_carry(ss_engine *e, int32_t param, double scale);

/* norms.c */
void ss_norms_begin(ss_engine *e, int32_t bucket);
void ss_norms_range(ss_engine *e, int32_t bucket, int64_t begin, int64_t end);
double ss_norms_sum_lanes(const double lanes[SS_NORM_LANES]);
ss_code ss_norms_agree(ss_engine *e, double order, bool keep, ss_error *err);

#endif
