/*
 * The engine without a framework: ranks as threads over heap memory, random programs of backwards, reads, steps, drops and
 * aborts that differ between ranks, against a closed form. Gradients are small integers, so sums are exact in any order.
 *
 * Usage: stress_engine [windows] [seed]
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/engine.h"
#include "kernels/kernels.h"
#include "thread_wire.h"

enum { PARAMS = 11, MAX_RANKS = 4, MAX_NUMEL = 700 };

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                        \
        }                                                                   \
    } while (0)
#define MUST(call)                                                                     \
    do {                                                                               \
        if ((call) != SS_OK) {                                                         \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, err.message); \
            abort();                                                                   \
        }                                                                              \
    } while (0)

static const int64_t numels[PARAMS] = {1, 0, 17, 300, 64, 5, 700, 33, 2, 129, 256};

/* One rank's idea of its parameters' gradients, as a framework would hold them. */
typedef struct {
    ss_engine *engine;
    ss_grad_kind kind[PARAMS];
    float *other[PARAMS], *beside[PARAMS];
    int wants[PARAMS];
} framework;

static ss_grad_kind kind_of(void *ctx, int32_t i) { return ((framework *)ctx)->kind[i]; }
static int wants_place(void *ctx, int32_t i) { return ((framework *)ctx)->wants[i]; }
static void drop_other(framework *f, int32_t i)
{
    free(f->other[i]);
    f->other[i] = NULL;
}
static void bind_grad(void *ctx, int32_t i)
{
    framework *f = ctx;
    drop_other(f, i);
    f->kind[i] = SS_GRAD_BOUND;
}
static void unbind_grad(void *ctx, int32_t i)
{
    framework *f = ctx;
    drop_other(f, i);
    f->kind[i] = SS_GRAD_NONE;
}
static float *slot_of(framework *f, int32_t i) { return ss_engine_slot(f->engine, i).grad; }
static int casts(void *ctx, int32_t i)
{
    (void)ctx;
    return i % 2; /* some are asked for each gradient itself, the others add in place */
}
static ss_code fold(void *ctx, int32_t i, bool add, ss_error *err)
{
    (void)err;
    framework *f = ctx;
    for (int64_t k = 0; k < numels[i]; k++) {
        slot_of(f, i)[k] = (add ? slot_of(f, i)[k] : 0.0f) + f->other[i][k];
    }
    return SS_OK;
}
static ss_code fold_piece(void *ctx, int32_t i, int64_t begin, int64_t n, void *dst, ss_error *err)
{
    (void)err;
    memcpy(dst, ((framework *)ctx)->other[i] + begin, (size_t)n * sizeof(float));
    return SS_OK;
}
static ss_code add_beside(void *ctx, int32_t i, ss_error *err)
{
    (void)err;
    framework *f = ctx;
    if (f->beside[i] == NULL) {
        f->beside[i] = calloc((size_t)numels[i] + 1, sizeof(float));
    }
    for (int64_t k = 0; k < numels[i]; k++) {
        f->beside[i][k] += f->other[i][k];
    }
    return SS_OK;
}
static void drop_beside(void *ctx, int32_t i)
{
    framework *f = ctx;
    free(f->beside[i]);
    f->beside[i] = NULL;
}
static ss_code fold_beside(void *ctx, int32_t i, ss_error *err)
{
    (void)err;
    framework *f = ctx;
    memcpy(slot_of(f, i), f->beside[i], (size_t)numels[i] * sizeof(float));
    drop_beside(f, i);
    return SS_OK;
}
static ss_code dropped(void *ctx, int32_t i, ss_kept kept, int64_t begin, int64_t numel, double norm, ss_error *err)
{
    (void)ctx, (void)i, (void)kept, (void)begin, (void)numel, (void)norm, (void)err;
    return SS_OK; /* nobody holds a gradient here */
}
static void written(void *ctx, int32_t i)
{
    (void)ctx;
    (void)i;
}

/* What autograd's AccumulateGrad does with a gradient. */
static void accumulate(framework *f, int32_t i, const float *g)
{
    ss_error err = {0};
    MUST(ss_engine_before_accumulate(f->engine, i, &err));
    if (f->kind[i] == SS_GRAD_NONE) {
        f->other[i] = malloc((size_t)numels[i] * sizeof(float) + 1);
        memcpy(f->other[i], g, (size_t)numels[i] * sizeof(float));
        f->kind[i] = SS_GRAD_OTHER;
    } else {
        float *into = f->kind[i] == SS_GRAD_BOUND ? slot_of(f, i) : f->other[i];
        for (int64_t k = 0; k < numels[i]; k++) {
            into[k] += g[k];
        }
    }
    MUST(ss_engine_after_accumulate(f->engine, i, &err));
}

static uint64_t mix(uint64_t x)
{
    x ^= x >> 31;
    x *= 0x7fb5d329728ea185u;
    x ^= x >> 27;
    x *= 0x81dadef4bc2dd44du;
    return x ^ x >> 33;
}
/* The same answer on every rank: all of them replay everybody's program. */
static unsigned choose(uint64_t seed, int window, int what, int rank, int n, int i, unsigned bound)
{
    uint64_t x = seed;
    int parts[] = {window, what, rank, n, i};
    for (int k = 0; k < 5; k++) {
        x = mix(x * 31 + (uint64_t)parts[k] + 1);
    }
    return (unsigned)(x % bound);
}
static float value(uint64_t seed, int window, int rank, int n, int i, int64_t k)
{
    return (float)((int)(mix(seed + (uint64_t)(window * 131 + rank * 17 + n * 7 + i * 3) * 2654435761u + (uint64_t)k) % 7) - 3);
}

enum { BACKWARDS, USES, SYNC, READS, DROPS, ABORTS, LAST, MIDDLE, TWICE, KEEP };

typedef struct {
    pthread_t thread;
    thread_world *world;
    int rank, n_ranks, windows;
    uint64_t seed;
} job;

typedef struct {
    float grad[PARAMS][MAX_NUMEL];
    float weight[PARAMS][MAX_NUMEL];
    int present[PARAMS];
} model;

/* Adds what every rank's backwards of this window give. */
static void expect(model *m, const job *j, int window, int from_part)
{
    for (int rank = 0; rank < j->n_ranks; rank++) {
        unsigned backwards = choose(j->seed, window, BACKWARDS, rank, from_part, 0, 4);
        for (unsigned n = 0; n < backwards; n++) {
            for (int i = 0; i < PARAMS; i++) {
                unsigned uses = choose(j->seed, window, USES, rank, (int)n + 10 * from_part, i, 4) % 3;
                for (unsigned u = 0; u < uses; u++) {
                    m->present[i] = 1;
                    for (int64_t k = 0; k < numels[i]; k++) {
                        m->grad[i][k] += value(j->seed, window, rank, (int)n + 10 * from_part, i, k);
                    }
                }
            }
        }
    }
}

static void run_backwards(framework *f, const job *j, int window, int part)
{
    ss_error err = {0};
    float g[MAX_NUMEL];
    unsigned backwards = choose(j->seed, window, BACKWARDS, j->rank, part, 0, 4);
    for (unsigned n = 0; n < backwards; n++) {
        ss_engine_set_sync(f->engine, choose(j->seed, window, SYNC, j->rank, (int)n, part, 2));
        ss_engine_set_last_backward(f->engine, choose(j->seed, window, LAST, j->rank, (int)n, part, 4) != 0);
        for (int turn = 0; turn < 2; turn++) { /* a second use comes later in the same backward */
            for (int i = PARAMS - 1; i >= 0; i--) {
                unsigned uses = choose(j->seed, window, USES, j->rank, (int)n + 10 * part, i, 4) % 3;
                if (uses > (unsigned)turn) {
                    for (int64_t k = 0; k < numels[i]; k++) {
                        g[k] = value(j->seed, window, j->rank, (int)n + 10 * part, i, k);
                    }
                    accumulate(f, i, g);
                }
            }
        }
        MUST(ss_engine_end_backward(f->engine, &err));
    }
}

static void close_at(framework *f, ss_close_point at, ss_want want, int param)
{
    ss_error err = {0};
    ss_close_need need;
    ss_close_request request = {at, want, 2.0, param};
    do {
        MUST(ss_engine_close(f->engine, &request, &need, &err));
    } while (need == SS_NEED_STEPS);
    CHECK(need == SS_NEED_NOTHING);
}

static void check_gradients(framework *f, const model *m)
{
    for (int32_t i = 0; i < PARAMS; i++) {
        ss_gradient_state state = ss_engine_gradient(f->engine, i);
        CHECK(state == (m->present[i] ? SS_GRADIENT_HELD : SS_GRADIENT_NONE));
        CHECK(f->kind[i] == (m->present[i] ? SS_GRAD_BOUND : SS_GRAD_NONE));
        if (m->present[i]) {
            ss_engine_materialise(f->engine, i);
            ss_slot slot = ss_engine_slot(f->engine, i);
            const float *mine = slot.piece_grad;
            for (int64_t k = 0; k < slot.piece.numel; k++) {
                CHECK(mine[k] == m->grad[i][slot.piece.in_param + k]);
            }
        }
    }
}

static void check_norms(framework *f, const model *m)
{
    for (int32_t i = 0; i < PARAMS; i++) {
        double sum = 0.0, norm = -1.0;
        for (int64_t k = 0; k < numels[i]; k++) {
            sum += (double)m->grad[i][k] * m->grad[i][k];
        }
        if (ss_engine_norm(f->engine, 2.0, i, &norm)) {
            CHECK(norm == sqrt(sum));
        }
    }
}

static void step(framework *f, const job *j, model *m, float *steps)
{
    ss_error err = {0};
    int32_t group[PARAMS] = {0};
    ss_options options = {.lr = 1.0};
    float *none[PARAMS + 1] = {0};
    ss_update update = {.rule = SS_RULE_SGD, .group = group, .options = &options, .steps = steps, .state = {none, none, none}};
    MUST(ss_engine_update(f->engine, &update, &err));
    MUST(ss_engine_gather(f->engine, &err));
    ss_engine_end_step(f->engine);
    for (int32_t i = 0; i < PARAMS; i++) {
        const float *weight = ss_engine_slot(f->engine, i).param;
        for (int64_t k = 0; k < numels[i]; k++) {
            m->weight[i][k] -= m->present[i] ? m->grad[i][k] : 0.0f;
            CHECK(weight[k] == m->weight[i][k]);
        }
    }
    (void)j;
}

static void zero_grad(framework *f, model *m)
{
    int32_t all[PARAMS];
    ss_error err = {0};
    for (int32_t i = 0; i < PARAMS; i++) {
        all[i] = i;
    }
    MUST(ss_engine_drop(f->engine, all, PARAMS, &err));
    memset(m->grad, 0, sizeof m->grad);
    memset(m->present, 0, sizeof m->present);
}

static void window(framework *f, const job *j, model *m, int w, float *steps)
{
    run_backwards(f, j, w, 0);
    expect(m, j, w, 0);
    if (choose(j->seed, w, ABORTS, 0, 0, 0, 9) == 0) {
        close_at(f, SS_AT_ABORT, SS_WANT_NOTHING, -1);
        zero_grad(f, m);
        run_backwards(f, j, w, 1);
        expect(m, j, w, 1);
    } else if (choose(j->seed, w, MIDDLE, 0, 0, 0, 3) == 0) { /* everyone, or some ranks alone, read in mid-window */
        int everyone = choose(j->seed, w, MIDDLE, 0, 0, 1, 2);
        if (everyone) {
            close_at(f, SS_AT_READ, SS_WANT_NORM, -1);
            check_gradients(f, m);
            check_norms(f, m);
            run_backwards(f, j, w, 1);
            expect(m, j, w, 1);
        }
    }
    if (choose(j->seed, w, READS, j->rank, 0, 0, 2)) { /* some ranks clip, the others go straight to their step */
        close_at(f, SS_AT_READ, SS_WANT_NORM, -1);
        check_norms(f, m);
        if (choose(j->seed, w, READS, j->rank, 1, 0, 3) == 0) {
            int i = (int)choose(j->seed, w, READS, j->rank, 2, 0, PARAMS);
            close_at(f, SS_AT_READ, SS_WANT_FULL, i);
            const float *full = slot_of(f, i);
            for (int64_t k = 0; m->present[i] && k < numels[i]; k++) {
                CHECK(full[k] == m->grad[i][k]);
            }
        }
    }
    close_at(f, SS_AT_STEP, SS_WANT_NOTHING, -1);
    check_gradients(f, m);
    step(f, j, m, steps);
    if (choose(j->seed, w, KEEP, 0, 0, 0, 4) != 0) { /* else gradients persist into the next window */
        zero_grad(f, m);
    }
}

static void *run_rank(void *argument)
{
    const job *j = argument;
    ss_error err = {0};
    ss_transport *transport = NULL;
    ss_transport_callbacks none = {0};
    framework f = {0};
    MUST(ss_shm_open(thread_wire_open(j->world, j->rank, 60), ss_kernels_get(NULL), &none, &transport, &err));
    ss_param_spec specs[PARAMS];
    const char *names[PARAMS];
    int32_t all[PARAMS], kinds[PARAMS];
    for (int32_t i = 0; i < PARAMS; i++) {
        specs[i] = (ss_param_spec){numels[i], SS_F32, SS_F32, 0};
        names[i] = "p";
        all[i] = i;
        kinds[i] = i % 4; /* two optimizers, each with cut and with whole parameters */
    }
    ss_engine_config config = {.size = sizeof config, .n_params = PARAMS, .specs = specs, .names = names,
                               .bucket_bytes = 1200, .sharded = 1, .accumulate = 1};
    ss_framework calls = {&f,   kind_of,    wants_place, bind_grad,   unbind_grad, casts,
                          fold, fold_piece, add_beside,  fold_beside, drop_beside, written, dropped, NULL, NULL, NULL};
    MUST(ss_engine_create(&config, transport, ss_kernels_get(NULL), &calls, NULL, &f.engine, &err));
    MUST(ss_engine_place(f.engine, all, kinds, PARAMS, &err));
    MUST(ss_engine_set_divide_factor(f.engine, 1.0, &err));
    model *m = calloc(1, sizeof *m);
    float steps[PARAMS] = {0};
    for (int w = 0; w < j->windows; w++) {
        window(&f, j, m, w, steps);
    }
    zero_grad(&f, m);
    free(m);
    ss_engine_destroy(f.engine);
    return NULL;
}

int main(int argc, char **argv)
{
    int windows = argc > 1 ? atoi(argv[1]) : 300;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    for (int n = 1; n <= MAX_RANKS; n++) {
        thread_world *world = thread_world_new(n);
        job jobs[MAX_RANKS];
        for (int k = 0; k < n; k++) {
            jobs[k] = (job){.world = world, .rank = k, .n_ranks = n, .windows = windows, .seed = seed + (uint64_t)n};
            pthread_create(&jobs[k].thread, NULL, run_rank, &jobs[k]);
        }
        for (int k = 0; k < n; k++) {
            pthread_join(jobs[k].thread, NULL);
        }
        thread_world_free(world);
    }
    puts("ok");
    return 0;
}
