/*
 * The only view of libtorch that the rest of the code has: tensors over foreign memory, hooks on a parameter's
 * AccumulateGrad node, and the framework calls that the engine asks for. PyObject arguments are tensors; calls that take
 * them need the interpreter's lock, the ss_framework calls do not.
 */
#ifndef SHARDSTEP_SHIM_SHIM_H
#define SHARDSTEP_SHIM_SHIM_H

#include <Python.h>

#include "core/device.h"
#include "core/engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Turns an ss_error into the pending Python exception; the interpreter's lock is held. */
typedef void (*ss_raise)(const ss_error *err);

/* The hooks and gradients of one model's parameters. */
typedef struct ss_shim ss_shim;

/* `params` is a sequence of n tensors, kept alive until ss_shim_destroy. `host`: see shim_private.hpp. NULL with a Python
   exception on failure. */
ss_shim *ss_shim_create(PyObject *params, int host, ss_raise raise);
/* Hooks become inert and parameters are let go; the hooks' memory follows when autograd drops the nodes. */
void ss_shim_destroy(ss_shim *shim);

/* Ranges in torch's profiler: see ss_framework. */
void *ss_shim_span_begin(void *shim, const char *what, int32_t bucket);
void ss_shim_span_end(void *span);

/* What the engine asks of the framework; `ctx` is the shim. */
ss_framework ss_shim_framework(ss_shim *shim);
int ss_shim_interrupted(void *shim);

/* The hooks start to report to this engine. */
void ss_shim_set_engine(ss_shim *shim, ss_engine *engine);

/* What is called, without arguments, when a backward has ended and the framework synchronises; NULL ends that. */
void ss_shim_set_synchronise(ss_shim *shim, PyObject *synchronise);

/*
 * Moves the parameter into its bucket: its values are copied there (in replicated mode they stay where they are), the FP32
 * master of this rank's piece is taken from them before a cast, and its gradients are reported from now on. Its `.grad` is
 * bound to the tensor over its gradient slot, or to guard(that tensor, param) when `guard` is given, which has a method
 * outlives_window(kept, norm) for when it was dropped and a user still holds it. -1 with a Python
 * exception on failure.
 */
int ss_shim_settle(ss_shim *shim, int32_t param, const ss_slot *slot, const ss_param_spec *spec, PyObject *guard);

/* A new plain tensor over the parameter's gradient slot. */
PyObject *ss_shim_grad(ss_shim *shim, int32_t param);

/* Queues the end-of-backward report with every backward that reaches this tensor. */
int ss_shim_watch(ss_shim *shim, PyObject *tensor);

/*
 * While hidden, parameters whose gradient has another dtype show none; whoever needs one, here or in a backward, gets it
 * back. For what looks at tensors and cannot take such a pair.
 */
void ss_shim_hide_low_gradients(ss_shim *shim, int hide);

/* The first parameter whose shape, dtype or device is no longer what it was when attached, or -1. Those that live in buckets
   (`in_bucket`) and have been given other memory are brought back, with the values that they have there. */
int32_t ss_shim_moved(ss_shim *shim, int in_bucket);

/* The device (core/device.h) that torch calls `name` ("cuda:0"), with one reference, and the kernels from the library at
   `kernels`; see ss_cuda_load. */
ss_code ss_shim_device(const char *name, const char *kernels, const char *torch_cuda, ss_device **device, ss_error *err);

/* A new flat tensor over `n` elements at `data`, holding a reference to the region. */
PyObject *ss_shim_flat(ss_shim *shim, void *data, ss_dtype dtype, int64_t n, ss_region *region);

#ifdef __cplusplus
}
#endif
#endif
