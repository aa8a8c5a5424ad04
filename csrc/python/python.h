/* What the files of the CPython layer share. */
#ifndef SHARDSTEP_PYTHON_PYTHON_H
#define SHARDSTEP_PYTHON_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core/engine.h"
#include "shim/shim.h"

/* Per-module state. */
typedef struct {
    PyTypeObject *engine_type;
} ss_module_state;

/* errors.c: raises the exception of shardstep._errors that belongs to err->code; the interpreter's lock is held. */
void ss_raise_error(const ss_error *err);

/* exchange.c */
PyObject *ss_py_exchange(PyObject *module, PyObject *args);
PyObject *ss_py_fail(PyObject *module, PyObject *args);

/* engine_type.c */
extern PyType_Spec ss_engine_type_spec;

#define SS_TRANSPORT_CAPSULE "shardstep.transport"
#define SS_DEVICE_CAPSULE "shardstep.device"

#endif
