/* Ranks as threads: random rounds, and what happens to waiting ranks when one fails, dies, leaves or is late.
   Usage: stress_shm [rounds] [seed] */
#define _GNU_SOURCE
#include <pthread.h>
#include <time.h>

#include "plain_kernels.h"
#include "shm_rounds.h"
#include "thread_wire.h"

typedef struct {
    pthread_t thread;
    thread_world *world;
    int rank, rounds;
    uint64_t seed;
} job;

static void *run_rank(void *argument)
{
    job *j = argument;
    rounds state = {0};
    ss_transport_callbacks callbacks = {.reduced = rounds_reduced, .ctx = &state};
    ss_error err;
    ss_transport *t;
    if (ss_shm_open(thread_wire_open(j->world, j->rank, 60), &plain_kernels, &callbacks, &t, &err) != SS_OK) {
        fprintf(stderr, "open: %s\n", err.message);
        abort();
    }
    rounds_all(&state, t, j->seed, j->rounds);
    return NULL;
}

static void stress(int n_ranks, int n_rounds, uint64_t seed)
{
    thread_world *world = thread_world_new(n_ranks);
    job jobs[8];
    for (int k = 0; k < n_ranks; k++) {
        jobs[k] = (job){.world = world, .rank = k, .rounds = n_rounds, .seed = seed};
        pthread_create(&jobs[k].thread, NULL, run_rank, &jobs[k]);
    }
    for (int k = 0; k < n_ranks; k++) {
        pthread_join(jobs[k].thread, NULL);
    }
    thread_world_free(world);
}

/* Ends of waits -------------------------------------------------------------------------------------------------- */

#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);    \
            abort();                                                           \
        }                                                                      \
    } while (0)

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int asked;
static int interrupt_third(void *ctx)
{
    (void)ctx;
    return ++asked >= 3;
}

typedef struct {
    pthread_t thread;
    thread_world *world;
    ss_transport *t;
    int rank;
    double timeout;
} member;

static void *open_member(void *argument)
{
    member *m = argument;
    ss_error err;
    ss_region *region;
    ss_bucket_spec spec = {.segment = 128, .grad_dtype = SS_F32, .param_dtype = SS_F32, .param_offset = SIZE_MAX};
    CHECK(ss_shm_open(thread_wire_open(m->world, m->rank, m->timeout), &plain_kernels, NULL, &m->t, &err) == SS_OK);
    CHECK(m->t->ops->add_chunk(m->t, &spec, 1, 4096, &region, &err) == SS_OK);
    ss_region_release(region);
    return NULL;
}

static void open_three(member m[3], double timeout)
{
    thread_world *world = thread_world_new(3);
    for (int k = 0; k < 3; k++) {
        m[k] = (member){.world = world, .rank = k, .timeout = timeout};
        pthread_create(&m[k].thread, NULL, open_member, &m[k]);
    }
    for (int k = 0; k < 3; k++) {
        pthread_join(m[k].thread, NULL);
    }
}

static void close_three(member m[3])
{
    for (int k = 0; k < 3; k++) {
        if (m[k].t != NULL) {
            m[k].t->ops->close(m[k].t);
        }
    }
    thread_world_free(m[0].world);
}

static void ends_of_waits(void)
{
    member m[3];
    ss_error err;
    ss_reduce_state state;
    char byte = 0, all[9];
    double start;

    /* late: all that are missing are named, with bucket and phase; the round can still be completed afterwards */
    open_three(m, 0.3);
    const ss_transport_ops *ops = m[0].t->ops;
    CHECK(ops->launch(m[0].t, 0, 1, &err) == SS_OK);
    start = now();
    CHECK(ops->reduce(m[0].t, 0, &err) == SS_ERR_TIMEOUT);
    CHECK(now() - start > 0.29 && now() - start < 1.5);
    CHECK(err.rank == 1 && err.bucket == 0);
    CHECK(strcmp(err.message, "rank 0 has waited 0.3 s in vain for the gradients of bucket 0 from ranks 1, 2") == 0);
    CHECK(m[0].t->traffic.wait_seconds > 0.2);
    CHECK(ops->launch(m[1].t, 0, 1, &err) == SS_OK);
    CHECK(ops->launch(m[2].t, 0, 0, &err) == SS_OK);
    CHECK(ops->reduce(m[0].t, 0, &err) == SS_OK);
    CHECK(m[0].t->traffic.reduce_scatter_bytes == 512 && m[0].t->traffic.reduce_scatters == 1);
    CHECK(ops->poll(m[1].t, 0, &state, &err) == SS_OK && state == SS_REDUCE_DONE);
    CHECK(ops->settle(m[0].t, &err) == SS_ERR_TIMEOUT && err.rank == 2);
    CHECK(ops->poll(m[2].t, 0, &state, &err) == SS_OK && state == SS_REDUCE_SETTLED);
    /* dead, but all that I need of it is there */
    thread_world_kill(m[0].world, 2);
    CHECK(ops->settle(m[0].t, &err) == SS_OK && ops->settle(m[1].t, &err) == SS_OK);
    /* dead, and needed */
    CHECK(ops->launch(m[0].t, 0, 1, &err) == SS_OK && ops->launch(m[1].t, 0, 1, &err) == SS_OK);
    CHECK(ops->reduce(m[0].t, 0, &err) == SS_ERR_PEER_LOST && err.rank == 2 && err.bucket == 0);
    CHECK(strcmp(err.message, "rank 2 has died while rank 0 waited for its gradients of bucket 0") == 0);
    /* the dead rank is named, rather than the one that noticed first and gave up */
    ops->fail(m[0].t, err.message);
    CHECK(ops->reduce(m[1].t, 0, &err) == SS_ERR_PEER_LOST && err.rank == 2);
    CHECK(ops->launch(m[0].t, 0, 1, &err) == SS_ERR_ABORTED);
    close_three(m);

    /* failed: its message arrives, whoever I wait for */
    open_three(m, 30);
    ops->fail(m[2].t, "the loss is a banana");
    start = now();
    CHECK(ops->exchange(m[0].t, &byte, 1, all, &err) == SS_ERR_ABORTED && err.rank == 2);
    CHECK(strcmp(err.message, "rank 2 has given up: the loss is a banana") == 0);
    CHECK(ops->exchange(m[0].t, &byte, 1, all, &err) == SS_ERR_TRANSPORT);
    CHECK(now() - start < 0.5);
    close_three(m);

    /* left: its close is seen at once */
    open_three(m, 30);
    ops->close(m[1].t);
    m[1].t = NULL;
    start = now();
    CHECK(ops->release(m[0].t, SS_PLANE_PARAM, &err) == SS_ERR_PEER_LOST && err.rank == 1);
    CHECK(strstr(err.message, "closed its transport") != NULL && now() - start < 1);
    close_three(m);

    /* interrupted, and repeated */
    open_three(m, 30);
    m[0].t->callbacks.interrupted = interrupt_third;
    CHECK(ops->release(m[0].t, SS_PLANE_GRAD, &err) == SS_ERR_INTERRUPTED && asked == 3);
    asked = -1000;
    thread_world_kill(m[0].world, 1);
    CHECK(ops->release(m[0].t, SS_PLANE_GRAD, &err) == SS_ERR_PEER_LOST);
    close_three(m);

    /* misuse */
    open_three(m, 30);
    CHECK(ops->launch(m[0].t, 1, 1, &err) == SS_ERR_USAGE && ops->launch(m[0].t, -1, 1, &err) == SS_ERR_USAGE);
    CHECK(ops->poll(m[0].t, 0, &state, &err) == SS_ERR_USAGE && ops->reduce(m[0].t, 0, &err) == SS_ERR_USAGE);
    CHECK(ops->launch(m[0].t, 0, 1, &err) == SS_OK && ops->launch(m[0].t, 0, 1, &err) == SS_ERR_USAGE);
    CHECK(ops->publish(m[0].t, SS_PLANE_PARAM, 0, &err) == SS_ERR_USAGE);
    CHECK(ops->collect(m[0].t, SS_PLANE_GRAD, 0, &err) == SS_ERR_USAGE);
    CHECK(ops->publish(m[0].t, SS_PLANE_GRAD, 0, &err) == SS_OK);
    CHECK(ops->publish(m[0].t, SS_PLANE_GRAD, 0, &err) == SS_ERR_USAGE);
    ss_region *region;
    ss_bucket_spec spec = {.segment = 100, .grad_dtype = SS_F32, .param_dtype = SS_F32, .param_offset = SIZE_MAX};
    CHECK(ops->add_chunk(m[0].t, &spec, 1, 4096, &region, &err) == SS_ERR_USAGE);
    spec.segment = INT64_MAX / 128 * 128;
    CHECK(ops->add_chunk(m[0].t, &spec, 1, 4096, &region, &err) == SS_ERR_USAGE);
    close_three(m);
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 2000;
    uint64_t seed = argc > 2 ? (uint64_t)atoll(argv[2]) : 1;
    ends_of_waits();
    for (int world = 1; world <= 4; world++) {
        stress(world, n, seed + (uint64_t)world);
    }
    puts("ok");
    return 0;
}
