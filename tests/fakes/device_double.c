/* A double of a device with streams, over host memory. See doubles.h. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/device.h"
#include "doubles.h"

enum { HOST = 0, MAX_STREAMS = 4096 };
#define IDLE_NS 30000000L /* after which the device goes on by itself */

struct ss_event {
    dd_stream *stream; /* where it was recorded last */
    uint64_t recorded, reached;
};

typedef struct operation operation;
struct operation {
    operation *next;
    ss_event *event; /* of a record or a wait, with `version`; NULL: work */
    uint64_t version;
    bool record, started;
    dd_work *work;
    struct timespec since;
};

struct dd_stream {
    int id;
    operation *first, **end;
    bool running; /* some thread ends its first operation */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static dd_stream streams[MAX_STREAMS];
static int n_streams;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local int current = HOST;
static struct {
    char *begin;
    size_t bytes;
} known[4096];
static atomic_int allocations, releases;

static struct timespec now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t;
}

static long since_ns(struct timespec then)
{
    struct timespec t = now();
    return (t.tv_sec - then.tv_sec) * 1000000000L + t.tv_nsec - then.tv_nsec;
}

static void pop(dd_stream *s)
{
    operation *o = s->first;
    s->first = o->next;
    if (s->first == NULL) {
        s->end = &s->first;
    }
    free(o);
    pthread_cond_broadcast(&moved);
}

/* Does what waits for nothing: marks, waits that are satisfied, and the beginning of work. */
static void advance(dd_stream *s)
{
    while (!s->running && s->first != NULL) {
        operation *o = s->first;
        if (o->event == NULL) {
            if (!o->started) {
                o->started = true;
                o->since = now();
                o->work->start(o->work);
            }
            return;
        }
        if (!o->record && o->event->reached < o->version) {
            return;
        }
        if (o->record && o->event->reached < o->version) {
            o->event->reached = o->version;
        }
        pop(s);
    }
}

static void reach(ss_event *event, uint64_t version);

/* Runs the first operation of a stream to its end. */
static void step(dd_stream *s)
{
    if (s->running) {
        pthread_cond_wait(&moved, &lock);
        return;
    }
    advance(s);
    operation *o = s->first;
    if (o == NULL) {
        return;
    }
    if (o->event != NULL) {
        reach(o->event, o->version);
        return;
    }
    s->running = true;
    pthread_mutex_unlock(&lock);
    o->work->finish(o->work);
    pthread_mutex_lock(&lock);
    s->running = false;
    pop(s);
    advance(s);
}

static void reach(ss_event *event, uint64_t version)
{
    while (event->reached < version) {
        step(event->stream);
    }
}

static void *go_on(void *unused)
{
    (void)unused;
    while (true) {
        usleep(10000);
        pthread_mutex_lock(&lock);
        for (int k = 0; k < n_streams; k++) {
            dd_stream *s = &streams[k];
            advance(s);
            if (!s->running && s->first != NULL && s->first->event == NULL && since_ns(s->first->since) > IDLE_NS) {
                step(s);
            }
        }
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static dd_stream *add_stream(void)
{
    dd_stream *s = &streams[n_streams];
    *s = (dd_stream){.id = n_streams++};
    s->end = &s->first;
    return s;
}

static void begin(void)
{
    pthread_t thread;
    pthread_mutex_lock(&lock);
    add_stream();
    pthread_mutex_unlock(&lock);
    pthread_create(&thread, NULL, go_on, NULL);
    pthread_detach(thread);
}

static void append(dd_stream *s, operation *o)
{
    *s->end = o;
    s->end = &o->next;
    advance(s);
}

void dd_enqueue(dd_stream *s, dd_work *work)
{
    operation *o = calloc(1, sizeof *o);
    o->work = work;
    pthread_mutex_lock(&lock);
    append(s, o);
    pthread_mutex_unlock(&lock);
}

/* Memory ----------------------------------------------------------------------------------------------------------- */

void dd_learn(void *begin, size_t bytes)
{
    pthread_mutex_lock(&lock);
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        if (known[k].begin == NULL) {
            known[k].begin = begin;
            known[k].bytes = bytes;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
}

void dd_forget(void *begin)
{
    pthread_mutex_lock(&lock);
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        if (known[k].begin == begin) {
            known[k].begin = NULL;
        }
    }
    pthread_mutex_unlock(&lock);
}

int dd_knows(const void *begin, size_t bytes)
{
    const char *at = begin;
    bool found = false;
    pthread_mutex_lock(&lock);
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        found |= known[k].begin != NULL && at >= known[k].begin && at + bytes <= known[k].begin + known[k].bytes;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static void destroy_region(ss_region *region)
{
    atomic_fetch_add(&releases, 1);
    dd_forget(region->base);
    free(region->base);
    free(region);
}

static ss_code double_allocate(ss_device *device, size_t bytes, ss_region **region, ss_error *err)
{
    (void)device;
    ss_region *made = calloc(1, sizeof *made);
    size_t rounded = (bytes + 4095) / 4096 * 4096;
    if (made == NULL || (made->base = aligned_alloc(4096, rounded)) == NULL) {
        free(made);
        return ss_fail(err, SS_ERR_NO_MEMORY, "the double has no memory");
    }
    memset(made->base, 0xff, rounded); /* a device does not clear it */
    made->bytes = bytes;
    made->destroy = destroy_region;
    atomic_init(&made->references, 1);
    dd_learn(made->base, rounded);
    atomic_fetch_add(&allocations, 1);
    *region = made;
    return SS_OK;
}

static ss_code double_zero(ss_device *device, void *at, size_t bytes, ss_error *err)
{
    (void)device;
    (void)err;
    memset(at, 0, bytes);
    return SS_OK;
}

/* Streams and events ----------------------------------------------------------------------------------------------- */

static int double_enter(ss_device *device)
{
    (void)device;
    return 0;
}

static void double_leave(ss_device *device, int before)
{
    (void)device;
    (void)before;
}

static ss_code double_current(ss_device *device, ss_stream *stream, ss_error *err)
{
    (void)device;
    (void)err;
    *stream = (ss_stream){current, &streams[current]};
    return SS_OK;
}

static ss_code double_new_stream(ss_device *device, ss_stream *stream, ss_error *err)
{
    (void)device;
    pthread_mutex_lock(&lock);
    dd_stream *s = n_streams < MAX_STREAMS ? add_stream() : NULL;
    pthread_mutex_unlock(&lock);
    if (s == NULL) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "the double has no more streams");
    }
    *stream = (ss_stream){s->id, s};
    return SS_OK;
}

static ss_event *double_new_event(ss_device *device)
{
    (void)device;
    return calloc(1, sizeof(ss_event));
}

static void double_free_event(ss_device *device, ss_event *event)
{
    (void)device;
    pthread_mutex_lock(&lock);
    reach(event, event->recorded); /* operations in queues know it by address */
    pthread_mutex_unlock(&lock);
    free(event);
}

static ss_code double_record(ss_device *device, ss_event *event, ss_stream stream, ss_error *err)
{
    (void)device;
    (void)err;
    operation *o = calloc(1, sizeof *o);
    pthread_mutex_lock(&lock);
    event->stream = stream.native;
    *o = (operation){.event = event, .version = ++event->recorded, .record = true};
    append(stream.native, o);
    pthread_mutex_unlock(&lock);
    return SS_OK;
}

static ss_code double_wait(ss_device *device, ss_event *event, ss_stream stream, ss_error *err)
{
    (void)device;
    (void)err;
    pthread_mutex_lock(&lock);
    if (stream.id == HOST) { /* what comes next is torch's work, which is done at once */
        reach(event, event->recorded);
    } else {
        operation *o = calloc(1, sizeof *o);
        *o = (operation){.event = event, .version = event->recorded};
        append(stream.native, o);
    }
    pthread_mutex_unlock(&lock);
    return SS_OK;
}

static ss_code double_done(ss_device *device, ss_event *event, int *done, ss_error *err)
{
    (void)device;
    (void)err;
    pthread_mutex_lock(&lock);
    *done = event->reached >= event->recorded;
    pthread_mutex_unlock(&lock);
    return SS_OK;
}

static void double_destroy(ss_device *device) { (void)device; }

static const ss_device_ops ops = {
    .size = sizeof(ss_device_ops),
    .name = "double of a device",
    .enter = double_enter,
    .leave = double_leave,
    .allocate = double_allocate,
    .zero = double_zero,
    .current = double_current,
    .new_stream = double_new_stream,
    .new_event = double_new_event,
    .free_event = double_free_event,
    .record = double_record,
    .wait = double_wait,
    .done = double_done,
    .destroy = double_destroy,
};
static ss_device device = {.ops = &ops, .references = 1};

EXPORT ss_device *dd_device(void)
{
    pthread_once(&once, begin);
    return &device;
}

/* Memory that the device gave, and what has come back of it. */
EXPORT void dd_memory(int *given, int *back)
{
    *given = atomic_load(&allocations);
    *back = atomic_load(&releases);
}
