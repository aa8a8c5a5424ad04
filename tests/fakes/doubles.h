/*
 * Test doubles of a GPU and of NCCL. Neither is the real thing, and no figure from them says anything about it: memory is the
 * host's, and ranks are processes of one host that copy through a shared file.
 *
 * The device (device_double.c). Streams are queues that are run as late as they may: an operation is begun as soon as what is
 * before it in its stream is done, and then reads its input; it is ended, and writes its output, only when somebody waits for
 * it (or when nobody has for a while: a device needs no host to go on). So a wait that is missing shows as a wrong number, on
 * either side. torch's own work is the CPU's: it counts as work on the current stream, so what that stream has got before is done
 * first (torch_stream.cpp). Kernels are those of cuda/, compiled for the host (kernels_double.cpp).
 *
 * NCCL (nccl_double.c). The C interface, over those streams. It is stricter than NCCL: in place only, in memory that it knows,
 * and with the same groups on every rank; what NCCL would hang or go wrong on is an error here.
 */
#ifndef SHARDSTEP_TESTS_DOUBLES_H
#define SHARDSTEP_TESTS_DOUBLES_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct dd_stream dd_stream;

/* Work on a stream. start() reads, and never waits; finish() writes, and may wait for peers; then the work frees itself. */
typedef struct dd_work dd_work;
struct dd_work {
    void (*start)(dd_work *work);
    void (*finish)(dd_work *work);
};
void dd_enqueue(dd_stream *stream, dd_work *work);
/* Everything that the calling thread's current stream has got is done. */
void dd_flush(void);
/* Everything that any stream has got, as when memory is freed. */
void dd_flush_all(void);

int dd_is_ahead(dd_stream *stream);

/* Is [begin, begin + bytes) in memory of the device? */
int dd_knows(const void *begin, size_t bytes);
void dd_learn(void *begin, size_t bytes);
void dd_forget(void *begin);

#endif
