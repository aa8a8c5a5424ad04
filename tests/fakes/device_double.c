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

enum { DEFAULT = 0, MAX_STREAMS = 4096, FRAMEWORKS = 8 };
#define IDLE_NS 30000000L /* after which the device goes on by itself */

/* torch's work is done at once, so that it would be seen even where nothing orders it. Hence a count of what each of its streams
   has got, and, for every stream, how much of that its own work comes after. */
typedef struct {
    uint64_t of[FRAMEWORKS];
} seen;

struct ss_event {
    dd_stream *stream; /* where it was recorded last */
    uint64_t recorded, reached;
    seen seen;
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
    bool frameworks;
    seen seen;
    bool running; /* some thread ends its first operation */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static dd_stream streams[MAX_STREAMS];
static int n_streams;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local int current = DEFAULT;
static struct {
    char *begin;
    size_t bytes;
} known[4096];
static atomic_int allocations, releases, reads;
static atomic_int ignored; /* for tests of the double itself: bit 0: waits of streams of the library's own count for nothing, bit 1:
                              those of the framework's streams */

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
                o->work->start(o->work);
            }
            return;
        }
        if (!o->record && o->event->reached < o->version) {
            return;
        }
        bool mark = o->record && o->event->reached < o->version;
        if (mark) {
            o->event->reached = o->version;
        }
        pop(s);
        for (int k = 0; mark && k < n_streams; k++) { /* which may have waited for it */
            if (&streams[k] != s) {
                advance(&streams[k]);
            }
        }
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
            if (!s->running && s->first != NULL && since_ns(s->first->since) > IDLE_NS) {
                step(s);
            }
        }
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static dd_stream *add_stream(bool frameworks)
{
    dd_stream *s = &streams[n_streams];
    *s = (dd_stream){.id = n_streams++, .frameworks = frameworks};
    s->end = &s->first;
    return s;
}

static void begin(void)
{
    pthread_t thread;
    pthread_mutex_lock(&lock);
    for (int k = 0; k < FRAMEWORKS; k++) {
        add_stream(true);
    }
    pthread_mutex_unlock(&lock);
    pthread_create(&thread, NULL, go_on, NULL);
    pthread_detach(thread);
}

static void append(dd_stream *s, operation *o)
{
    o->since = now();
    *s->end = o;
    s->end = &o->next;
    advance(s);
}

static void flush(dd_stream *s)
{
    while (s->first != NULL) {
        step(s);
    }
}

void dd_flush(void)
{
    pthread_mutex_lock(&lock);
    if (current < FRAMEWORKS) {
        streams[current].seen.of[current]++;
    }
    flush(&streams[current]);
    pthread_mutex_unlock(&lock);
}

void dd_flush_all(void)
{
    pthread_mutex_lock(&lock);
    for (int k = 0; k < n_streams; k++) {
        flush(&streams[k]);
    }
    pthread_mutex_unlock(&lock);
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

/* What a region's memory has to wait for before it is somebody else's: what the current stream has got. */
typedef struct {
    dd_work work;
    void *base;
    size_t bytes; /* 0: free it, else: clear it */
} memory_work;

static void no_start(dd_work *work) { (void)work; }

static void finish_memory(dd_work *work)
{
    memory_work *w = (memory_work *)work;
    if (w->bytes > 0) {
        memset(w->base, 0, w->bytes);
    } else {
        dd_forget(w->base);
        free(w->base);
    }
    free(w);
}

static void enqueue_memory(void *base, size_t bytes)
{
    memory_work *w = malloc(sizeof *w);
    *w = (memory_work){{no_start, finish_memory}, base, bytes};
    dd_enqueue(&streams[current], &w->work);
}

static void destroy_region(ss_region *region)
{
    atomic_fetch_add(&releases, 1);
    enqueue_memory(region->base, 0);
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
    enqueue_memory(at, bytes);
    return SS_OK;
}

static ss_code double_read(ss_device *device, void *to, const void *from, size_t bytes, ss_error *err)
{
    (void)device;
    (void)err;
    atomic_fetch_add(&reads, 1);
    dd_flush();
    memcpy(to, from, bytes);
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
    dd_stream *s = n_streams < MAX_STREAMS ? add_stream(false) : NULL;
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
    event->seen = event->stream->seen;
    *o = (operation){.event = event, .version = ++event->recorded, .record = true};
    append(stream.native, o);
    pthread_mutex_unlock(&lock);
    return SS_OK;
}

static ss_code double_wait(ss_device *device, ss_event *event, ss_stream stream, ss_error *err)
{
    (void)device;
    (void)err;
    operation *o = calloc(1, sizeof *o);
    pthread_mutex_lock(&lock);
    if (atomic_load(&ignored) & (((dd_stream *)stream.native)->frameworks ? 2 : 1)) {
        free(o);
    } else {
        *o = (operation){.event = event, .version = event->recorded};
        append(stream.native, o);
        seen *mine = &((dd_stream *)stream.native)->seen;
        for (int k = 0; k < FRAMEWORKS; k++) {
            mine->of[k] = mine->of[k] > event->seen.of[k] ? mine->of[k] : event->seen.of[k];
        }
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
    .read = double_read,
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

const ss_cuda *dd_kernels(void);

EXPORT ss_device *dd_device(void)
{
    pthread_once(&once, begin);
    device.kernels = dd_kernels();
    return &device;
}

EXPORT void dd_ignore_waits(int which) { atomic_store(&ignored, which); }

/* A side stream of the framework's; and the stream that is current in this thread. */
EXPORT int dd_framework_stream(int number) { return DEFAULT + 1 + number; }

EXPORT int dd_set_current(int id)
{
    int before = current;
    current = id;
    return before;
}

/* Is there work of a side stream of torch's that later work of this stream is not ordered after? */
int dd_is_ahead(dd_stream *s)
{
    bool ahead = false;
    pthread_mutex_lock(&lock);
    for (int k = DEFAULT + 1; k < FRAMEWORKS && k < n_streams; k++) {
        ahead |= streams[k].frameworks && s->seen.of[k] < streams[k].seen.of[k];
    }
    pthread_mutex_unlock(&lock);
    return ahead;
}

/* How often the host has waited for the device to read from it. */
EXPORT int dd_reads(void) { return atomic_load(&reads); }

/* Memory that the device gave, and what has come back of it. */
EXPORT void dd_memory(int *given, int *back)
{
    *given = atomic_load(&allocations);
    *back = atomic_load(&releases);
}
