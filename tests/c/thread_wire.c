#define _GNU_SOURCE
#include "thread_wire.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Memory that one rank shared: freed when its region and the world have let go of it. */
typedef struct {
    ss_region region; /* first: what destroy() gets */
    atomic_int holders;
    void *memory;
} allocation;

/* The k-th share() of every rank. */
typedef struct step step;
struct step {
    step *next;
    allocation **shared; /* per rank, NULL until it has arrived */
};

struct thread_world {
    int n_ranks;
    pthread_mutex_t lock;
    pthread_cond_t arrived;
    step *steps;
    atomic_int *dead;
};

typedef struct {
    ss_shm_wire base;
    thread_world *world;
    step **next; /* where my next step hangs */
} thread_wire;

static void drop(allocation *a)
{
    if (atomic_fetch_sub(&a->holders, 1) == 1) {
        free(a->memory);
        free(a);
    }
}

static void destroy_region(ss_region *region) { drop((allocation *)region); }

static allocation *allocate(size_t bytes, int holders)
{
    allocation *a = calloc(1, sizeof *a);
    a->memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    memset(a->memory, 0, bytes);
    a->region.base = a->memory;
    a->region.bytes = bytes;
    a->region.destroy = destroy_region;
    atomic_init(&a->region.references, 1);
    atomic_init(&a->holders, holders);
    return a;
}

static ss_code wait_for(thread_wire *w, step *s, int rank, const struct timespec *deadline, ss_error *err)
{
    while (s->shared[rank] == NULL) {
        if (w->base.waiting != NULL) {
            SS_TRY(w->base.waiting(w->base.waiting_ctx, err));
        }
        if (atomic_load(&w->world->dead[rank])) {
            return ss_fail_at(err, SS_ERR_PEER_LOST, rank, -1, "rank %d has died", rank);
        }
        struct timespec now, slice;
        clock_gettime(CLOCK_REALTIME, &now);
        if (now.tv_sec > deadline->tv_sec || (now.tv_sec == deadline->tv_sec && now.tv_nsec >= deadline->tv_nsec)) {
            return ss_fail_at(err, SS_ERR_TIMEOUT, rank, -1, "rank %d has not shared its memory", rank);
        }
        slice = now;
        slice.tv_nsec += 100000000;
        slice.tv_sec += slice.tv_nsec / 1000000000;
        slice.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&w->world->arrived, &w->world->lock, &slice);
    }
    return SS_OK;
}

static ss_code thread_share(ss_shm_wire *wire, size_t bytes, ss_shm_access access, ss_region **region, void **bases,
                            ss_error *err)
{
    (void)access;
    thread_wire *w = (thread_wire *)wire;
    thread_world *world = w->world;
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += (time_t)wire->timeout + 1;

    /* Held by my region, and by the world because peers may look at it for as long as they are open. */
    allocation *mine = allocate(bytes, 2);
    ss_code code = SS_OK;
    pthread_mutex_lock(&world->lock);
    if (*w->next == NULL) {
        *w->next = calloc(1, sizeof(step));
        (*w->next)->shared = calloc((size_t)world->n_ranks, sizeof(allocation *));
    }
    step *s = *w->next;
    w->next = &s->next;
    s->shared[wire->rank] = mine;
    pthread_cond_broadcast(&world->arrived);
    for (int k = 0; k < world->n_ranks && code == SS_OK; k++) {
        code = wait_for(w, s, k, &deadline, err);
        bases[k] = code == SS_OK ? s->shared[k]->memory : NULL;
    }
    pthread_mutex_unlock(&world->lock);
    if (code != SS_OK) {
        ss_region_release(&mine->region);
        return code;
    }
    *region = &mine->region;
    return SS_OK;
}

static int thread_alive(ss_shm_wire *wire, int rank)
{
    return !atomic_load(&((thread_wire *)wire)->world->dead[rank]);
}

static void thread_close(ss_shm_wire *wire) { free(wire); }

static const ss_shm_wire_ops thread_ops = {thread_share, thread_alive, thread_close};

thread_world *thread_world_new(int n_ranks)
{
    thread_world *world = calloc(1, sizeof *world);
    world->n_ranks = n_ranks;
    world->dead = calloc((size_t)n_ranks, sizeof *world->dead);
    pthread_mutex_init(&world->lock, NULL);
    pthread_cond_init(&world->arrived, NULL);
    return world;
}

void thread_world_free(thread_world *world)
{
    while (world->steps != NULL) {
        step *s = world->steps;
        world->steps = s->next;
        for (int k = 0; k < world->n_ranks; k++) {
            if (s->shared[k] != NULL) {
                drop(s->shared[k]);
            }
        }
        free(s->shared);
        free(s);
    }
    pthread_mutex_destroy(&world->lock);
    pthread_cond_destroy(&world->arrived);
    free(world->dead);
    free(world);
}

ss_shm_wire *thread_wire_open(thread_world *world, int rank, double timeout)
{
    thread_wire *w = calloc(1, sizeof *w);
    w->base = (ss_shm_wire){.ops = &thread_ops, .rank = rank, .world = world->n_ranks, .timeout = timeout};
    w->world = world;
    w->next = &world->steps;
    return &w->base;
}

void thread_world_kill(thread_world *world, int rank)
{
    atomic_store(&world->dead[rank], 1);
    pthread_mutex_lock(&world->lock);
    pthread_cond_broadcast(&world->arrived);
    pthread_mutex_unlock(&world->lock);
}
