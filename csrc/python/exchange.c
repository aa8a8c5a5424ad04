/*
 * A transport used by itself, for what ranks have to tell each other apart from training: checkpoints go on in a thread
 * while the engine's transport is busy.
 */
#include "python/python.h"

#include <stdlib.h>
#include <string.h>

static ss_transport *transport_of(PyObject *capsule)
{
    ss_transport *transport = PyCapsule_GetPointer(capsule, SS_TRANSPORT_CAPSULE);
    if (transport != NULL) {
        transport->callbacks.interrupted = ss_shim_interrupted;
    }
    return transport;
}

/* Messages differ in length: they are padded to the longest, after the lengths have gone round. */
static ss_code exchange(ss_transport *t, const Py_buffer *mine, int64_t *lengths, char **padded, char **all,
                        int64_t *longest, ss_error *err)
{
    int64_t length = (int64_t)mine->len;
    SS_TRY(t->ops->exchange(t, &length, sizeof length, lengths, err));
    *longest = 0;
    for (int k = 0; k < t->world; k++) {
        *longest = lengths[k] > *longest ? lengths[k] : *longest;
    }
    *padded = calloc(1, (size_t)*longest + 1);
    *all = malloc((size_t)*longest * (size_t)t->world + 1);
    if (*padded == NULL || *all == NULL) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "no memory for messages of %lld bytes from %d ranks", (long long)*longest,
                       t->world);
    }
    memcpy(*padded, mine->buf, (size_t)mine->len);
    return t->ops->exchange(t, *padded, (size_t)*longest, *all, err);
}

PyObject *ss_py_exchange(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *capsule, *result = NULL;
    Py_buffer mine;
    if (!PyArg_ParseTuple(args, "Oy*", &capsule, &mine)) {
        return NULL;
    }
    ss_transport *t = transport_of(capsule);
    int64_t *lengths = t != NULL ? calloc((size_t)t->world, sizeof *lengths) : NULL;
    char *padded = NULL, *all = NULL;
    if (lengths == NULL) {
        if (t != NULL) {
            PyErr_NoMemory();
        }
        goto done;
    }
    ss_error err = {0};
    ss_code code;
    int64_t longest;
    Py_BEGIN_ALLOW_THREADS
    code = exchange(t, &mine, lengths, &padded, &all, &longest, &err);
    Py_END_ALLOW_THREADS
    if (code != SS_OK) {
        ss_raise_error(&err);
        goto done;
    }
    result = PyList_New(t->world);
    for (int k = 0; result != NULL && k < t->world; k++) {
        PyObject *theirs = PyBytes_FromStringAndSize(all + k * longest, (Py_ssize_t)lengths[k]);
        if (theirs == NULL) {
            Py_CLEAR(result);
            break;
        }
        PyList_SET_ITEM(result, k, theirs);
    }
done:
    free(lengths);
    free(padded);
    free(all);
    PyBuffer_Release(&mine);
    return result;
}

PyObject *ss_py_fail(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *capsule;
    const char *message;
    if (!PyArg_ParseTuple(args, "Os", &capsule, &message)) {
        return NULL;
    }
    ss_transport *t = transport_of(capsule);
    if (t == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    t->ops->fail(t, message);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
