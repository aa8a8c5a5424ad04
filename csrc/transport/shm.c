/*
 * The shared-memory protocol. A rank writes into its own memory only, and reads its peers'.
 *
 *   launch     ready[b] = 2 * round + contributes
 *   reduce     wait for every ready[b], sum segment `rank` of the contributors into mine, read[b] = round
 *   settle     wait for every read[b] of what I launched
 *   publish    updated[plane][b] += 1
 *   collect    wait for each owner's updated[plane][b], copy its segment
 *   release    collected[plane] += 1, wait for every collected[plane]
 *
 * A peer cannot be in round n + 1 of a bucket before I have posted read[b] = n, so a ready[b] that has reached round n
 * carries the `contributes` of round n until then. Rounds are counted per bucket, so ranks may launch any subset.
 */
#define _GNU_SOURCE
#include "transport/shm_private.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Elements are summed in blocks of this size, so that the `reduced` callback finds them in the first-level cache. */
#define BLOCK_BYTES (16 * 1024)

#define CHUNK_ALIGNMENT 256
#define SEGMENT_MULTIPLE 128

static ss_shm *shm_of(ss_transport *transport) { return (ss_shm *)transport; }

static double deadline_of(const ss_shm *t) { return ss_now() + t->base.timeout; }

static ss_code find(const ss_shm *t, int bucket, ss_error *err)
{
    SS_TRY(ss_shm_usable(t, err));
    if (bucket < 0 || bucket >= t->n_buckets) {
        return ss_fail_at(err, SS_ERR_USAGE, -1, bucket, "there is no bucket %d, only %d of them", bucket,
                          t->n_buckets);
    }
    return SS_OK;
}

static ss_code find_launched(const ss_shm *t, int bucket, ss_error *err)
{
    SS_TRY(find(t, bucket, err));
    if (!t->buckets[bucket].launched) {
        return ss_fail_at(err, SS_ERR_USAGE, -1, bucket, "bucket %d has not been launched in this round", bucket);
    }
    return SS_OK;
}

/* Reduce-scatter ------------------------------------------------------------------------------------------------- */

static ss_shm_await gradients_of(const ss_shm *t, int bucket)
{
    return (ss_shm_await){SS_AWAIT_GRADIENTS, SS_PLANE_GRAD, bucket, 2 * t->buckets[bucket].round};
}

static ss_shm_await readers_of(const ss_shm *t, int bucket)
{
    return (ss_shm_await){SS_AWAIT_READERS, SS_PLANE_GRAD, bucket, t->buckets[bucket].round};
}

/* My segment = the sum over the contributing ranks, in rank order, block by block. */
static void sum_segment(ss_shm *t, int bucket, const char **sources, int n_sources)
{
    const ss_shm_bucket *b = &t->buckets[bucket];
    const ss_transport_callbacks *callbacks = &t->base.callbacks;
    size_t size = ss_dtype_size(b->spec.grad_dtype);
    size_t first = b->spec.grad_offset + (size_t)t->base.rank * (size_t)b->spec.segment * size;
    char *mine = (char *)b->chunk->bases[t->base.rank] + first;
    int alone = n_sources == 1 && sources[0] == mine - first;
    int64_t block = BLOCK_BYTES / (int64_t)size;

    for (int64_t begin = 0; begin < b->spec.segment; begin += block) {
        int64_t end = begin + block < b->spec.segment ? begin + block : b->spec.segment;
        if (!alone) {
            const void *at[n_sources];
            for (int i = 0; i < n_sources; i++) {
                at[i] = sources[i] + first + (size_t)begin * size;
            }
            if (b->spec.grad_dtype == SS_F32) {
                t->kernels->reduce_f32((float *)mine + begin, (const float *const *)at, n_sources, end - begin);
            } else {
                t->kernels->reduce_f64((double *)mine + begin, (const double *const *)at, n_sources, end - begin);
            }
        }
        if (callbacks->reduced != NULL) {
            callbacks->reduced(callbacks->ctx, bucket, begin, end);
        }
    }
}

/* All gradients of the bucket have arrived: sums them and tells the peers that theirs are read. */
static void reduce_now(ss_shm *t, int bucket)
{
    ss_shm_bucket *b = &t->buckets[bucket];
    const char *sources[t->base.world];
    int n_sources = 0, n_peers = 0;
    for (int k = 0; k < t->base.world; k++) {
        if (atomic_load(&ss_shm_words(t, bucket, k)->ready) & 1) {
            sources[n_sources++] = b->chunk->bases[k];
            n_peers += k != t->base.rank;
        }
    }
    if (n_sources > 0) {
        void *span = ss_reduce_begin(&t->base, bucket);
        sum_segment(t, bucket, sources, n_sources);
        ss_reduce_end(&t->base, span);
        size_t bytes = (size_t)b->spec.segment * ss_dtype_size(b->spec.grad_dtype);
        t->base.traffic.reduce_scatter_bytes += (uint64_t)n_peers * bytes;
        t->base.traffic.reduce_scatters++;
    }
    b->reduced = 1;
    atomic_store(&ss_shm_words(t, bucket, t->base.rank)->read, b->round);
    ss_shm_ring(t);
}

static int try_reduce(ss_shm *t, int bucket)
{
    ss_shm_await gradients = gradients_of(t, bucket);
    if (t->buckets[bucket].reduced || !ss_shm_all_arrived(t, &gradients)) {
        return 0;
    }
    reduce_now(t, bucket);
    return 1;
}

int ss_shm_progress(ss_shm *t)
{
    int any = 0;
    for (int i = t->unreduced; i < t->n_launched; i++) {
        any |= try_reduce(t, t->launched[i]);
    }
    while (t->unreduced < t->n_launched && t->buckets[t->launched[t->unreduced]].reduced) {
        t->unreduced++;
    }
    return any;
}

static ss_code shm_launch(ss_transport *transport, int bucket, int contributes, ss_error *err)
{
    ss_shm *t = shm_of(transport);
    SS_TRY(find(t, bucket, err));
    ss_shm_bucket *b = &t->buckets[bucket];
    if (b->launched) {
        return ss_fail_at(err, SS_ERR_USAGE, -1, bucket, "bucket %d is launched already; settle ends a round", bucket);
    }
    b->launched = 1;
    b->reduced = 0;
    b->round++;
    t->launched[t->n_launched++] = bucket;
    atomic_store(&ss_shm_words(t, bucket, t->base.rank)->ready, 2 * b->round + (contributes != 0));
    ss_shm_ring(t);
    return SS_OK;
}

static ss_code shm_poll(ss_transport *transport, int bucket, ss_reduce_state *state, ss_error *err)
{
    ss_shm *t = shm_of(transport);
    SS_TRY(find_launched(t, bucket, err));
    try_reduce(t, bucket);
    ss_shm_await readers = readers_of(t, bucket);
    if (!t->buckets[bucket].reduced) {
        *state = SS_REDUCE_PENDING;
    } else {
        *state = ss_shm_all_arrived(t, &readers) ? SS_REDUCE_SETTLED : SS_REDUCE_DONE;
    }
    return SS_OK;
}

static ss_code wait_reduced(ss_shm *t, int bucket, double deadline, ss_error *err)
{
    if (!t->buckets[bucket].reduced) {
        ss_shm_await gradients = gradients_of(t, bucket);
        SS_TRY(ss_shm_wait(t, &gradients, SS_SHM_ALL, deadline, err));
        try_reduce(t, bucket);
    }
    return SS_OK;
}

static ss_code shm_reduce(ss_transport *transport, int bucket, ss_error *err)
{
    ss_shm *t = shm_of(transport);
    SS_TRY(find_launched(t, bucket, err));
    return wait_reduced(t, bucket, deadline_of(t), err);
}

static ss_code shm_settle(ss_transport *transport, ss_error *err)
{
    ss_shm *t = shm_of(transport);
    SS_TRY(ss_shm_usable(t, err));
    double deadline = deadline_of(t);
    /* Peers may wait for my reading of any of them, so all sums come before the first wait for a reader. */
    for (int i = 0; i < t->n_launched; i++) {
        SS_TRY(wait_reduced(t, t->launched[i], deadline, err));
    }
    for (int i = 0; i < t->n_launched; i++) {
        ss_shm_await readers = readers_of(t, t->launched[i]);
        SS_TRY(ss_shm_wait(t, &readers, SS_SHM_ALL, deadline, err));
    }
    for (int i = 0; i < t->n_launched; i++) {
        t->buckets[t->launched[i]].launched = 0;
    }
    t->n_launched = 0;
    t->unreduced = 0;
    return SS_OK;
}

/* All-gather ----------------------------------------------------------------------------------------------------- */

static ss_code find_plane(const ss_shm *t, ss_plane plane, int bucket, ss_error *err)
{
    SS_TRY(find(t, bucket, err));
    if (plane == SS_PLANE_PARAM && t->buckets[bucket].spec.param_offset == SIZE_MAX) {
        return ss_fail_at(err, SS_ERR_USAGE, -1, bucket, "bucket %d has no parameter plane", bucket);
    }
    return SS_OK;
}

static ss_code shm_publish(ss_transport *transport, ss_plane plane, int bucket, ss_error *err)
{
    ss_shm *t = shm_of(transport);
    SS_TRY(find_plane(t, plane, bucket, err));
    ss_shm_bucket *b = &t->buckets[bucket];
    if (b->publication[plane] != SS_UNPUBLISHED) {
        return ss_fail_at(err, SS_ERR_USAGE, -1, bucket, "bucket %d is published already; release must come first",
                          bucket);
    }
    b->publication[plane] = SS_PUBLISHED;
    atomic_store(&ss_shm_words(t, bucket, t->base.rank)->updated[plane], ++b->publications[plane]);
    ss_shm_ring(t);
    return SS_OK;
}

static ss_code shm_collect(ss_transport *transport, ss_plane plane, int bucket, ss_error *err)
{
    ss_shm *t = shm_of(transport);
    SS_TRY(find_plane(t, plane, bucket, err));
    ss_shm_bucket *b = &t->buckets[bucket];
    if (b->publication[plane] != SS_PUBLISHED) {
        return ss_fail_at(err, SS_ERR_USAGE, -1, bucket, "bucket %d is %s", bucket,
                          b->publication[plane] == SS_COLLECTED ? "collected already" : "not published");
    }
    double deadline = deadline_of(t);
    int rank = t->base.rank, world = t->base.world;
    size_t offset = plane == SS_PLANE_GRAD ? b->spec.grad_offset : b->spec.param_offset;
    size_t bytes = (size_t)b->spec.segment
                 * ss_dtype_size(plane == SS_PLANE_GRAD ? b->spec.grad_dtype : b->spec.param_dtype);
    ss_shm_await segment = {SS_AWAIT_SEGMENT, plane, bucket, b->publications[plane]};
    for (int i = 1; i < world; i++) { /* from the next rank on, so that not all read the same one */
        int k = (rank + i) % world;
        SS_TRY(ss_shm_wait(t, &segment, k, deadline, err));
        size_t at = offset + (size_t)k * bytes;
        t->kernels->copy_through((char *)b->chunk->bases[rank] + at, (const char *)b->chunk->bases[k] + at, (int64_t)bytes);
    }
    b->publication[plane] = SS_COLLECTED;
    t->base.traffic.all_gather_bytes += (uint64_t)(world - 1) * bytes;
    t->base.traffic.all_gathers++;
    return SS_OK;
}

/* A bucket that I published and did not collect counts as not wanted. After an interrupt the call may be repeated. */
static ss_code shm_release(ss_transport *transport, ss_plane plane, ss_error *err)
{
    ss_shm *t = shm_of(transport);
    SS_TRY(ss_shm_usable(t, err));
    if (!t->releasing[plane]) {
        t->releasing[plane] = 1;
        atomic_store(&t->controls[t->base.rank]->collected[plane], ++t->releases[plane]);
        ss_shm_ring(t);
    }
    ss_shm_await collected = {SS_AWAIT_COLLECTED, plane, -1, t->releases[plane]};
    SS_TRY(ss_shm_wait(t, &collected, SS_SHM_ALL, deadline_of(t), err));
    t->releasing[plane] = 0;
    for (int bucket = 0; bucket < t->n_buckets; bucket++) {
        t->buckets[bucket].publication[plane] = SS_UNPUBLISHED;
    }
    return SS_OK;
}

/* Control messages ----------------------------------------------------------------------------------------------- */

static ss_code exchange_piece(ss_shm *t, const char *mine, size_t bytes, size_t offset, char *all, double deadline,
                              ss_error *err)
{
    int rank = t->base.rank, world = t->base.world;
    size_t n = bytes - offset < SS_SHM_PIECE ? bytes - offset : SS_SHM_PIECE;
    uint32_t piece = ++t->exchanged;
    ss_shm_control *control = t->controls[rank];
    control->slot[piece % 2].bytes = bytes;
    if (n > 0) {
        memcpy(control->slot[piece % 2].data, mine + offset, n);
        memcpy(all + (size_t)rank * bytes + offset, mine + offset, n);
    }
    atomic_store(&control->exchanged, piece);
    ss_shm_ring(t);

    ss_shm_await message = {SS_AWAIT_MESSAGE, SS_PLANE_GRAD, -1, piece};
    for (int i = 1; i < world; i++) {
        int k = (rank + i) % world;
        SS_TRY(ss_shm_wait(t, &message, k, deadline, err));
        uint64_t theirs = t->controls[k]->slot[piece % 2].bytes;
        if (theirs != bytes) {
            return ss_fail_at(err, SS_ERR_MISMATCH, k, -1,
                              "rank %d exchanges a control message of %llu bytes and rank %d one of %llu", k,
                              (unsigned long long)theirs, rank, (unsigned long long)bytes);
        }
        if (n > 0) {
            memcpy(all + (size_t)k * bytes + offset, t->controls[k]->slot[piece % 2].data, n);
        }
    }
    return SS_OK;
}

static ss_code shm_exchange(ss_transport *transport, const void *mine, size_t bytes, void *all, ss_error *err)
{
    ss_shm *t = shm_of(transport);
    SS_TRY(ss_shm_usable(t, err));
    if (t->exchange_broken) {
        return ss_fail(err, SS_ERR_TRANSPORT, "an earlier exchange did not end; the transport can exchange no more");
    }
    double deadline = deadline_of(t);
    t->exchange_broken = 1;
    size_t offset = 0;
    do {
        SS_TRY(exchange_piece(t, mine, bytes, offset, all, deadline, err));
        offset += SS_SHM_PIECE;
    } while (offset < bytes);
    t->exchange_broken = 0;
    t->base.traffic.control_bytes += (uint64_t)(t->base.world - 1) * bytes;
    return SS_OK;
}

/* Chunks ---------------------------------------------------------------------------------------------------------- */

static int fits(size_t offset, int64_t segment, size_t size, int world, size_t bytes)
{
    return offset % CHUNK_ALIGNMENT == 0 && offset <= bytes
        && (uint64_t)segment <= (bytes - offset) / size / (size_t)world;
}

static ss_code check_specs(const ss_shm *t, const ss_bucket_spec *specs, int n, size_t bytes, ss_error *err)
{
    if (n < 1 || bytes == 0) {
        return ss_fail(err, SS_ERR_USAGE, "a chunk needs at least one bucket, and memory");
    }
    for (int i = 0; i < n; i++) {
        const ss_bucket_spec *s = &specs[i];
        int bucket = t->n_buckets + i;
        if (s->segment <= 0 || s->segment % SEGMENT_MULTIPLE != 0) {
            return ss_fail_at(err, SS_ERR_USAGE, -1, bucket,
                              "bucket %d: a segment of %lld elements; need a multiple of %d", bucket,
                              (long long)s->segment, SEGMENT_MULTIPLE);
        }
        if (s->grad_dtype != SS_F32 && s->grad_dtype != SS_F64) {
            return ss_fail_at(err, SS_ERR_USAGE, -1, bucket, "bucket %d: gradients must be FP32 or FP64", bucket);
        }
        size_t param_size = ss_dtype_size(s->param_dtype);
        if (!fits(s->grad_offset, s->segment, ss_dtype_size(s->grad_dtype), t->base.world, bytes)
            || (s->param_offset != SIZE_MAX
                && (param_size == 0 || !fits(s->param_offset, s->segment, param_size, t->base.world, bytes)))) {
            return ss_fail_at(err, SS_ERR_USAGE, -1, bucket,
                              "bucket %d: its planes must lie within the chunk's %zu bytes, aligned to %d", bucket,
                              bytes, CHUNK_ALIGNMENT);
        }
    }
    return SS_OK;
}

static ss_code shm_add_chunk(ss_transport *transport, const ss_bucket_spec *specs, int n, size_t bytes,
                             ss_region **region, ss_error *err)
{
    ss_shm *t = shm_of(transport);
    SS_TRY(ss_shm_usable(t, err));
    SS_TRY(check_specs(t, specs, n, bytes, err));

    size_t total = (size_t)t->n_buckets + (size_t)n;
    ss_shm_bucket *buckets = realloc(t->buckets, total * sizeof *buckets);
    t->buckets = buckets != NULL ? buckets : t->buckets;
    int *launched = realloc(t->launched, total * sizeof *launched);
    t->launched = launched != NULL ? launched : t->launched;
    ss_shm_chunk *chunk = calloc(1, sizeof *chunk + 2 * (size_t)t->base.world * sizeof(void *));
    if (buckets == NULL || launched == NULL || chunk == NULL) {
        free(chunk);
        return ss_fail(err, SS_ERR_NO_MEMORY, "out of memory for %zu buckets", total);
    }

    const ss_shm_wire_ops *wire = t->wire->ops;
    t->wire->timeout = t->base.timeout;
    void **words = chunk->bases + t->base.world;
    ss_code code = wire->share(t->wire, bytes, SS_SHM_PEERS_READ, &chunk->region, chunk->bases, err);
    if (code == SS_OK) {
        code = wire->share(t->wire, (size_t)n * sizeof(ss_shm_bucket_words), SS_SHM_PEERS_READ, &chunk->words_region,
                           words, err);
    }
    if (code != SS_OK) {
        ss_error_prefix(err, "adding buckets %d to %zu", t->n_buckets, total - 1);
        ss_region_release(chunk->region);
        free(chunk);
        return code;
    }

    chunk->next = t->chunks;
    t->chunks = chunk;
    for (int i = 0; i < n; i++) {
        t->buckets[t->n_buckets + i] = (ss_shm_bucket){.spec = specs[i], .chunk = chunk, .index = i};
    }
    t->n_buckets += n;
    ss_region_retain(chunk->region);
    *region = chunk->region;
    return SS_OK;
}

/* Beginning and end ----------------------------------------------------------------------------------------------- */

/* Says so to the peers, unless this is a forked child. The first state stays. */
static void leave(ss_shm *t, uint32_t state, const char *message)
{
    ss_shm_control *mine = t->controls[t->base.rank];
    if (!ss_origin_is_here(&t->origin) || atomic_load(&mine->state) != SS_SHM_OPEN) {
        return;
    }
    snprintf(mine->message, sizeof mine->message, "%s", message);
    atomic_store(&mine->state, state);
    ss_shm_ring(t);
}

static void shm_fail(ss_transport *transport, const char *message)
{
    leave(shm_of(transport), SS_SHM_FAILED, message != NULL ? message : "no reason given");
}

static int shm_lost(ss_transport *transport)
{
    ss_shm *t = shm_of(transport);
    int lost = -1;
    for (int k = 0; k < t->base.world; k++) {
        int closed = atomic_load(&t->controls[k]->state) == SS_SHM_CLOSED;
        if (k != t->base.rank && !closed && !t->wire->ops->alive(t->wire, k)) {
            return k;
        }
        lost = closed && k != t->base.rank && lost < 0 ? k : lost; /* because another has died, perhaps */
    }
    return lost;
}

static void destroy(ss_shm *t)
{
    while (t->chunks != NULL) {
        ss_shm_chunk *chunk = t->chunks;
        t->chunks = chunk->next;
        ss_region_release(chunk->region);
        ss_region_release(chunk->words_region);
        free(chunk);
    }
    t->wire->ops->close(t->wire);
    ss_region_release(t->control_region);
    ss_region_release(t->bells_region);
    free(t->buckets);
    free(t->launched);
    free(t->bells);
    free(t->controls);
    ss_origin_forget(&t->origin);
    free(t);
}

static void shm_close(ss_transport *transport)
{
    leave(shm_of(transport), SS_SHM_CLOSED, "");
    destroy(shm_of(transport));
}

static const ss_transport_ops shm_ops = {
    .size = sizeof(ss_transport_ops),
    .name = "shm",
    .in_order = 0,
    .add_chunk = shm_add_chunk,
    .launch = shm_launch,
    .poll = shm_poll,
    .reduce = shm_reduce,
    .settle = shm_settle,
    .exchange = shm_exchange,
    .publish = shm_publish,
    .collect = shm_collect,
    .release = shm_release,
    .fail = shm_fail,
    .lost = shm_lost,
    .close = shm_close,
};

/* Spinning pays while the awaited peer runs on a core of its own; otherwise it keeps that peer from running. */
static int choose_spins(int world)
{
    cpu_set_t set;
    int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return world <= cores ? 1000 : 50;
}

ss_code ss_shm_open(ss_shm_wire *wire, const ss_kernels *kernels, const ss_transport_callbacks *callbacks,
                    ss_transport **transport, ss_error *err)
{
    size_t world = (size_t)wire->world;
    ss_shm *t = calloc(1, sizeof *t);
    ss_shm_bell **bells = calloc(world, sizeof(void *));
    ss_shm_control **controls = calloc(world, sizeof(void *));
    if (t == NULL || bells == NULL || controls == NULL) {
        free(t);
        free(bells);
        free(controls);
        wire->ops->close(wire);
        return ss_fail(err, SS_ERR_NO_MEMORY, "out of memory for a transport of %zu ranks", world);
    }
    t->base = (ss_transport){
        .ops = &shm_ops, .rank = wire->rank, .world = wire->world, .timeout = wire->timeout};
    if (callbacks != NULL) {
        t->base.callbacks = *callbacks;
    }
    t->wire = wire;
    t->kernels = kernels;
    t->spins = choose_spins(wire->world);
    t->bells = bells;
    t->controls = controls;

    void *bell[world], *control[world];
    ss_code code = ss_origin_mark(&t->origin, err);
    if (code == SS_OK) {
        code = wire->ops->share(wire, sizeof(ss_shm_bell), SS_SHM_PEERS_WRITE, &t->bells_region, bell, err);
    }
    if (code == SS_OK) {
        code = wire->ops->share(wire, sizeof(ss_shm_control), SS_SHM_PEERS_READ, &t->control_region, control, err);
    }
    if (code != SS_OK) {
        destroy(t);
        return code;
    }
    for (size_t k = 0; k < world; k++) {
        bells[k] = bell[k];
        controls[k] = control[k];
    }
    wire->waiting = ss_shm_while_sharing;
    wire->waiting_ctx = t;
    *transport = &t->base;
    return SS_OK;
}
