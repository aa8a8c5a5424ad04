/*
 * Random rounds over a transport with values of a closed form; shared by the thread stress and the process test.
 * What every rank must agree on (which buckets, who contributes, the order of publications) is a hash of the round; the
 * rest (order of launches, polls, what is scribbled where) is each rank's own chance.
 */
#ifndef SHARDSTEP_TESTS_SHM_ROUNDS_H
#define SHARDSTEP_TESTS_SHM_ROUNDS_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transport/transport.h"

#define ROUNDS_MAX_BUCKETS 24

typedef struct {
    ss_transport *t;
    uint64_t seed, own; /* state of the common and of the rank's own random numbers */
    int n_buckets;
    ss_bucket_spec specs[ROUNDS_MAX_BUCKETS];
    char *base[ROUNDS_MAX_BUCKETS]; /* of the chunk */
    int64_t covered[ROUNDS_MAX_BUCKETS]; /* by the `reduced` callback in this round */
    ss_region *regions[ROUNDS_MAX_BUCKETS];
    int n_regions;
    int callbacks_wrong;
} rounds;

#define REQUIRE(condition)                                                                              \
    do {                                                                                                \
        if (!(condition)) {                                                                             \
            fprintf(stderr, "%s:%d: rank %d: %s\n", __FILE__, __LINE__, r->t->rank, #condition);        \
            abort();                                                                                    \
        }                                                                                               \
    } while (0)

#define REQUIRE_OK(call)                                                                                \
    do {                                                                                                \
        ss_error e_ = {0};                                                                              \
        ss_error *err = &e_;                                                                            \
        if ((call) != SS_OK) {                                                                          \
            fprintf(stderr, "%s:%d: rank %d: %s: %s\n", __FILE__, __LINE__, r->t->rank, #call, e_.message); \
            abort();                                                                                    \
        }                                                                                               \
    } while (0)

static uint64_t rounds_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t rounds_next(uint64_t *state, uint64_t bound) { return rounds_mix((*state)++) % bound; }

static int rounds_value(int rank, int bucket, int round, int64_t i)
{
    return (int)((rank * 7 + bucket * 13 + round * 5 + i * 3) % 61) - 30;
}

/* Who contributes to a bucket in a round: usually most, sometimes one or none. */
static int rounds_contributes(const rounds *r, int rank, int bucket, int round)
{
    uint64_t h = rounds_mix(r->seed ^ ((uint64_t)round << 20) ^ (uint64_t)bucket << 8);
    if (h % 8 == 0) {
        return 0;
    }
    if (h % 8 == 1) {
        return rank == (int)(h / 8 % (uint64_t)r->t->world);
    }
    return rounds_mix(h + (uint64_t)rank) % 4 != 0;
}

static void rounds_reduced(void *ctx, int bucket, int64_t begin, int64_t end)
{
    rounds *r = ctx;
    if (r->covered[bucket] != begin || end <= begin || end > r->specs[bucket].segment) {
        r->callbacks_wrong = 1;
    }
    r->covered[bucket] = end;
}

static double rounds_get(const rounds *r, ss_plane plane, int b, int64_t i)
{
    const ss_bucket_spec *s = &r->specs[b];
    size_t offset = plane == SS_PLANE_GRAD ? s->grad_offset : s->param_offset;
    ss_dtype dtype = plane == SS_PLANE_GRAD ? s->grad_dtype : s->param_dtype;
    const char *at = r->base[b] + offset;
    return dtype == SS_F64 ? ((const double *)(const void *)at)[i]
         : dtype == SS_F32 ? ((const float *)(const void *)at)[i]
                           : ((const int16_t *)(const void *)at)[i];
}

static void rounds_set(rounds *r, ss_plane plane, int b, int64_t i, double value)
{
    const ss_bucket_spec *s = &r->specs[b];
    size_t offset = plane == SS_PLANE_GRAD ? s->grad_offset : s->param_offset;
    ss_dtype dtype = plane == SS_PLANE_GRAD ? s->grad_dtype : s->param_dtype;
    char *at = r->base[b] + offset;
    if (dtype == SS_F64) {
        ((double *)(void *)at)[i] = value;
    } else if (dtype == SS_F32) {
        ((float *)(void *)at)[i] = (float)value;
    } else {
        ((int16_t *)(void *)at)[i] = (int16_t)value;
    }
}

static void rounds_add_chunk(rounds *r)
{
    static const ss_dtype params[] = {SS_F32, SS_F64, SS_BF16, SS_F16};
    int n = 1 + (int)rounds_next(&r->seed, 4), world = r->t->world;
    if (r->n_buckets + n > ROUNDS_MAX_BUCKETS) {
        return;
    }
    size_t bytes = 0;
    for (int i = 0; i < n; i++) {
        ss_bucket_spec *s = &r->specs[r->n_buckets + i];
        uint64_t largest = rounds_next(&r->seed, 4) == 0 ? 60 : 6;
        *s = (ss_bucket_spec){.segment = 128 * (1 + (int64_t)rounds_next(&r->seed, largest)),
                              .grad_dtype = rounds_next(&r->seed, 3) == 0 ? SS_F64 : SS_F32,
                              .param_dtype = params[rounds_next(&r->seed, 4)]};
        s->grad_offset = bytes;
        bytes += (size_t)s->segment * (size_t)world * ss_dtype_size(s->grad_dtype);
        if (rounds_next(&r->seed, 5) == 0) {
            s->param_offset = SIZE_MAX;
        } else {
            s->param_offset = bytes;
            bytes += (size_t)s->segment * (size_t)world * ss_dtype_size(s->param_dtype);
        }
    }
    ss_region *region;
    REQUIRE_OK(r->t->ops->add_chunk(r->t, &r->specs[r->n_buckets], n, bytes, &region, err));
    REQUIRE(region->bytes == bytes);
    for (size_t i = 0; i < bytes; i++) {
        REQUIRE(((char *)region->base)[i] == 0);
    }
    r->regions[r->n_regions++] = region;
    for (int i = 0; i < n; i++) {
        r->base[r->n_buckets + i] = region->base;
    }
    r->n_buckets += n;
}

/* What a bucket's segment of mine holds after the round; the closed form. */
static void rounds_check_segment(rounds *r, int b, int round)
{
    int64_t segment = r->specs[b].segment, first = segment * r->t->rank;
    int contributors = 0;
    for (int k = 0; k < r->t->world; k++) {
        contributors += rounds_contributes(r, k, b, round);
    }
    REQUIRE(r->covered[b] == (contributors > 0 ? segment : 0));
    for (int64_t i = first; i < first + segment; i++) {
        double expected = 0;
        for (int k = 0; k < r->t->world; k++) {
            expected += rounds_contributes(r, k, b, round) ? rounds_value(k, b, round, i) : 0;
        }
        if (contributors == 0) { /* left as it is: what a rank that does not contribute puts there */
            REQUIRE(isnan(rounds_get(r, SS_PLANE_GRAD, b, i)));
        } else {
            REQUIRE(rounds_get(r, SS_PLANE_GRAD, b, i) == expected);
        }
    }
}

static void rounds_scribble_foreign(rounds *r, int b)
{
    int64_t segment = r->specs[b].segment, first = segment * r->t->rank;
    for (int64_t i = 0; i < segment * r->t->world; i++) {
        if (i < first || i >= first + segment) {
            rounds_set(r, SS_PLANE_GRAD, b, i, -1e6);
        }
    }
}

static void rounds_exchange(rounds *r, int round, size_t bytes)
{
    int world = r->t->world, rank = r->t->rank;
    unsigned char *mine = malloc(bytes + 1), *all = malloc(bytes * (size_t)world + 1);
    for (size_t i = 0; i < bytes; i++) {
        mine[i] = (unsigned char)(i / 7 + (size_t)(rank * 31 + round));
    }
    REQUIRE_OK(r->t->ops->exchange(r->t, mine, bytes, all, err));
    for (int k = 0; k < world; k++) {
        for (size_t i = 0; i < bytes; i++) {
            REQUIRE(all[(size_t)k * bytes + i] == (unsigned char)(i / 7 + (size_t)(k * 31 + round)));
        }
    }
    free(mine);
    free(all);
}

static size_t rounds_message_size(uint64_t *seed)
{
    switch (rounds_next(seed, 8)) {
    case 0: return 0;
    case 1: return 64 * 1024;
    case 2: return 64 * 1024 + 1;
    case 3: return 64 * 1024 * (1 + rounds_next(seed, 4)) + rounds_next(seed, 1000);
    default: return 1 + rounds_next(seed, 300);
    }
}

static void rounds_gather(rounds *r, ss_plane plane, int round)
{
    const ss_transport_ops *ops = r->t->ops;
    int published[ROUNDS_MAX_BUCKETS], n = 0, world = r->t->world, rank = r->t->rank;
    for (int b = 0; b < r->n_buckets; b++) {
        if ((plane == SS_PLANE_PARAM && r->specs[b].param_offset == SIZE_MAX) || rounds_next(&r->seed, 3) == 0) {
            continue;
        }
        published[n++] = b;
        for (int64_t i = 0; i < r->specs[b].segment; i++) {
            int64_t at = r->specs[b].segment * rank + i;
            rounds_set(r, plane, b, at, rounds_value(rank, b, round + 3, at));
        }
        REQUIRE_OK(ops->publish(r->t, plane, b, err));
    }
    for (int j = 0; j < n; j++) {
        int b = published[(j + rank) % n]; /* collected in another order by every rank */
        REQUIRE_OK(ops->collect(r->t, plane, b, err));
        for (int64_t i = 0; i < r->specs[b].segment * world; i++) {
            int owner = (int)(i / r->specs[b].segment);
            REQUIRE(rounds_get(r, plane, b, i) == rounds_value(owner, b, round + 3, i));
        }
    }
    REQUIRE_OK(ops->release(r->t, plane, err));
}

static void rounds_run(rounds *r, int round)
{
    const ss_transport_ops *ops = r->t->ops;
    int world = r->t->world, order[ROUNDS_MAX_BUCKETS], n = 0;
    if (rounds_next(&r->seed, 40) == 0) {
        rounds_add_chunk(r);
    }
    for (int b = 0; b < r->n_buckets; b++) {
        if (rounds_next(&r->seed, 4) != 0) {
            order[n++] = b;
        }
    }
    size_t early = rounds_next(&r->seed, 4) == 0 ? rounds_message_size(&r->seed) : SIZE_MAX;
    int gather = (int)rounds_next(&r->seed, 3);
    for (int i = n - 1; i > 0; i--) {
        int j = (int)rounds_next(&r->own, (uint64_t)i + 1), b = order[i];
        order[i] = order[j];
        order[j] = b;
    }
    ss_reduce_state state;
    for (int i = 0; i < n; i++) {
        int b = order[i], contributes = rounds_contributes(r, r->t->rank, b, round);
        for (int64_t e = 0; e < r->specs[b].segment * world; e++) {
            rounds_set(r, SS_PLANE_GRAD, b, e, contributes ? rounds_value(r->t->rank, b, round, e) : (double)NAN);
        }
        r->covered[b] = 0;
        REQUIRE_OK(ops->launch(r->t, b, contributes, err));
        for (int polls = (int)rounds_next(&r->own, 3); polls > 0; polls--) {
            int other = order[rounds_next(&r->own, (uint64_t)i + 1)];
            REQUIRE_OK(ops->poll(r->t, other, &state, err));
            if (state == SS_REDUCE_SETTLED) {
                rounds_scribble_foreign(r, other);
            }
        }
    }
    if (early != SIZE_MAX) {
        rounds_exchange(r, round, early);
    }
    for (int i = 0; i < n; i++) {
        int b = order[(i * 7) % n];
        if (rounds_next(&r->own, 2) == 0) {
            REQUIRE_OK(ops->reduce(r->t, b, err));
            REQUIRE_OK(ops->poll(r->t, b, &state, err));
            REQUIRE(state != SS_REDUCE_PENDING);
            rounds_check_segment(r, b, round);
        }
    }
    REQUIRE_OK(ops->settle(r->t, err));
    for (int i = 0; i < n; i++) {
        rounds_check_segment(r, order[i], round);
        rounds_scribble_foreign(r, order[i]);
    }
    REQUIRE(!r->callbacks_wrong);
    if (gather == 0) {
        rounds_gather(r, SS_PLANE_GRAD, round);
    } else if (gather == 1) {
        rounds_gather(r, SS_PLANE_PARAM, round);
    }
    if (rounds_next(&r->seed, 3) == 0) {
        rounds_exchange(r, round, rounds_message_size(&r->seed));
    }
}

/* The transport's callbacks must have rounds_reduced and r. Closes the transport, then looks at the regions again. */
static void rounds_all(rounds *r, ss_transport *t, uint64_t seed, int n)
{
    r->t = t;
    r->seed = rounds_mix(seed);
    r->own = rounds_mix(r->seed + 1 + (uint64_t)t->rank);
    rounds_add_chunk(r);
    for (int round = 0; round < n; round++) {
        rounds_run(r, round);
    }
    if (t->world == 1) {
        REQUIRE(t->traffic.reduce_scatter_bytes == 0 && t->traffic.all_gather_bytes == 0);
    }
    t->ops->close(t);
    for (int i = 0; i < r->n_regions; i++) { /* my own memory outlives the transport */
        memset(r->regions[i]->base, 0x55, r->regions[i]->bytes);
        ss_region_release(r->regions[i]);
    }
}

#endif
