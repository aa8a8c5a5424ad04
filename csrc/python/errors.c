/* From result codes to the exceptions of shardstep._errors. */
#include "python/python.h"

static const char *class_of(ss_code code)
{
    switch (code) {
    case SS_ERR_USAGE: return "UsageError";
    case SS_ERR_MISMATCH: return "MismatchError";
    case SS_ERR_PEER_LOST: return "PeerLostError";
    case SS_ERR_TIMEOUT: return "TimeoutError";
    case SS_ERR_TRANSPORT: return "TransportError";
    case SS_ERR_ABORTED: return "AbortedError";
    default: return "Error";
    }
}

void ss_raise_error(const ss_error *err)
{
    if (PyErr_Occurred()) { /* a signal handler's or the framework's own exception says more */
        return;
    }
    if (err->code == SS_ERR_NO_MEMORY) {
        PyErr_SetString(PyExc_MemoryError, err->message);
        return;
    }
    PyObject *module = PyImport_ImportModule("shardstep._errors");
    PyObject *type = module != NULL ? PyObject_GetAttrString(module, class_of(err->code)) : NULL;
    PyObject *error = type != NULL ? PyObject_CallFunction(type, "s", err->message) : NULL;
    if (error != NULL) {
        PyObject *rank = err->rank >= 0 ? PyLong_FromLong(err->rank) : Py_NewRef(Py_None);
        PyObject *bucket = err->bucket >= 0 ? PyLong_FromLong(err->bucket) : Py_NewRef(Py_None);
        if (rank != NULL && bucket != NULL && PyObject_SetAttrString(error, "rank", rank) == 0 &&
            PyObject_SetAttrString(error, "bucket", bucket) == 0) {
            PyErr_SetObject(type, error);
        }
        Py_XDECREF(rank);
        Py_XDECREF(bucket);
    }
    Py_XDECREF(error);
    Py_XDECREF(type);
    Py_XDECREF(module);
}
