/*
 * The engine: one wrapped model on one rank. It ties the accumulation window (window.c), the closing protocol (close.c)
 * and the sharded update (update.c) to a transport and to a framework that owns the tensors.
 *
 * A window runs from one step to the next. Inside it the engine works in rounds. In a round every bucket is launched at
 * most once per rank; a *close* ends the round: ranks exchange one control message, finish what any of them began, carry
 * what came late in one more round, and agree which parameters have a gradient. A step closes until every rank is in its
 * step, so a rank that alone reads a norm is met by the others there.
 *
 * Functions that communicate say so. All take the engine's lock; the caller must not hold the interpreter's.
 */
#ifndef SHARDSTEP_CORE_ENGINE_H
#define SHARDSTEP_CORE_ENGINE_H

#include <stdbool.h>

#include "core/device.h"
#include "core/layout.h"
#include "core/status.h"
#include "kernels/kernels.h"
#include "transport/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ss_engine ss_engine;

/* What the framework's gradient of a parameter is at this moment. */
typedef enum {
    SS_GRAD_NONE,  /* there is none */
    SS_GRAD_BOUND, /* the tensor over the parameter's slot in its gradient bucket */
    SS_GRAD_OTHER, /* some other tensor */
    SS_GRAD_STALE  /* a tensor that was bound before it was dropped, and that holds no whole gradient (see `dropped`) */
} ss_grad_kind;

/* What a gradient that is being dropped holds, for users who still have it. */
typedef enum {
    SS_KEPT_ALL,    /* this rank's whole gradient (in replicated mode: the average) */
    SS_KEPT_PIECE,  /* this rank's piece of the reduced gradient */
    SS_KEPT_NOTHING /* its values are on their way */
} ss_kept;

/* What the engine asks of the framework. Every call may come from any thread that runs a backward. */
typedef struct {
    void *ctx;
    ss_grad_kind (*kind)(void *ctx, int32_t param);
    /* Does this parameter, which is not in the layout, want to join it (it was frozen and requires grad now)? */
    int (*wants_place)(void *ctx, int32_t param);
    void (*bind)(void *ctx, int32_t param);
    void (*unbind)(void *ctx, int32_t param);
    /* Would autograd cast a gradient first to add it to what is in the slot? Then it is asked for the gradient itself, and
       fold adds. Not where a hook of the user's looks at the sum in between. */
    int (*casts)(void *ctx, int32_t param);
    /* Copies the OTHER gradient into the slot, or adds it, casting and densifying. */
    ss_code (*fold)(void *ctx, int32_t param, bool add, ss_error *err);
    /* As fold, but only elements [begin, begin + numel) of the gradient, to dst (in the gradient dtype). */
    ss_code (*fold_piece)(void *ctx, int32_t param, int64_t begin, int64_t numel, void *dst, ss_error *err);
    /* The gradient kept beside a slot that is in flight, where no user sees it: adds the gradient to it, making it when there
       is none; copies it into the slot; lets it go (there need not be one). */
    ss_code (*add_beside)(void *ctx, int32_t param, ss_error *err);
    ss_code (*fold_beside)(void *ctx, int32_t param, ss_error *err);
    void (*drop_beside)(void *ctx, int32_t param);
    /* The parameter's weights have been written. */
    void (*written)(void *ctx, int32_t param);
    /* The user has dropped the gradient in the slot. Who still holds it must keep elements [begin, begin + numel) of it, as the
       slot will be written again. `norm` is the global L2 norm of a piece's whole, NaN where it is not known. */
    ss_code (*dropped)(void *ctx, int32_t param, ss_kept kept, int64_t begin, int64_t numel, double norm, ss_error *err);
    /* The part of a norm of this order (not 2) that n elements at x, on a device, make. May wait for the device. */
    ss_code (*partial_norm)(void *ctx, const void *x, const ss_param_spec *spec, int64_t n, double order, double *partial,
                            ss_error *err);
    /* For the framework's profiler: work named `what` on a bucket (-1: on all) begins; NULL when nobody profiles. It ends on the
       same thread. The functions may be NULL. */
    void *(*span_begin)(void *ctx, const char *what, int32_t bucket);
    void (*span_end)(void *span);
} ss_framework;

typedef struct {
    size_t size; /* sizeof(ss_engine_config) */
    int32_t n_params;
    const ss_param_spec *specs; /* [n_params], copied */
    const char *const *names;   /* [n_params], copied */
    int64_t bucket_bytes;
    int sharded;                /* 0: replicated; gradients are averaged on every rank after a backward */
    int accumulate;             /* K > 1: only every K-th backward of a window synchronises by itself */
    ss_device *device;          /* where the tensors are; NULL: on the CPU. The engine takes a reference */
} ss_engine_config;

/* Takes the transport over, also when it fails. The callbacks of the transport are set by the engine. */
ss_code ss_engine_create(const ss_engine_config *config, ss_transport *transport, const ss_kernels *kernels,
                         const ss_framework *framework, int (*interrupted)(void *), ss_engine **engine, ss_error *err);
void ss_engine_destroy(ss_engine *engine);

/* Collective. Places `count` parameters (registration order) in new buckets; kinds: see ss_layout_add. */
ss_code ss_engine_place(ss_engine *engine, const int32_t *params, const int32_t *kinds, int32_t count, ss_error *err);

/* Where things live. The region is that of the parameter's bucket; slots are NULL for parameters not placed. */
typedef struct {
    int32_t bucket;
    ss_region *region;
    void *grad, *param; /* the whole parameter in this rank's planes */
    ss_piece piece;     /* what this rank owns of it */
    void *piece_grad, *piece_param;
    float *piece_master; /* FP32 master of the piece: piece_param itself when the parameter is FP32; NULL for FP64 */
    ss_region *master_region;
} ss_slot;
ss_slot ss_engine_slot(ss_engine *engine, int32_t param);
const ss_param_spec *ss_engine_spec(const ss_engine *engine, int32_t param);
const ss_layout *ss_engine_layout(const ss_engine *engine);
int ss_engine_rank(const ss_engine *engine);
int ss_engine_world(const ss_engine *engine);
const char *ss_engine_transport_name(const ss_engine *engine);

/* ---- Called from autograd's hooks; they never wait for a peer (but end_backward does in replicated mode). ---- */

/* A gradient is about to be added to the parameter's .grad, and then: it has been. */
ss_code ss_engine_before_accumulate(ss_engine *engine, int32_t param, ss_error *err);
ss_code ss_engine_after_accumulate(ss_engine *engine, int32_t param, ss_error *err);
/* The outermost backward has ended. */
ss_code ss_engine_end_backward(ss_engine *engine, ss_error *err);

void ss_engine_set_sync(ss_engine *engine, int sync);
int ss_engine_sync(const ss_engine *engine);
void ss_engine_set_last_backward(ss_engine *engine, int last);
double ss_engine_divide_factor(const ss_engine *engine);
ss_code ss_engine_set_divide_factor(ss_engine *engine, double factor, ss_error *err);

/*
 * Replicated mode. A synchronising backward closes at its end by itself; but when the framework `synchronises`, it launches
 * nothing and only says so (ss_engine_sync_due, once), and the framework closes at SS_AT_SYNC. When the framework also
 * `averages`, that close reduces nothing: it leaves every slot of this rank with its gradient or zeros, and the framework
 * puts the averages there and calls ss_engine_averaged. Alike on all ranks, and between backwards.
 */
void ss_engine_by_framework(ss_engine *engine, int synchronises, int averages);
int ss_engine_sync_due(ss_engine *engine);
ss_code ss_engine_averaged(ss_engine *engine, ss_error *err);

/* ---- Closing (communicates) ---- */

typedef enum {
    SS_AT_READ = 0,
    SS_AT_STEP = 1,
    SS_AT_ABORT = 2,
    SS_AT_SYNC = 3,
    SS_AT_JOINED = 4 /* this rank has run out of inputs and follows the others, wherever they are */
} ss_close_point;
typedef enum { SS_WANT_NOTHING = 0, SS_WANT_NORM = 1, SS_WANT_FULL = 2 } ss_want;

typedef struct {
    ss_close_point at;
    ss_want want;
    double order;    /* of the norm, for SS_WANT_NORM */
    int32_t param;   /* for SS_WANT_FULL; at SS_AT_STEP a number of the optimizer, to be equal on all ranks */
} ss_close_request;

typedef enum {
    SS_NEED_NOTHING,
    SS_NEED_PLACE, /* some rank has unfrozen parameters: place ss_engine_wanted() */
    SS_NEED_EDITS, /* ranks that came into their step without a gradient are to edit theirs as ss_engine_edited_by() did */
    SS_NEED_STEPS  /* at SS_AT_STEP and SS_AT_JOINED: some rank is not in its step yet */
} ss_close_need;

/*
 * One close. When *need is SS_NEED_PLACE or SS_NEED_EDITS, nothing was settled: do on every rank what is needed. In any case
 * but SS_NEED_NOTHING close again.
 */
ss_code ss_engine_close(ss_engine *engine, const ss_close_request *request, ss_close_need *need, ss_error *err);
int32_t ss_engine_wanted(ss_engine *engine, int32_t *params); /* fills at most n_params entries */
int ss_engine_edited_by(const ss_engine *engine);             /* a rank */

/* The norm of a parameter's gradient, NaN-propagating, 0 where there is none. Returns 0 when it is not known: close and
   want it first. */
int ss_engine_norm(ss_engine *engine, double order, int32_t param, double *norm);

/*
 * The L2 norm of the gradients of all these parameters together. When it is above `max_norm` they are scaled (pending) by
 * max_norm / (norm + 1e-6), as torch's clip_grad_norm_ does; also when it is NaN or infinite, unless `only_finite`. Returns 0,
 * having done nothing, when the norms are not known: close and want them first.
 */
int ss_engine_clip(ss_engine *engine, const int32_t *params, int32_t count, double max_norm, int only_finite,
                   double *norm);

/*
 * As ss_engine_clip, where there is a device and every gradient is FP32, of a closed window and for the step that is under way:
 * nothing is known on the host. *norm is in device memory, in the region (borrowed, and written again by the next step). With
 * `only_finite` a norm that is not finite makes the update leave everything alone. Communicates.
 */
ss_code ss_engine_clip_on_device(ss_engine *engine, const int32_t *params, int32_t count, double max_norm, int only_finite,
                                 const double **norm, ss_region **region, ss_error *err);

/* ---- Gradients after a close: what the guard does with them ---- */

typedef enum {
    SS_GRADIENT_NONE,   /* no rank has one, or it was dropped */
    SS_GRADIENT_HELD,   /* reduced; my piece is what counts */
    SS_GRADIENT_PENDING,/* there may be one: the window has to be closed first */
    SS_GRADIENT_LOCAL   /* it is being accumulated: this is a hook of the user's, which acts on this rank's gradient */
} ss_gradient_state;
ss_gradient_state ss_engine_gradient(ss_engine *engine, int32_t param);
void ss_engine_scale(ss_engine *engine, int32_t param, double factor);  /* .grad *= factor, pending */
double ss_engine_materialise(ss_engine *engine, int32_t param);         /* folds the pending scale, returned, into the piece */
void ss_engine_set_scale(ss_engine *engine, int32_t param, double scale); /* in place of the pending one */
uint64_t ss_engine_edited(ss_engine *engine, int32_t param); /* the piece was written; norms are stale. Returns ss_engine_edits */
uint64_t ss_engine_edits(ss_engine *engine);                 /* how often since gradients were reduced */
ss_code ss_engine_zero(ss_engine *engine, int32_t param, ss_error *err);/* .grad.zero_(): present, with value zero */
int ss_engine_local(ss_engine *engine, int32_t param);                  /* the slot holds this rank's whole local gradient */

/* Drops every local gradient without communicating: the parameters' .grad are None afterwards. */
ss_code ss_engine_drop(ss_engine *engine, const int32_t *params, int32_t count, ss_error *err);

/* ---- The sharded update ---- */

typedef enum { SS_RULE_ADAM = 0, SS_RULE_SGD = 1 } ss_rule;

typedef struct {
    double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
    int decoupled, amsgrad, nesterov, maximize;
} ss_options;

typedef struct {
    ss_rule rule;
    const int32_t *group;     /* [n_params] index into options, -1: not this optimizer's */
    const ss_options *options;
    float *steps;             /* [n_params] updates made so far; SGD: those with momentum */
    float *const *state[3];   /* [slot][n_buckets] this rank's segment of exp_avg, exp_avg_sq, max_exp_avg_sq or of the
                                 momentum buffer; NULL where a bucket needs none */
} ss_update;

/* Updates what this rank owns of every parameter in `update` that has a gradient, and publishes it. Never waits. */
ss_code ss_engine_update(ss_engine *engine, const ss_update *update, ss_error *err);
/* For an update made by others on the FP32 pieces: masters that the user has overwritten through the low-precision
   parameter are adopted before it; afterwards pieces are rounded to the parameter's dtype and published. */
ss_code ss_engine_adopt(ss_engine *engine, const int32_t *params, int32_t count, ss_error *err);
ss_code ss_engine_publish(ss_engine *engine, const int32_t *params, int32_t count, ss_error *err);
/* Communicates: collects what was published, on every rank. */
ss_code ss_engine_gather(ss_engine *engine, ss_error *err);
/* The step ends with the gather after its update; what is gathered otherwise (a loaded checkpoint) is part of none. */
void ss_engine_end_step(ss_engine *engine);
/* As the transport's `lost`. */
int ss_engine_lost_peer(ss_engine *engine);
/* Sets masters from the parameters as they are now. */
void ss_engine_reset_masters(ss_engine *engine);

/* ---- Reports ---- */

typedef struct {
    uint64_t steps, closes, backwards;
    uint64_t launched_early, launched_at_end, launched_at_close, late_rounds;
    double exposed_seconds;    /* in closes and gathers: the caller waited or communicated */
    double overlapped_seconds; /* in hooks */
    double update_seconds;
    ss_traffic traffic;
} ss_stats;
void ss_engine_stats(ss_engine *engine, ss_stats *stats);

typedef struct {
    uint64_t params, grads, padding, master, carry; /* bytes now */
} ss_memory;
void ss_engine_memory(ss_engine *engine, ss_memory *memory);

#ifdef __cplusplus
}
#endif
#endif
