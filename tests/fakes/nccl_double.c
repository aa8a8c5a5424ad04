/* A double of NCCL's C interface. See doubles.h. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "doubles.h"

enum { SUCCESS, UNHANDLED_CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };
enum { MAX_RANKS = 16, MAX_GROUP = 1024 };
#define SLOT_BYTES ((size_t)64 << 20)
#define CONFIG_MAGIC 0xcafebeefu

typedef struct {
    char internal[128];
} unique_id;

/* ncclConfig_t as far as every version since 2.18 has it. */
typedef struct {
    size_t size;
    unsigned int magic, version;
    int blocking, cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
} config;

enum { REDUCE_SCATTER, ALL_GATHER };
typedef struct {
    int what, type;
    size_t count;
} description;

/* What a rank says of one group: everything that it sends, one after the other. */
typedef struct {
    int n;
    description described[MAX_GROUP];
    char data[];
} slot;

typedef struct {
    atomic_int joined[MAX_RANKS];
    char gpu[MAX_RANKS][64];
    atomic_ulong posted[MAX_RANKS]; /* groups begun */
} shared;

typedef struct {
    int what, type;
    size_t count;
    char *send, *receive;
} collective;

typedef struct comm comm;
struct comm {
    int rank, world;
    shared *shared;
    size_t bytes;
    char path[128];
    uint64_t groups; /* begun by this rank */
    atomic_int state;
    atomic_bool aborted;
    bool finalized;
    int busy; /* calls that the next group end answers with "in progress" */
    struct group *held; /* until then the stream has not got it */
    dd_stream *held_for;
    int references; /* the user's, and one for each group on its way */
};

typedef struct group {
    dd_work work;
    comm *comm;
    uint64_t number;
    int n;
    collective collectives[MAX_GROUP];
} group;

typedef struct {
    const comm *comm;
    void *memory;
    size_t bytes;
    bool window, used;
} registration;

/* What tests ask about. The first fields are settings. */
typedef struct {
    int version;        /* e.g. 22703 */
    int busy;           /* how often a group end is answered with "in progress" before it is done */
    int fail_at;        /* the number of the group (from 1) that ends in an asynchronous error; 0: none */
    int groups, collectives, largest_group, mem_alloc, mem_free, registered, deregistered, windows, windows_gone, finalized,
        destroyed, aborted, outside_group, errors, ahead;
} nccl_double;
EXPORT nccl_double nccl_double_now = {.version = 22703};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local char last_error[256];
static _Thread_local int depth;
static _Thread_local group *filling;
static _Thread_local dd_stream *filling_for;
static registration registrations[256];

static int wrong(int code, const char *text)
{
    snprintf(last_error, sizeof last_error, "double: %s", text);
    nccl_double_now.errors++;
    return code;
}

EXPORT const char *ncclGetErrorString(int result)
{
    static const char *const names[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                        "invalid argument", "invalid usage", "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return result >= 0 && result < 8 ? names[result] : "unknown result code";
}

EXPORT const char *ncclGetLastError(comm *c)
{
    (void)c;
    return last_error;
}

EXPORT int ncclGetVersion(int *version)
{
    const char *asked = getenv("SHARDSTEP_DOUBLE_VERSION");
    if (asked != NULL) {
        nccl_double_now.version = atoi(asked);
    }
    *version = nccl_double_now.version;
    return SUCCESS;
}

/* Communicators ---------------------------------------------------------------------------------------------------- */

static slot *slot_of(const comm *c, int rank, uint64_t number)
{
    char *slots = (char *)c->shared + sizeof(shared);
    return (slot *)(slots + ((size_t)rank * 2 + number % 2) * SLOT_BYTES);
}

EXPORT int ncclGetUniqueId(unique_id *id)
{
    uint64_t name = 0;
    if (getrandom(&name, sizeof name, 0) != (ssize_t)sizeof name) {
        return SYSTEM_ERROR;
    }
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/dev/shm/shardstep-nccl-double-%016llx", (unsigned long long)name);
    return SUCCESS;
}

EXPORT int ncclCommInitRankConfig(comm **result, int world, unique_id id, int rank, config *config)
{
    if (config->magic != CONFIG_MAGIC || config->size < sizeof *config || config->version < 21800 || config->version > 22800) {
        return wrong(INVALID_ARGUMENT, "the configuration is not one");
    }
    if (config->blocking != 0) {
        return wrong(INVALID_USAGE, "only non-blocking communicators can be aborted in time");
    }
    if (world > MAX_RANKS) {
        return wrong(INVALID_ARGUMENT, "too many ranks");
    }
    comm *c = calloc(1, sizeof *c);
    c->rank = rank;
    c->world = world;
    c->references = 1;
    c->bytes = sizeof(shared) + (size_t)world * 2 * SLOT_BYTES;
    snprintf(c->path, sizeof c->path, "%s", id.internal);
    int fd = open(c->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)c->bytes) != 0) { /* sparse */
        free(c);
        return wrong(SYSTEM_ERROR, strerror(errno));
    }
    c->shared = mmap(NULL, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    close(fd);
    const char *gpu = getenv("SHARDSTEP_DOUBLE_GPU");
    snprintf(c->shared->gpu[rank], sizeof c->shared->gpu[rank], "%s", gpu != NULL ? gpu : "");
    atomic_store(&c->shared->joined[rank], 1);
    atomic_store(&c->state, IN_PROGRESS);
    *result = c;
    return IN_PROGRESS;
}

static void try_begin(comm *c)
{
    for (int k = 0; k < c->world; k++) {
        if (!atomic_load(&c->shared->joined[k])) {
            return;
        }
    }
    for (int k = 0; k < c->world; k++) {
        for (int j = 0; j < k; j++) {
            if (*c->shared->gpu[k] != '\0' && strcmp(c->shared->gpu[j], c->shared->gpu[k]) == 0) {
                snprintf(last_error, sizeof last_error, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %s", j,
                         k, c->shared->gpu[k]);
                atomic_store(&c->state, INVALID_USAGE);
                return;
            }
        }
    }
    unlink(c->path);
    atomic_store(&c->state, SUCCESS);
}

static void unhold(comm *c)
{
    if (c->held != NULL) {
        dd_enqueue(c->held_for, &c->held->work);
        c->held = NULL;
    }
}

EXPORT int ncclCommGetAsyncError(comm *c, int *state)
{
    if (atomic_load(&c->state) == IN_PROGRESS && c->groups == 0 && !c->finalized) {
        try_begin(c);
    }
    if (c->held != NULL && c->busy-- > 0) {
        *state = IN_PROGRESS;
        return SUCCESS;
    }
    unhold(c);
    *state = atomic_load(&c->state);
    return SUCCESS;
}

static void drop(comm *c)
{
    pthread_mutex_lock(&lock);
    bool last = --c->references == 0;
    pthread_mutex_unlock(&lock);
    if (last) {
        unlink(c->path);
        munmap(c->shared, c->bytes);
        free(c);
    }
}

static void free_group(group *g)
{
    comm *c = g->comm;
    free(g);
    drop(c);
}

EXPORT int ncclCommFinalize(comm *c)
{
    c->finalized = true;
    nccl_double_now.finalized++;
    return SUCCESS;
}

EXPORT int ncclCommDestroy(comm *c)
{
    if (!c->finalized) {
        return wrong(INVALID_USAGE, "a non-blocking communicator is destroyed only after it was finalised");
    }
    nccl_double_now.destroyed++;
    drop(c);
    return SUCCESS;
}

EXPORT int ncclCommAbort(comm *c)
{
    nccl_double_now.aborted++;
    atomic_store(&c->aborted, true);
    pthread_mutex_lock(&lock);
    for (size_t k = 0; k < sizeof registrations / sizeof *registrations; k++) {
        registrations[k].used &= registrations[k].comm != c;
    }
    pthread_mutex_unlock(&lock);
    if (c->held != NULL) {
        free_group(c->held);
        c->held = NULL;
    }
    drop(c);
    return SUCCESS;
}

/* Collectives ------------------------------------------------------------------------------------------------------ */

static size_t size_of(int type) { return type == 7 ? 4 : type == 8 ? 8 : type <= 1 ? 1 : 0; }

static size_t sent_bytes(const group *g, const collective *c)
{
    return c->count * size_of(c->type) * (c->what == REDUCE_SCATTER ? (size_t)g->comm->world : 1);
}

/* Reads this rank's memory: what is not written to it by now is not sent. */
static void start(dd_work *work)
{
    group *g = (group *)work;
    comm *c = g->comm;
    g->number = ++c->groups;
    slot *mine = slot_of(c, c->rank, g->number);
    char *at = mine->data;
    mine->n = g->n;
    for (int k = 0; k < g->n; k++) {
        const collective *o = &g->collectives[k];
        mine->described[k] = (description){o->what, o->type, o->count};
        memcpy(at, o->send, sent_bytes(g, o));
        at += (sent_bytes(g, o) + 15) / 16 * 16;
    }
    atomic_store(&c->shared->posted[c->rank], g->number);
}

static bool await_peers(const group *g)
{
    comm *c = g->comm;
    for (int k = 0; k < c->world; k++) {
        for (long spins = 0; atomic_load(&c->shared->posted[k]) < g->number; spins++) {
            if (atomic_load(&c->aborted) || atomic_load(&c->state) > SUCCESS) {
                return false;
            }
            struct timespec pause = {0, spins < 200 ? 0 : 50000};
            nanosleep(&pause, NULL);
        }
    }
    return !atomic_load(&c->aborted);
}

static bool alike(const group *g)
{
    const slot *mine = slot_of(g->comm, g->comm->rank, g->number);
    for (int k = 0; k < g->comm->world; k++) {
        const slot *theirs = slot_of(g->comm, k, g->number);
        if (theirs->n != mine->n) {
            return false;
        }
        for (int i = 0; i < mine->n; i++) {
            const description *a = &mine->described[i], *b = &theirs->described[i];
            if (a->what != b->what || a->type != b->type || a->count != b->count) {
                return false;
            }
        }
    }
    return true;
}

static void sum(const group *g, const collective *o, size_t offset)
{
    const comm *c = g->comm;
    size_t bytes = o->count * size_of(o->type);
    for (int k = 0; k < c->world; k++) {
        const char *theirs = slot_of(c, k, g->number)->data + offset + (size_t)c->rank * bytes;
        if (k == 0) {
            memcpy(o->receive, theirs, bytes);
        } else if (o->type == 8) {
            for (size_t i = 0; i < o->count; i++) {
                ((double *)o->receive)[i] += ((const double *)theirs)[i];
            }
        } else {
            for (size_t i = 0; i < o->count; i++) {
                ((float *)o->receive)[i] += ((const float *)theirs)[i];
            }
        }
    }
    /* NCCL may leave anything in the segments that are not this rank's. */
    for (int k = 0; k < c->world; k++) {
        if (k != c->rank) {
            memset(o->send + (size_t)k * bytes, 0xff, bytes);
        }
    }
}

static void finish(dd_work *work)
{
    group *g = (group *)work;
    comm *c = g->comm;
    if (nccl_double_now.fail_at != 0 && (uint64_t)nccl_double_now.fail_at == g->number) {
        snprintf(last_error, sizeof last_error, "double: a failure that the test asked for");
        atomic_store(&c->state, REMOTE_ERROR);
    }
    if (await_peers(g)) {
        if (!alike(g)) {
            wrong(INVALID_USAGE, "ranks do not do the same in one group");
            atomic_store(&c->state, INVALID_USAGE);
        } else {
            size_t offset = 0;
            for (int k = 0; k < g->n; k++) {
                const collective *o = &g->collectives[k];
                if (o->what == REDUCE_SCATTER) {
                    sum(g, o, offset);
                } else {
                    for (int r = 0; r < c->world; r++) {
                        memcpy(o->receive + (size_t)r * o->count, slot_of(c, r, g->number)->data + offset, o->count);
                    }
                }
                offset += (sent_bytes(g, o) + 15) / 16 * 16;
            }
        }
    }
    free_group(g);
}

EXPORT int ncclGroupStart(void)
{
    depth++;
    return SUCCESS;
}

EXPORT int ncclGroupEnd(void)
{
    if (depth == 0) {
        return wrong(INVALID_USAGE, "a group ends that has not begun");
    }
    if (--depth > 0 || filling == NULL) {
        return SUCCESS;
    }
    group *g = filling;
    filling = NULL;
    comm *c = g->comm;
    nccl_double_now.groups++;
    if (g->n > nccl_double_now.largest_group) {
        nccl_double_now.largest_group = g->n;
    }
    c->held = g;
    c->held_for = filling_for;
    c->busy = nccl_double_now.busy;
    if (c->busy == 0) {
        unhold(c);
        return SUCCESS;
    }
    return IN_PROGRESS;
}

static bool registered(const void *memory, size_t bytes)
{
    const char *at = memory;
    for (size_t k = 0; k < sizeof registrations / sizeof *registrations; k++) {
        const registration *r = &registrations[k];
        if (r->used && at >= (char *)r->memory && at + bytes <= (char *)r->memory + r->bytes) {
            return true;
        }
    }
    return nccl_double_now.version < 21900;
}

static int add(comm *c, collective o, size_t bytes, void *stream)
{
    nccl_double_now.collectives++;
    nccl_double_now.ahead += dd_is_ahead(stream);
    if (depth == 0) {
        nccl_double_now.outside_group++;
        return wrong(INVALID_USAGE, "a collective outside a group");
    }
    if (atomic_load(&c->aborted)) {
        return wrong(INVALID_USAGE, "the communicator was aborted");
    }
    if (atomic_load(&c->state) != SUCCESS || c->held != NULL) {
        return wrong(INVALID_USAGE, "the communicator is busy or has failed");
    }
    if (size_of(o.type) == 0) {
        return wrong(INVALID_ARGUMENT, "a data type that the double does not know");
    }
    if (!dd_knows(o.what == REDUCE_SCATTER ? o.send : o.receive, bytes)) {
        return wrong(INVALID_ARGUMENT, "memory that is not the device's");
    }
    if (bytes > 4096 && !registered(o.what == REDUCE_SCATTER ? o.send : o.receive, bytes)) { /* a few numbers may be */
        return wrong(INVALID_ARGUMENT, "memory that was not registered");
    }
    if (filling == NULL) {
        filling = calloc(1, sizeof *filling);
        filling->work = (dd_work){start, finish};
        filling->comm = c;
        filling_for = stream;
        pthread_mutex_lock(&lock);
        c->references++;
        pthread_mutex_unlock(&lock);
    }
    if (filling->comm != c || filling_for != stream || filling->n == MAX_GROUP) {
        return wrong(INVALID_USAGE, "one communicator and stream in a group, and not too many collectives");
    }
    size_t total = sizeof(slot);
    filling->collectives[filling->n++] = o;
    for (int k = 0; k < filling->n; k++) {
        total += (sent_bytes(filling, &filling->collectives[k]) + 15) / 16 * 16;
    }
    return total <= SLOT_BYTES ? SUCCESS : wrong(INTERNAL_ERROR, "more than the double has room for");
}

EXPORT int ncclReduceScatter(const void *send, void *receive, size_t count, int type, int op, comm *c, void *stream)
{
    size_t segment = count * size_of(type);
    if (op != 0) {
        return wrong(INVALID_ARGUMENT, "an operation that the double does not know");
    }
    if ((char *)receive != (char *)send + (size_t)c->rank * segment) {
        return wrong(INVALID_ARGUMENT, "a reduce-scatter that is not in place");
    }
    return add(c, (collective){REDUCE_SCATTER, type, count, (char *)send, receive}, segment * (size_t)c->world, stream);
}

EXPORT int ncclAllGather(const void *send, void *receive, size_t count, int type, comm *c, void *stream)
{
    size_t segment = count * size_of(type);
    if ((char *)send != (char *)receive + (size_t)c->rank * segment) {
        return wrong(INVALID_ARGUMENT, "an all-gather that is not in place");
    }
    if (size_of(type) != 1) {
        return wrong(INVALID_ARGUMENT, "the double gathers bytes only");
    }
    return add(c, (collective){ALL_GATHER, type, count, (char *)send, receive}, segment * (size_t)c->world, stream);
}

/* Memory ----------------------------------------------------------------------------------------------------------- */

EXPORT int ncclMemAlloc(void **memory, size_t size)
{
    size_t bytes = (size + 4095) / 4096 * 4096;
    if (nccl_double_now.version < 21900) {
        return wrong(INVALID_USAGE, "this version has no ncclMemAlloc");
    }
    *memory = aligned_alloc(4096, bytes);
    memset(*memory, 0xff, bytes); /* NCCL does not clear it */
    dd_learn(*memory, bytes);
    nccl_double_now.mem_alloc++;
    return SUCCESS;
}

EXPORT int ncclMemFree(void *memory)
{
    for (size_t k = 0; k < sizeof registrations / sizeof *registrations; k++) {
        if (registrations[k].used && registrations[k].memory == memory) {
            return wrong(INVALID_USAGE, "memory is freed while it is registered");
        }
    }
    dd_flush_all(); /* it waits for the device */
    dd_forget(memory);
    free(memory);
    nccl_double_now.mem_free++;
    return SUCCESS;
}

static int register_memory(const comm *c, void *memory, size_t size, bool window, void **handle)
{
    pthread_mutex_lock(&lock);
    *handle = NULL;
    for (size_t k = 0; k < sizeof registrations / sizeof *registrations && *handle == NULL; k++) {
        if (!registrations[k].used) {
            registrations[k] = (registration){c, memory, size, window, true};
            *handle = &registrations[k];
        }
    }
    pthread_mutex_unlock(&lock);
    return *handle != NULL ? SUCCESS : wrong(INTERNAL_ERROR, "too many registrations");
}

static int deregister_memory(void *handle, bool window)
{
    registration *r = handle;
    if (!r->used || r->window != window) {
        return wrong(INVALID_ARGUMENT, "no such registration");
    }
    r->used = false;
    return SUCCESS;
}

EXPORT int ncclCommRegister(comm *c, void *memory, size_t size, void **handle)
{
    nccl_double_now.registered++;
    return register_memory(c, memory, size, false, handle);
}

EXPORT int ncclCommDeregister(comm *c, void *handle)
{
    (void)c;
    nccl_double_now.deregistered++;
    return deregister_memory(handle, false);
}

EXPORT int ncclCommWindowRegister(comm *c, void *memory, size_t size, void **window, int flags)
{
    if (nccl_double_now.version < 22700 || flags != 1 || (uintptr_t)memory % 4096 != 0) {
        return wrong(INVALID_ARGUMENT, "a window that this version does not have, or that is not aligned");
    }
    nccl_double_now.windows++;
    return register_memory(c, memory, size, true, window);
}

EXPORT int ncclCommWindowDeregister(comm *c, void *window)
{
    (void)c;
    nccl_double_now.windows_gone++;
    return deregister_memory(window, true);
}
