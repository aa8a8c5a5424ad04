/*
 * Where tensors live and work is done: an abstract device with streams and events, as the engine and transports see it.
 *
 * A stream is a queue of work that runs in order; an event marks a place in one. Work on different streams is ordered by
 * events alone, and no call here waits for the device: the host runs ahead of it. The framework (torch) has a current
 * stream per thread, on which its own work and the engine's goes.
 *
 * The shim implements it for torch's accelerators (device.cpp); on the CPU there is none (a NULL ss_device), as the host's
 * work is done when a call returns.
 */
#ifndef SHARDSTEP_CORE_DEVICE_H
#define SHARDSTEP_CORE_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include "core/region.h"
#include "core/status.h"
#include "cuda/load.h" /* what kernels a device has, as a table of functions; nothing of CUDA itself */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int64_t id;   /* the framework's name of it */
    void *native; /* what the device's own libraries take (a cudaStream_t) */
} ss_stream;

typedef struct ss_event ss_event; /* the device's */
typedef struct ss_device ss_device;

typedef struct {
    size_t size; /* sizeof(ss_device_ops) */
    const char *name;

    /* Makes this device the calling thread's, for libraries that look at that; leave() gets what enter() gave. */
    int (*enter)(ss_device *device);
    void (*leave)(ss_device *device, int before);

    /* Memory that is the caller's until the region's last reference goes. */
    ss_code (*allocate)(ss_device *device, size_t bytes, ss_region **region, ss_error *err);
    /* Enqueues on the current stream. */
    ss_code (*zero)(ss_device *device, void *at, size_t bytes, ss_error *err);
    /* Copies to the host. Waits for the current stream: not for a step that has to run ahead of the device. */
    ss_code (*read)(ss_device *device, void *to, const void *from, size_t bytes, ss_error *err);

    /* The calling thread's current stream; a stream of the caller's own, of high priority, which lives as long as the device. */
    ss_code (*current)(ss_device *device, ss_stream *stream, ss_error *err);
    ss_code (*new_stream)(ss_device *device, ss_stream *stream, ss_error *err);

    /* record() marks the end of what `stream` has got so far, moving the mark of an event that was recorded before; later work of
       `stream` in wait() does not begin before what came before the mark is done; done() asks, without waiting. */
    ss_event *(*new_event)(ss_device *device); /* NULL: no memory */
    void (*free_event)(ss_device *device, ss_event *event);
    ss_code (*record)(ss_device *device, ss_event *event, ss_stream stream, ss_error *err);
    ss_code (*wait)(ss_device *device, ss_event *event, ss_stream stream, ss_error *err);
    ss_code (*done)(ss_device *device, ss_event *event, int *done, ss_error *err);

    void (*destroy)(ss_device *device);
} ss_device_ops;

struct ss_device {
    const ss_device_ops *ops;
    const ss_cuda *kernels; /* take the native stream that they are enqueued on */
    atomic_int references; /* set to 1 by the maker */
};

static inline ss_device *ss_device_retain(ss_device *device)
{
    if (device != NULL) {
        atomic_fetch_add(&device->references, 1);
    }
    return device;
}

static inline void ss_device_release(ss_device *device)
{
    if (device != NULL && atomic_fetch_sub(&device->references, 1) == 1) {
        device->ops->destroy(device);
    }
}

#ifdef __cplusplus
}
#endif
#endif
