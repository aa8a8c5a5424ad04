#define _GNU_SOURCE
/* The engine's life, its memory, and what others may ask of it. */
#include "core/engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/engine_state.h"
#include "core/work.h"

double ss_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

ss_code ss_check_usable(const ss_engine *e, ss_error *err)
{
    if (!ss_origin_is_here(&e->origin)) {
        return ss_fail(err, SS_ERR_USAGE,
                       "this process is a forked child of rank %d; it shares the model's memory and may evaluate it, but "
                       "training goes on in the parent only", e->rank);
    }
    if (e->broken != SS_OK) {
        if (err != NULL) {
            *err = e->broken_error;
        }
        return e->broken;
    }
    return SS_OK;
}

static void describe_bucket(const ss_engine *e, int32_t b, char *text, size_t size)
{
    const ss_bucket_shape *shape = &e->layout.buckets[b];
    const int32_t *members = e->layout.members + shape->first_member;
    const char *first = e->params[members[0]].name, *last = e->params[members[shape->n_members - 1]].name;
    if (shape->n_members == 1) {
        snprintf(text, size, "bucket %d holds parameter '%s'", b, first);
    } else {
        snprintf(text, size, "bucket %d holds %d parameters, '%s' to '%s'", b, shape->n_members, first, last);
    }
}

ss_code ss_broke(ss_engine *e, ss_code code, const char *phase, ss_error *err)
{
    if (code == SS_ERR_USAGE || code == SS_ERR_FRAMEWORK || err == NULL) {
        return code;
    }
    ss_error_prefix(err, "shardstep rank %d, in %s", e->rank, phase);
    if (err->bucket >= 0 && err->bucket < e->layout.n_buckets) {
        char text[256];
        describe_bucket(e, err->bucket, text, sizeof text);
        size_t used = strlen(err->message);
        snprintf(err->message + used, sizeof err->message - used, " (%s)", text);
    }
    if (e->broken == SS_OK && code != SS_ERR_MISMATCH) {
        e->broken = code;
        e->broken_error = *err;
        e->transport->ops->fail(e->transport, err->message);
    }
    return code;
}

static void on_reduced(void *ctx, int bucket, int64_t begin, int64_t end)
{
    ss_norms_range(ctx, bucket, begin, end);
}

static void *on_reduce_begin(void *ctx, int bucket) { return ss_span_begin(ctx, "shardstep::reduce", bucket); }
static void on_reduce_end(void *ctx, void *span) { ss_span_end(ctx, span); }

static int on_wait(void *ctx)
{
    const ss_engine *e = ctx;
    return e->interrupted != NULL ? e->interrupted(e->framework.ctx) : 0;
}

static ss_code fit_buffers(ss_engine *e, ss_error *err)
{
    size_t n = (size_t)e->layout.n_params + 1, world = (size_t)e->world;
    e->message_bytes = (128 + (size_t)e->layout.n_buckets + n + 15) / 8 * 8;
    free(e->message);
    free(e->messages);
    free(e->partials);
    free(e->verdict);
    e->message = calloc(1, e->message_bytes);
    e->messages = calloc(world, e->message_bytes);
    e->partials = calloc((world + 1) * n, sizeof *e->partials);
    e->verdict = calloc(n, 1);
    if (e->message == NULL || e->messages == NULL || e->partials == NULL || e->verdict == NULL) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "no memory for control messages");
    }
    return SS_OK;
}

ss_code ss_engine_create(const ss_engine_config *config, ss_transport *transport, const ss_kernels *kernels,
                         const ss_framework *framework, int (*interrupted)(void *), ss_engine **engine, ss_error *err)
{
    ss_code code = SS_OK;
    int32_t n = config->n_params;
    ss_engine *e = calloc(1, sizeof *e);
    if (e == NULL) {
        transport->ops->close(transport);
        return ss_fail(err, SS_ERR_NO_MEMORY, "no memory for the engine");
    }
    pthread_mutex_init(&e->lock, NULL);
    e->transport = transport;
    e->device = ss_device_retain(config->device);
    e->kernels = kernels;
    e->framework = *framework;
    e->interrupted = interrupted;
    e->rank = transport->rank;
    e->world = transport->world;
    e->sharded = config->sharded != 0;
    e->sync = e->last_backward = true;
    e->accumulate = config->accumulate;
    e->bucket_bytes = config->bucket_bytes;
    e->divide_factor = transport->world;
    e->specs = calloc((size_t)n + 1, sizeof *e->specs);
    e->params = calloc((size_t)n + 1, sizeof *e->params);
    if (e->specs == NULL || e->params == NULL) {
        code = ss_fail(err, SS_ERR_NO_MEMORY, "no memory for %d parameters", n);
        goto failed;
    }
    if (e->device != NULL && (e->joined = e->device->ops->new_event(e->device)) == NULL) {
        code = ss_fail(err, SS_ERR_NO_MEMORY, "no memory for the engine");
        goto failed;
    }
    SS_TRY_GOTO(code, ss_origin_mark(&e->origin, err), failed);
    SS_TRY_GOTO(code, ss_layout_init(&e->layout, e->world, n, err), failed);
    memcpy(e->specs, config->specs, (size_t)n * sizeof *e->specs);
    for (int32_t i = 0; i < n; i++) {
        e->params[i].spec = config->specs[i];
        e->params[i].expected = true;
        e->params[i].scale = 1.0;
        e->params[i].name = strdup(config->names[i]);
        if (e->params[i].name == NULL) {
            code = ss_fail(err, SS_ERR_NO_MEMORY, "no memory for parameter names");
            goto failed;
        }
    }
    SS_TRY_GOTO(code, fit_buffers(e, err), failed);
    transport->callbacks = (ss_transport_callbacks){on_reduced, on_wait, e, on_reduce_begin, on_reduce_end};
    *engine = e;
    return SS_OK;
failed:
    ss_engine_destroy(e);
    return code;
}

void ss_engine_destroy(ss_engine *e)
{
    if (e == NULL) {
        return;
    }
    e->transport->ops->close(e->transport);
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        ss_region_release(e->buckets[b].region);
        ss_region_release(e->buckets[b].master_region);
        ss_region_release(e->buckets[b].carry_region);
    }
    for (int32_t i = 0; e->params != NULL && i < e->layout.n_params; i++) {
        free(e->params[i].name);
    }
    free(e->buckets);
    free(e->params);
    free(e->specs);
    free(e->message);
    free(e->messages);
    free(e->partials);
    free(e->verdict);
    ss_layout_free(&e->layout);
    ss_region_release(e->workspace);
    ss_region_release(e->clip_region);
    if (e->joined != NULL) {
        e->device->ops->free_event(e->device, e->joined);
    }
    ss_device_release(e->device);
    ss_origin_forget(&e->origin);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

static size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

static bool is_low(ss_dtype dtype) { return dtype == SS_BF16 || dtype == SS_F16; }

/* Gradient planes first, then parameter planes; every bucket begins at a multiple of 256 bytes. */
static size_t plan_chunk(const ss_engine *e, int32_t first, ss_bucket_spec *specs)
{
    size_t bytes = 0;
    int32_t n = e->layout.n_buckets - first;
    for (int32_t k = 0; k < n; k++) {
        const ss_bucket_shape *shape = &e->layout.buckets[first + k];
        specs[k] = (ss_bucket_spec){shape->segment, shape->grad_dtype, shape->param_dtype, bytes, SIZE_MAX};
        bytes = round_up(bytes + (size_t)(shape->segment * e->world) * ss_dtype_size(shape->grad_dtype), 256);
    }
    for (int32_t k = 0; e->sharded && k < n; k++) {
        const ss_bucket_shape *shape = &e->layout.buckets[first + k];
        specs[k].param_offset = bytes;
        bytes = round_up(bytes + (size_t)(shape->segment * e->world) * ss_dtype_size(shape->param_dtype), 256);
    }
    return bytes;
}

static ss_code place(ss_engine *e, const int32_t *params, const int32_t *kinds, int32_t count, ss_error *err)
{
    int32_t first = e->layout.n_buckets;
    SS_TRY(ss_check_usable(e, err));
    SS_TRY(ss_layout_add(&e->layout, e->specs, params, kinds, count, e->bucket_bytes, err));
    int32_t n = e->layout.n_buckets - first;
    ss_bucket *grown = realloc(e->buckets, (size_t)e->layout.n_buckets * sizeof *grown + 1);
    ss_bucket_spec *specs = calloc((size_t)n + 1, sizeof *specs);
    if (grown != NULL) {
        e->buckets = grown;
        memset(grown + first, 0, (size_t)n * sizeof *grown);
    }
    ss_region *region = NULL;
    ss_code code = SS_OK;
    if (grown == NULL || specs == NULL) {
        code = ss_fail(err, SS_ERR_NO_MEMORY, "no memory for %d buckets", n);
        goto out;
    }
    size_t bytes = plan_chunk(e, first, specs);
    if (n > 0) {
        SS_TRY_GOTO(code, e->transport->ops->add_chunk(e->transport, specs, n, bytes, &region, err), out);
    }
    for (int32_t k = 0; k < n; k++) {
        ss_bucket *bucket = &e->buckets[first + k];
        const ss_bucket_shape *shape = &e->layout.buckets[first + k];
        bucket->grad = (char *)region->base + specs[k].grad_offset;
        bucket->n_expected = shape->n_members;
        bucket->region = region;
        ss_region_retain(region);
        if (e->sharded) {
            bucket->param = (char *)region->base + specs[k].param_offset;
        }
        if (e->sharded && is_low(shape->param_dtype)) {
            size_t masters = (size_t)shape->segment * sizeof(float);
            SS_TRY_GOTO(code, ss_work_memory(e, masters, &bucket->master_region, err), out);
            bucket->master = bucket->master_region->base;
        }
        SS_EACH_MEMBER(e, first + k, i) {
            e->params[i].piece = ss_layout_piece(&e->layout, i, e->params[i].spec.numel, e->rank);
        }
    }
    SS_TRY_GOTO(code, fit_buffers(e, err), out);
out:
    ss_region_release(region);
    free(specs);
    return code;
}

ss_code ss_engine_place(ss_engine *e, const int32_t *params, const int32_t *kinds, int32_t count, ss_error *err)
{
    pthread_mutex_lock(&e->lock);
    ss_code code = place(e, params, kinds, count, err);
    if (code != SS_OK) {
        code = ss_broke(e, code, "placing parameters in buckets", err);
    }
    pthread_mutex_unlock(&e->lock);
    return code;
}

ss_slot ss_engine_slot(ss_engine *e, int32_t i)
{
    ss_slot slot = {.bucket = e->layout.placements[i].bucket};
    if (slot.bucket < 0) {
        return slot;
    }
    const ss_bucket *bucket = &e->buckets[slot.bucket];
    const ss_bucket_shape *shape = &e->layout.buckets[slot.bucket];
    const ss_param *p = &e->params[i];
    int64_t offset = e->layout.placements[i].offset;
    int64_t own = e->rank * shape->segment + p->piece.in_segment;
    int64_t grad_size = (int64_t)ss_dtype_size(shape->grad_dtype), param_size = (int64_t)ss_dtype_size(shape->param_dtype);
    slot.region = bucket->region;
    slot.piece = p->piece;
    slot.grad = bucket->grad + offset * grad_size;
    slot.piece_grad = bucket->grad + own * grad_size;
    if (bucket->param != NULL) {
        slot.param = bucket->param + offset * param_size;
        slot.piece_param = bucket->param + own * param_size;
    }
    slot.master_region = bucket->master_region;
    if (bucket->master != NULL) {
        slot.piece_master = bucket->master + p->piece.in_segment;
    } else if (shape->param_dtype == SS_F32) {
        slot.piece_master = slot.piece_param;
    }
    return slot;
}

const ss_param_spec *ss_engine_spec(const ss_engine *e, int32_t i) { return &e->specs[i]; }
const ss_layout *ss_engine_layout(const ss_engine *e) { return &e->layout; }
int ss_engine_rank(const ss_engine *e) { return e->rank; }
int ss_engine_world(const ss_engine *e) { return e->world; }
const char *ss_engine_transport_name(const ss_engine *e) { return e->transport->ops->name; }

double ss_engine_divide_factor(const ss_engine *e) { return e->divide_factor; }

ss_code ss_engine_set_divide_factor(ss_engine *e, double factor, ss_error *err)
{
    if (!(factor > 0.0) || factor > 1e300) {
        return ss_fail(err, SS_ERR_USAGE, "the gradient divide factor must be a positive finite number, not %g", factor);
    }
    e->divide_factor = factor;
    return SS_OK;
}

ss_gradient_state ss_engine_gradient(ss_engine *e, int32_t i)
{
    pthread_mutex_lock(&e->lock);
    uint8_t state = e->params[i].state;
    bool joins = e->layout.placements[i].bucket < 0 && e->framework.wants_place(e->framework.ctx, i);
    bool unsettled = e->unsettled, accumulating = e->params[i].accumulating;
    pthread_mutex_unlock(&e->lock);
    if (accumulating) {
        return SS_GRADIENT_LOCAL;
    }
    if (state == SS_NONE && !joins) {
        return SS_GRADIENT_NONE;
    }
    return state == SS_HELD && !unsettled ? SS_GRADIENT_HELD : SS_GRADIENT_PENDING;
}

void ss_engine_scale(ss_engine *e, int32_t i, double factor)
{
    pthread_mutex_lock(&e->lock);
    if (e->params[i].state == SS_HELD) {
        e->params[i].scale *= factor;
    }
    pthread_mutex_unlock(&e->lock);
}

double ss_engine_materialise(ss_engine *e, int32_t i)
{
    double scale = 1.0;
    pthread_mutex_lock(&e->lock);
    if (e->params[i].state == SS_HELD) {
        scale = e->params[i].scale;
        ss_piece_scale(e, i);
    }
    pthread_mutex_unlock(&e->lock);
    return scale;
}

void ss_engine_set_scale(ss_engine *e, int32_t i, double scale)
{
    pthread_mutex_lock(&e->lock);
    e->params[i].scale = scale;
    pthread_mutex_unlock(&e->lock);
}

uint64_t ss_engine_edited(ss_engine *e, int32_t i)
{
    pthread_mutex_lock(&e->lock);
    e->buckets[e->layout.placements[i].bucket].norms_ready = false;
    e->norms_valid = false;
    uint64_t edits = ++e->edits;
    pthread_mutex_unlock(&e->lock);
    return edits;
}

uint64_t ss_engine_edits(ss_engine *e)
{
    pthread_mutex_lock(&e->lock);
    uint64_t edits = e->edits;
    pthread_mutex_unlock(&e->lock);
    return edits;
}

ss_code ss_engine_drop(ss_engine *e, const int32_t *params, int32_t count, ss_error *err)
{
    ss_code code = SS_OK;
    pthread_mutex_lock(&e->lock);
    for (int32_t k = 0; k < count && code == SS_OK; k++) {
        if (e->layout.placements[params[k]].bucket >= 0) {
            e->framework.unbind(e->framework.ctx, params[k]);
            code = ss_window_drop(e, params[k], err);
        }
    }
    pthread_mutex_unlock(&e->lock);
    return code;
}

void ss_engine_stats(ss_engine *e, ss_stats *stats)
{
    pthread_mutex_lock(&e->lock);
    *stats = e->stats;
    stats->traffic = e->transport->traffic;
    pthread_mutex_unlock(&e->lock);
}

void ss_engine_memory(ss_engine *e, ss_memory *memory)
{
    pthread_mutex_lock(&e->lock);
    memset(memory, 0, sizeof *memory);
    for (int32_t b = 0; b < e->layout.n_buckets; b++) {
        const ss_bucket_shape *shape = &e->layout.buckets[b];
        uint64_t elements = (uint64_t)shape->segment * (uint64_t)e->world, numel = 0;
        size_t grad = ss_dtype_size(shape->grad_dtype), param = e->sharded ? ss_dtype_size(shape->param_dtype) : 0;
        SS_EACH_MEMBER(e, b, i) {
            numel += (uint64_t)e->params[i].spec.numel;
        }
        memory->grads += numel * grad;
        memory->params += numel * param;
        memory->padding += (elements - numel) * (grad + param);
        memory->master += e->buckets[b].master != NULL ? (uint64_t)shape->segment * sizeof(float) : 0;
        memory->carry += e->buckets[b].carry != NULL ? (uint64_t)shape->segment * grad : 0;
    }
    pthread_mutex_unlock(&e->lock);
}
