#define _GNU_SOURCE
/* The beginning of an nccl transport, its memory, and its end. See nccl.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "transport/nccl_private.h"

#define FAREWELL 2.0 /* seconds that NCCL gets at the end to finish what peers may still read; then it is aborted */

/* Beginning -------------------------------------------------------------------------------------------------------- */

/* What every rank tells the others before NCCL is begun with. */
typedef struct {
    int32_t code, version;
    char identity[128]; /* of the GPU */
    char text[512];     /* why this rank cannot take part */
    ss_nccl_id id;      /* rank 0's counts */
} introduction;

static ss_code nothing_to_do(void *ctx, ss_error *err)
{
    (void)ctx;
    (void)err;
    return SS_OK;
}

static ss_code introduce(ss_nccl *t, const introduction *mine, introduction *all, ss_error *err)
{
    SS_TRY(ss_control_exchange(t->control, mine, sizeof *mine, all, nothing_to_do, NULL, err));
    for (int k = 0; k < t->base.world; k++) {
        if (all[k].code != SS_OK) {
            return ss_fail_at(err, (ss_code)all[k].code, k, -1, "nccl, rank %d, open: on rank %d: %s", t->base.rank, k,
                              all[k].text);
        }
        if (all[k].version != all[0].version) {
            return ss_fail_at(err, SS_ERR_MISMATCH, k, -1,
                              "nccl, rank %d, open: rank 0 has NCCL %d and rank %d has NCCL %d (as %d = 2.18.0 is written); "
                              "install the same version everywhere", t->base.rank, all[0].version, k, all[k].version,
                              SS_NCCL_OLDEST);
        }
        for (int j = 0; j < k; j++) {
            if (strcmp(all[j].identity, all[k].identity) == 0) {
                return ss_fail_at(err, SS_ERR_USAGE, k, -1,
                                  "nccl, rank %d, open: ranks %d and %d are on the same GPU (%s); NCCL needs one for each rank: "
                                  "call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first, or start fewer ranks",
                                  t->base.rank, j, k, all[k].identity);
            }
        }
    }
    return SS_OK;
}

static ss_code make_communicator(ss_nccl *t, const ss_nccl_id *id, ss_error *err)
{
    ss_nccl_config config = {.size = sizeof config,
                             .magic = SS_NCCL_CONFIG_MAGIC,
                             .version = SS_NCCL_OLDEST,
                             .blocking = 0,
                             .cluster_size = SS_NCCL_UNDEFINED,
                             .min_ctas = SS_NCCL_UNDEFINED,
                             .max_ctas = SS_NCCL_UNDEFINED,
                             .split_share = SS_NCCL_UNDEFINED};
    int before = t->device->ops->enter(t->device);
    int result = t->api.comm_init_rank_config(&t->comm, t->base.world, *id, t->base.rank, &config);
    ss_code code = ss_nccl_complete(t, result, "open", err);
    t->device->ops->leave(t->device, before);
    return code;
}

static ss_code begin(ss_nccl *t, const ss_nccl_options *options, ss_error *err)
{
    introduction mine = {0}, *all = NULL;
    ss_error unable = {0};
    SS_TRY(ss_control_open(options->control_group, &t->base, &t->control, err));
    /* Nobody begins with NCCL before everybody can: it would wait for those who cannot. */
    ss_code code = ss_nccl_load(options->override, options->wheel, &t->api, &unable);
    if (code == SS_OK && options->rank == 0 && t->api.get_unique_id(&mine.id) != SS_NCCL_SUCCESS) {
        code = ss_fail(&unable, SS_ERR_TRANSPORT, "NCCL gives no unique id: %s", t->api.get_last_error(NULL));
    }
    if (code == SS_OK) {
        code = t->device->ops->new_stream(t->device, &t->stream, &unable);
    }
    mine.code = code;
    mine.version = t->api.version;
    snprintf(mine.identity, sizeof mine.identity, "%s", options->identity);
    snprintf(mine.text, sizeof mine.text, "%.500s", unable.message);
    all = calloc((size_t)options->world, sizeof *all);
    if (all == NULL) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "nccl: out of memory");
    }
    SS_TRY_GOTO(code, introduce(t, &mine, all, err), out);
    if ((t->ready = t->device->ops->new_event(t->device)) == NULL) {
        code = ss_fail(err, SS_ERR_NO_MEMORY, "nccl: out of memory");
        goto out;
    }
    code = make_communicator(t, &all[0].id, err);
    if (code != SS_OK) {
        ss_control_fail(t->control, err->message); /* the others wait in the same place */
    }
out:
    free(all);
    return code;
}

static ss_code start_watching(ss_nccl *t, ss_error *err)
{
    pthread_t thread;
    t->owners = 2;
    if (pthread_create(&thread, NULL, ss_nccl_watch, t) != 0) {
        t->owners = 1;
        return ss_fail(err, SS_ERR_NO_MEMORY, "nccl: no thread to watch over collectives");
    }
    pthread_detach(thread);
    return SS_OK;
}

ss_code ss_nccl_open(const ss_nccl_options *options, ss_device *device, ss_transport **transport, ss_error *err)
{
    ss_nccl *t = calloc(1, sizeof *t);
    if (t == NULL) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "nccl: out of memory");
    }
    t->base = (ss_transport){
        .ops = &ss_nccl_ops, .rank = options->rank, .world = options->world, .timeout = options->timeout};
    t->device = ss_device_retain(device);
    t->queued_end = &t->queued;
    t->running_end = &t->running;
    t->owners = 1;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->stopped, &monotonic);
    pthread_condattr_destroy(&monotonic);
    ss_code code = ss_origin_mark(&t->origin, err);
    if (code == SS_OK) {
        code = begin(t, options, err);
    }
    if (code == SS_OK) {
        code = start_watching(t, err);
    }
    if (code != SS_OK) {
        ss_nccl_close(&t->base);
        return code;
    }
    *transport = &t->base;
    return SS_OK;
}

/* Memory ----------------------------------------------------------------------------------------------------------- */

/* Memory of ncclMemAlloc, which may outlive the transport. */
typedef struct {
    ss_region region;
    int (*free)(void *memory);
    ss_device *device;
} nccl_region;

static void free_region(ss_region *region)
{
    nccl_region *mine = (nccl_region *)region;
    int before = mine->device->ops->enter(mine->device);
    mine->free(region->base);
    mine->device->ops->leave(mine->device, before);
    ss_device_release(mine->device);
    free(mine);
}

static ss_code allocate(ss_nccl *t, size_t bytes, ss_region **region, ss_error *err)
{
    if (t->api.mem_alloc == NULL) {
        return t->device->ops->allocate(t->device, bytes, region, err);
    }
    nccl_region *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "nccl: out of memory");
    }
    int before = t->device->ops->enter(t->device);
    int result = t->api.mem_alloc(&made->region.base, bytes);
    t->device->ops->leave(t->device, before);
    if (result != SS_NCCL_SUCCESS) {
        free(made);
        return ss_fail(err, SS_ERR_NO_MEMORY, "nccl, rank %d: ncclMemAlloc of %zu bytes: %s", t->base.rank, bytes,
                       t->api.get_error_string(result));
    }
    made->region.bytes = bytes;
    made->region.destroy = free_region;
    atomic_init(&made->region.references, 1);
    made->free = t->api.mem_free;
    made->device = ss_device_retain(t->device);
    *region = &made->region;
    return SS_OK;
}

/* Collective where windows are. A communicator that cannot use it gives no handle, which is no failure. */
static ss_code register_memory(ss_nccl *t, ss_region *region, void **handle, ss_error *err)
{
    int result = SS_NCCL_SUCCESS;
    int before = t->device->ops->enter(t->device);
    if (t->api.window_register != NULL) {
        result = t->api.window_register(t->comm, region->base, region->bytes, handle, SS_NCCL_WINDOW_SYMMETRIC);
    } else if (t->api.comm_register != NULL) {
        result = t->api.comm_register(t->comm, region->base, region->bytes, handle);
    }
    ss_code code = ss_nccl_complete(t, result, "registering memory", err);
    t->device->ops->leave(t->device, before);
    return code;
}

static void deregister_memory(ss_nccl *t, void *handle)
{
    if (handle == NULL || t->comm == NULL) {
        return; /* an aborted communicator has dropped its registrations */
    }
    if (t->api.window_deregister != NULL) {
        t->api.window_deregister(t->comm, handle);
    } else {
        t->api.comm_deregister(t->comm, handle);
    }
}

static ss_code check_specs(const ss_nccl *t, const ss_bucket_spec *specs, int n, size_t bytes, ss_error *err)
{
    for (int i = 0; i < n; i++) {
        const ss_bucket_spec *s = &specs[i];
        size_t elements = (size_t)s->segment * (size_t)t->base.world;
        bool grad = s->segment > 0 && s->segment % 128 == 0 && s->grad_offset % 256 == 0 &&
                    (s->grad_dtype == SS_F32 || s->grad_dtype == SS_F64) && s->grad_offset <= bytes &&
                    elements * ss_dtype_size(s->grad_dtype) <= bytes - s->grad_offset;
        bool param = s->param_offset == SIZE_MAX ||
                     (s->param_offset % 256 == 0 && s->param_offset <= bytes &&
                      elements * ss_dtype_size(s->param_dtype) <= bytes - s->param_offset);
        if (!grad || !param) {
            return ss_fail_at(err, SS_ERR_USAGE, -1, t->n_buckets + i, "nccl, rank %d: the layout of bucket %d is not valid",
                              t->base.rank, t->n_buckets + i);
        }
    }
    return SS_OK;
}

static ss_code add_buckets(ss_nccl *t, const ss_bucket_spec *specs, int n, ss_region *region, ss_error *err)
{
    ss_nccl_bucket *grown = realloc(t->buckets, ((size_t)t->n_buckets + (size_t)n) * sizeof *grown);
    if (grown == NULL) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "nccl: out of memory for %d buckets", n);
    }
    t->buckets = grown;
    for (int i = 0; i < n; i++) {
        ss_event *ready = t->device->ops->new_event(t->device);
        if (ready == NULL) {
            return ss_fail(err, SS_ERR_NO_MEMORY, "nccl: out of memory for %d buckets", n);
        }
        ss_region_retain(region);
        t->buckets[t->n_buckets++] = (ss_nccl_bucket){.spec = specs[i], .region = region, .ready = ready};
    }
    return SS_OK;
}

ss_code ss_nccl_add_chunk(ss_transport *base, const ss_bucket_spec *specs, int n, size_t bytes, ss_region **region,
                          ss_error *err)
{
    ss_nccl *t = ss_nccl_of(base);
    SS_TRY(check_specs(t, specs, n, bytes, err));
    SS_TRY(ss_nccl_await_issued(t, 0, "adding buckets", -1, err)); /* a busy communicator registers nothing */
    ss_nccl_chunk *chunk = calloc(1, sizeof *chunk);
    if (chunk == NULL) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "nccl: out of memory for %d buckets", n);
    }
    ss_code code = allocate(t, bytes, &chunk->region, err);
    if (code != SS_OK) {
        free(chunk);
        return code;
    }
    chunk->next = t->chunks;
    t->chunks = chunk; /* its memory and registration are given back by close from here on */
    SS_TRY(t->device->ops->zero(t->device, chunk->region->base, bytes, err));
    SS_TRY(register_memory(t, chunk->region, &chunk->handle, err));
    SS_TRY(add_buckets(t, specs, n, chunk->region, err));
    ss_region_retain(chunk->region);
    *region = chunk->region;
    return SS_OK;
}

/* End -------------------------------------------------------------------------------------------------------------- */

/* Peers may still read what this rank has sent, so a healthy communicator is ended in order; one whose peers do not come
   along is aborted after a while. */
static void end_communicator(ss_nccl *t)
{
    int state = t->api.comm_finalize(t->comm);
    double until = ss_nccl_now() + FAREWELL;
    while (state == SS_NCCL_SUCCESS || state == SS_NCCL_IN_PROGRESS) {
        int result = t->api.comm_get_async_error(t->comm, &state);
        state = result == SS_NCCL_SUCCESS ? state : result;
        if (state != SS_NCCL_IN_PROGRESS || ss_nccl_now() > until) {
            break;
        }
        struct timespec pause = {0, 1000000};
        nanosleep(&pause, NULL);
    }
    if (state == SS_NCCL_SUCCESS) {
        t->api.comm_destroy(t->comm);
    } else {
        t->api.comm_abort(t->comm);
    }
    t->comm = NULL;
}

void ss_nccl_close(ss_transport *base)
{
    ss_nccl *t = ss_nccl_of(base);
    if (t->origin.page != NULL && !ss_origin_is_here(&t->origin)) {
        return; /* a forked child has no GPU, no NCCL and no watching thread; the lock may be held for ever */
    }
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    pthread_cond_signal(&t->stopped);
    ss_error unheard = {0};
    if (t->comm != NULL) {
        ss_nccl_pump(t, &unheard);
    }
    if (t->comm != NULL && (t->running != NULL || t->queued != NULL)) { /* peers may never come to what is pending */
        t->api.comm_abort(t->comm);
        t->comm = NULL;
    }
    int before = t->device->ops->enter(t->device);
    for (ss_nccl_chunk *c = t->chunks; c != NULL; c = c->next) {
        deregister_memory(t, c->handle);
    }
    if (t->comm != NULL) {
        end_communicator(t);
    }
    t->device->ops->leave(t->device, before);
    pthread_mutex_unlock(&t->lock);
    ss_nccl_release(t);
}

void ss_nccl_release(ss_nccl *t)
{
    pthread_mutex_lock(&t->lock);
    bool last = --t->owners == 0;
    pthread_mutex_unlock(&t->lock);
    if (!last) {
        return;
    }
    while (t->chunks != NULL) {
        ss_nccl_chunk *chunk = t->chunks;
        t->chunks = chunk->next;
        ss_region_release(chunk->region);
        free(chunk);
    }
    for (int b = 0; b < t->n_buckets; b++) {
        ss_region_release(t->buckets[b].region);
        t->device->ops->free_event(t->device, t->buckets[b].ready);
    }
    if (t->ready != NULL) {
        t->device->ops->free_event(t->device, t->ready);
    }
    free(t->buckets);
    ss_nccl_free_batches(t);
    ss_control_close(t->control);
    ss_device_release(t->device);
    ss_origin_forget(&t->origin);
    pthread_mutex_destroy(&t->lock);
    pthread_cond_destroy(&t->stopped);
    free(t);
}
