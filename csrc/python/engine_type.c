/*
 * The type shardstep._C.Engine: one wrapped model on one rank. A thin skin over core/engine.h; the documentation of what a
 * call does is there. The interpreter's lock is released around everything that takes the engine's lock.
 */
#include "python/python.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    ss_engine *engine;
    ss_shim *shim;
    int32_t n_params;
    PyObject *weakrefs;
} EngineObject;

/* Runs `call` without the interpreter's lock; raises when it fails. */
#define WITHOUT_GIL(code, call) \
    Py_BEGIN_ALLOW_THREADS      \
    (code) = (call);            \
    Py_END_ALLOW_THREADS

static PyObject *none_or_raise(ss_code code, const ss_error *err)
{
    if (code != SS_OK) {
        ss_raise_error(err);
        return NULL;
    }
    Py_RETURN_NONE;
}

static int check_open(const EngineObject *self)
{
    if (self->engine == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this engine is closed: the model was unwrapped");
        return -1;
    }
    return 0;
}

/* An argument that is a parameter's index. */
static int parse_param(const EngineObject *self, PyObject *arg, int32_t *param)
{
    long i = PyLong_AsLong(arg);
    if (i == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (check_open(self) < 0) {
        return -1;
    }
    if (i < 0 || i >= self->n_params) {
        PyErr_Format(PyExc_IndexError, "parameter index %ld is not in [0, %d)", i, (int)self->n_params);
        return -1;
    }
    *param = (int32_t)i;
    return 0;
}

/* A buffer of int32 indices (array.array('i')), each a valid parameter. */
static int check_indices(const EngineObject *self, const Py_buffer *view)
{
    const int32_t *index = view->buf;
    Py_ssize_t n = view->len / (Py_ssize_t)sizeof *index;
    for (Py_ssize_t k = 0; k < n; k++) {
        if (index[k] < 0 || index[k] >= self->n_params) {
            PyErr_Format(PyExc_IndexError, "index %d is not in [0, %d)", (int)index[k], (int)self->n_params);
            return -1;
        }
    }
    return 0;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"params", "names", "param_dtypes", "grad_dtypes", "transport",
                               "bucket_bytes", "sharded", "accumulate", "device", NULL};
    PyObject *params, *names, *capsule, *device_capsule = Py_None;
    ss_device *device = NULL;
    Py_buffer param_dtypes, grad_dtypes;
    long long bucket_bytes;
    int sharded, accumulate;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!y*y*OLpi|O", keywords, &params, &PyList_Type, &names, &param_dtypes,
                                     &grad_dtypes, &capsule, &bucket_bytes, &sharded, &accumulate, &device_capsule)) {
        return NULL;
    }
    EngineObject *self = NULL;
    ss_param_spec *specs = NULL;
    const char **c_names = NULL;
    Py_ssize_t n = PyList_GET_SIZE(names);
    ss_transport *transport = PyCapsule_GetPointer(capsule, SS_TRANSPORT_CAPSULE);
    if (transport == NULL) {
        goto done;
    }
    if (device_capsule != Py_None && (device = PyCapsule_GetPointer(device_capsule, SS_DEVICE_CAPSULE)) == NULL) {
        goto done;
    }
    if (param_dtypes.len != n || grad_dtypes.len != n || PySequence_Size(params) != n) {
        PyErr_SetString(PyExc_ValueError, "params, names and dtypes must have the same length");
        goto done;
    }
    specs = calloc((size_t)n + 1, sizeof *specs);
    c_names = calloc((size_t)n + 1, sizeof *c_names);
    if (specs == NULL || c_names == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *param = PySequence_GetItem(params, i);
        PyObject *numel = param != NULL ? PyObject_CallMethod(param, "numel", NULL) : NULL;
        PyObject *is_complex = param != NULL ? PyObject_CallMethod(param, "is_complex", NULL) : NULL;
        Py_XDECREF(param);
        c_names[i] = PyUnicode_AsUTF8(PyList_GET_ITEM(names, i));
        if (numel == NULL || is_complex == NULL || c_names[i] == NULL) {
            Py_XDECREF(numel);
            Py_XDECREF(is_complex);
            goto done;
        }
        specs[i].pairs = is_complex == Py_True;
        specs[i].numel = PyLong_AsLongLong(numel) << specs[i].pairs;
        specs[i].param_dtype = (ss_dtype)((const uint8_t *)param_dtypes.buf)[i];
        specs[i].grad_dtype = (ss_dtype)((const uint8_t *)grad_dtypes.buf)[i];
        Py_DECREF(numel);
        Py_DECREF(is_complex);
    }
    self = (EngineObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        goto done;
    }
    self->n_params = (int32_t)n;
    self->shim = ss_shim_create(params, device == NULL, ss_raise_error);
    if (self->shim == NULL) {
        Py_CLEAR(self);
        goto done;
    }
    ss_engine_config config = {.size = sizeof config,
                               .n_params = (int32_t)n,
                               .specs = specs,
                               .names = c_names,
                               .bucket_bytes = bucket_bytes,
                               .sharded = sharded,
                               .accumulate = accumulate,
                               .device = device};
    ss_framework framework = ss_shim_framework(self->shim);
    ss_error err = {0};
    /* From here on the engine owns the transport. */
    PyCapsule_SetDestructor(capsule, NULL);
    if (ss_engine_create(&config, transport, ss_kernels_get(NULL), &framework, ss_shim_interrupted, &self->engine, &err) !=
        SS_OK) {
        ss_raise_error(&err);
        Py_CLEAR(self);
        goto done;
    }
    ss_shim_set_engine(self->shim, self->engine);
done:
    PyBuffer_Release(&param_dtypes);
    PyBuffer_Release(&grad_dtypes);
    free(specs);
    free(c_names);
    return (PyObject *)self;
}

static void close_engine(EngineObject *self)
{
    ss_engine *engine = self->engine;
    self->engine = NULL;
    if (self->shim != NULL) {
        ss_shim_destroy(self->shim);
        self->shim = NULL;
    }
    if (engine != NULL) {
        Py_BEGIN_ALLOW_THREADS
        ss_engine_destroy(engine);
        Py_END_ALLOW_THREADS
    }
}

static void engine_dealloc(EngineObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs((PyObject *)self);
    }
    close_engine(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *engine_close_down(EngineObject *self, PyObject *unused)
{
    (void)unused;
    close_engine(self);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(place_doc,
             "place(indices, kinds, guard)\n\n"
             "Collective. Moves parameters (int32 buffer, in order) into new buckets and hooks their gradients. Those of different\n"
             "kinds (int32 buffer) share no bucket, and those whose kind has the bit WHOLE are not cut over ranks. `.grad` will be\n"
             "guard(tensor over the gradient slot, i), or that tensor itself when guard is None.");

static PyObject *engine_place(EngineObject *self, PyObject *args)
{
    Py_buffer params, kinds;
    PyObject *guard, *result = NULL;
    ss_error err = {0};
    ss_code code;
    if (!PyArg_ParseTuple(args, "y*y*O", &params, &kinds, &guard)) {
        return NULL;
    }
    const int32_t *index = params.buf;
    int32_t n = (int32_t)(params.len / (Py_ssize_t)sizeof *index);
    if (check_open(self) < 0 || check_indices(self, &params) < 0) {
        goto done;
    }
    if (kinds.len != params.len) {
        PyErr_SetString(PyExc_ValueError, "place: kinds needs one entry per index");
        goto done;
    }
    WITHOUT_GIL(code, ss_engine_place(self->engine, index, kinds.buf, n, &err));
    if (code != SS_OK) {
        ss_raise_error(&err);
        goto done;
    }
    for (int32_t k = 0; k < n; k++) {
        ss_slot slot = ss_engine_slot(self->engine, index[k]);
        const ss_param_spec *spec = ss_engine_spec(self->engine, index[k]);
        if (ss_shim_settle(self->shim, index[k], &slot, spec, guard != Py_None ? guard : NULL) < 0) {
            goto done;
        }
    }
    result = Py_NewRef(Py_None);
done:
    PyBuffer_Release(&params);
    PyBuffer_Release(&kinds);
    return result;
}

PyDoc_STRVAR(piece_doc,
             "piece(i) -> (bucket, begin, in_segment, numel) or None\n\n"
             "What this rank owns of parameter i: `numel` elements from element `begin` of the parameter (in its order of\n"
             "memory) and from element `in_segment` of this rank's segment of the bucket. None when it is in no bucket.");

static PyObject *engine_piece(EngineObject *self, PyObject *index)
{
    int32_t i;
    if (parse_param(self, index, &i) < 0) {
        return NULL;
    }
    ss_slot slot = ss_engine_slot(self->engine, i);
    if (slot.bucket < 0) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("iLLL", slot.bucket, (long long)slot.piece.in_param, (long long)slot.piece.in_segment,
                         (long long)slot.piece.numel);
}

static PyObject *engine_is_whole(EngineObject *self, PyObject *index)
{
    int32_t i;
    if (parse_param(self, index, &i) < 0) {
        return NULL;
    }
    int64_t numel = ss_engine_spec(self->engine, i)->numel;
    return PyBool_FromLong(ss_layout_is_whole(ss_engine_layout(self->engine), i, numel));
}

/* A flat tensor of n elements, or None where there is no memory. */
static PyObject *flat(const EngineObject *self, void *data, ss_dtype dtype, int64_t n, ss_region *region)
{
    return data != NULL ? ss_shim_flat(self->shim, data, dtype, n, region) : Py_NewRef(Py_None);
}

PyDoc_STRVAR(slot_doc,
             "slot(i) -> dict or None\n\n"
             "What piece(i) says, by name, with the bucket's `segment` elements per rank, and flat tensors over this rank's\n"
             "piece: `piece_grad`, `piece_param` (None in replicated mode) and `piece_master`, which is `piece_param` itself for\n"
             "FP32 parameters and None for FP64 ones.");

static PyObject *engine_slot(EngineObject *self, PyObject *index)
{
    int32_t i;
    if (parse_param(self, index, &i) < 0) {
        return NULL;
    }
    ss_slot slot = ss_engine_slot(self->engine, i);
    if (slot.bucket < 0) {
        Py_RETURN_NONE;
    }
    const ss_bucket_shape *shape = &ss_engine_layout(self->engine)->buckets[slot.bucket];
    PyObject *piece_grad = flat(self, slot.piece_grad, shape->grad_dtype, slot.piece.numel, slot.region);
    PyObject *piece_param = flat(self, slot.piece_param, shape->param_dtype, slot.piece.numel, slot.region);
    PyObject *piece_master = slot.piece_master == NULL || slot.master_region != NULL
                                 ? flat(self, slot.piece_master, SS_F32, slot.piece.numel, slot.master_region)
                                 : Py_XNewRef(piece_param);
    if (piece_grad == NULL || piece_param == NULL || piece_master == NULL) {
        Py_XDECREF(piece_grad);
        Py_XDECREF(piece_param);
        Py_XDECREF(piece_master);
        return NULL;
    }
    return Py_BuildValue("{s:i,s:L,s:L,s:L,s:L,s:N,s:N,s:N}", "bucket", slot.bucket, "begin",
                         (long long)slot.piece.in_param, "in_segment", (long long)slot.piece.in_segment, "numel",
                         (long long)slot.piece.numel, "segment", (long long)shape->segment, "piece_grad", piece_grad,
                         "piece_param", piece_param, "piece_master", piece_master);
}

static PyObject *engine_watch(EngineObject *self, PyObject *tensor)
{
    if (check_open(self) < 0 || ss_shim_watch(self->shim, tensor) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *engine_hide_low_gradients(EngineObject *self, PyObject *hide)
{
    if (check_open(self) < 0) {
        return NULL;
    }
    ss_shim_hide_low_gradients(self->shim, PyObject_IsTrue(hide));
    Py_RETURN_NONE;
}

static PyObject *engine_moved(EngineObject *self, PyObject *in_bucket)
{
    if (check_open(self) < 0) {
        return NULL;
    }
    return PyLong_FromLong(ss_shim_moved(self->shim, PyObject_IsTrue(in_bucket)));
}

static PyObject *engine_set_last_backward(EngineObject *self, PyObject *flag)
{
    if (check_open(self) < 0) {
        return NULL;
    }
    ss_engine_set_last_backward(self->engine, PyObject_IsTrue(flag));
    Py_RETURN_NONE;
}

static PyObject *engine_set_divide_factor(EngineObject *self, PyObject *factor)
{
    double value = PyFloat_AsDouble(factor);
    ss_error err = {0};
    if ((value == -1.0 && PyErr_Occurred()) || check_open(self) < 0) {
        return NULL;
    }
    return none_or_raise(ss_engine_set_divide_factor(self->engine, value, &err), &err);
}

static PyObject *engine_grad(EngineObject *self, PyObject *index)
{
    int32_t i;
    if (parse_param(self, index, &i) < 0) {
        return NULL;
    }
    return ss_shim_grad(self->shim, i);
}

PyDoc_STRVAR(synchronise_with_doc,
             "synchronise_with(call, averages)\n\n"
             "Replicated mode: a synchronising backward ends with `call()`, which closes; None ends that. With `averages` that\n"
             "close leaves this rank's gradients in the slots, and `call` puts the averages there and ends with averaged().");

static PyObject *engine_synchronise_with(EngineObject *self, PyObject *args)
{
    PyObject *call;
    int averages;
    if (!PyArg_ParseTuple(args, "Op", &call, &averages) || check_open(self) < 0) {
        return NULL;
    }
    ss_shim_set_synchronise(self->shim, call == Py_None ? NULL : call);
    ss_engine_by_framework(self->engine, call != Py_None, averages);
    Py_RETURN_NONE;
}

static PyObject *engine_averaged(EngineObject *self, PyObject *unused)
{
    (void)unused;
    if (check_open(self) < 0) {
        return NULL;
    }
    ss_error err = {0};
    ss_code code;
    WITHOUT_GIL(code, ss_engine_averaged(self->engine, &err));
    return none_or_raise(code, &err);
}

PyDoc_STRVAR(close_doc,
             "close(at, want=0, order=2.0, param=-1) -> None, list of parameters to place, or rank\n\n"
             "Communicates. Closes the round. When a list comes back, place those, and when a rank comes back, repeat the edits that\n"
             "it made of reduced gradients and that this rank lacks; then close again. The list is empty while some rank is not in\n"
             "its step yet.");

static PyObject *engine_close(EngineObject *self, PyObject *args)
{
    int at, want = SS_WANT_NOTHING, param = -1;
    double order = 2.0;
    if (!PyArg_ParseTuple(args, "i|idi", &at, &want, &order, &param) || check_open(self) < 0) {
        return NULL;
    }
    if (want == SS_WANT_FULL && (param < 0 || param >= self->n_params)) {
        PyErr_Format(PyExc_IndexError, "parameter index %d is not in [0, %d)", param, (int)self->n_params);
        return NULL;
    }
    ss_close_request request = {(ss_close_point)at, (ss_want)want, order, param};
    ss_close_need need;
    ss_error err = {0};
    ss_code code;
    WITHOUT_GIL(code, ss_engine_close(self->engine, &request, &need, &err));
    if (code != SS_OK || need == SS_NEED_NOTHING) {
        return none_or_raise(code, &err);
    }
    if (need == SS_NEED_EDITS) {
        return PyLong_FromLong(ss_engine_edited_by(self->engine));
    }
    if (need == SS_NEED_STEPS) {
        return PyList_New(0);
    }
    int32_t *wanted = calloc((size_t)self->n_params + 1, sizeof *wanted);
    if (wanted == NULL) {
        return PyErr_NoMemory();
    }
    int32_t n = ss_engine_wanted(self->engine, wanted);
    PyObject *list = PyList_New(n);
    for (int32_t k = 0; list != NULL && k < n; k++) {
        PyObject *item = PyLong_FromLong(wanted[k]);
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, k, item);
    }
    free(wanted);
    return list;
}

static PyObject *engine_norm(EngineObject *self, PyObject *args)
{
    double order, norm = 0.0;
    PyObject *index;
    int32_t i;
    int known;
    if (!PyArg_ParseTuple(args, "dO", &order, &index) || parse_param(self, index, &i) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    known = ss_engine_norm(self->engine, order, i, &norm);
    Py_END_ALLOW_THREADS
    if (!known) {
        Py_RETURN_NONE;
    }
    return PyFloat_FromDouble(norm);
}

PyDoc_STRVAR(clip_on_device_doc,
             "clip_on_device(indices, max_norm, only_finite) -> tensor\n\n"
             "Communicates. As clip(), for the step under way and without waiting for the device: the norm is a flat FP64 tensor of\n"
             "one element there, which the next step overwrites. With only_finite the update does nothing when it is not finite.");

static PyObject *engine_clip_on_device(EngineObject *self, PyObject *args)
{
    Py_buffer params;
    double max_norm;
    int only_finite;
    const double *norm = NULL;
    ss_region *region = NULL;
    ss_error err = {0};
    ss_code code = SS_OK;
    if (!PyArg_ParseTuple(args, "y*dp", &params, &max_norm, &only_finite)) {
        return NULL;
    }
    int ok = check_open(self) == 0 && check_indices(self, &params) == 0;
    if (ok) {
        int32_t n = (int32_t)(params.len / (Py_ssize_t)sizeof(int32_t));
        WITHOUT_GIL(code,
                    ss_engine_clip_on_device(self->engine, params.buf, n, max_norm, only_finite, &norm, &region, &err));
    }
    PyBuffer_Release(&params);
    if (!ok) {
        return NULL;
    }
    if (code != SS_OK) {
        ss_raise_error(&err);
        return NULL;
    }
    return ss_shim_flat(self->shim, (void *)norm, SS_F64, 1, region);
}

PyDoc_STRVAR(clip_doc,
             "clip(indices, max_norm, only_finite) -> float or None\n\n"
             "The L2 norm of the gradients of these parameters (int32 buffer) together, before they are clipped to max_norm;\n"
             "with only_finite not when it is not finite. None, and nothing is done, when it is not known: close and want norms\n"
             "first.");

static PyObject *engine_clip(EngineObject *self, PyObject *args)
{
    Py_buffer params;
    double max_norm, norm = 0.0;
    int only_finite, known = 0;
    if (!PyArg_ParseTuple(args, "y*dp", &params, &max_norm, &only_finite)) {
        return NULL;
    }
    int ok = check_open(self) == 0 && check_indices(self, &params) == 0;
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        known = ss_engine_clip(self->engine, params.buf, (int32_t)(params.len / (Py_ssize_t)sizeof(int32_t)), max_norm,
                               only_finite, &norm);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&params);
    if (!ok) {
        return NULL;
    }
    return known ? PyFloat_FromDouble(norm) : Py_NewRef(Py_None);
}

static PyObject *engine_gradient(EngineObject *self, PyObject *index)
{
    int32_t i;
    ss_gradient_state state;
    if (parse_param(self, index, &i) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    state = ss_engine_gradient(self->engine, i);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(state);
}

static PyObject *engine_local(EngineObject *self, PyObject *index)
{
    int32_t i;
    int local;
    if (parse_param(self, index, &i) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    local = ss_engine_local(self->engine, i);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(local);
}

static PyObject *engine_scale(EngineObject *self, PyObject *args)
{
    PyObject *index;
    double factor;
    int32_t i;
    if (!PyArg_ParseTuple(args, "Od", &index, &factor) || parse_param(self, index, &i) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    ss_engine_scale(self->engine, i, factor);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *engine_materialise(EngineObject *self, PyObject *index)
{
    int32_t i;
    if (parse_param(self, index, &i) < 0) {
        return NULL;
    }
    double scale;
    Py_BEGIN_ALLOW_THREADS
    scale = ss_engine_materialise(self->engine, i);
    Py_END_ALLOW_THREADS
    return PyFloat_FromDouble(scale);
}

static PyObject *engine_set_scale(EngineObject *self, PyObject *args)
{
    PyObject *index;
    double scale;
    int32_t i;
    if (!PyArg_ParseTuple(args, "Od", &index, &scale) || parse_param(self, index, &i) < 0) {
        return NULL;
    }
    ss_engine_set_scale(self->engine, i, scale);
    Py_RETURN_NONE;
}

static PyObject *engine_edited(EngineObject *self, PyObject *index)
{
    int32_t i;
    if (parse_param(self, index, &i) < 0) {
        return NULL;
    }
    uint64_t edits;
    Py_BEGIN_ALLOW_THREADS
    edits = ss_engine_edited(self->engine, i);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(edits);
}

static PyObject *engine_edits(EngineObject *self, PyObject *unused)
{
    (void)unused;
    return check_open(self) < 0 ? NULL : PyLong_FromUnsignedLongLong(ss_engine_edits(self->engine));
}

static PyObject *engine_zero(EngineObject *self, PyObject *index)
{
    int32_t i;
    ss_error err = {0};
    ss_code code;
    if (parse_param(self, index, &i) < 0) {
        return NULL;
    }
    WITHOUT_GIL(code, ss_engine_zero(self->engine, i, &err));
    return none_or_raise(code, &err);
}

/* A call that takes a buffer of parameter indices. */
typedef ss_code (*indices_call)(ss_engine *engine, const int32_t *params, int32_t count, ss_error *err);

static PyObject *call_with_indices(EngineObject *self, PyObject *args, indices_call call)
{
    Py_buffer params;
    if (!PyArg_ParseTuple(args, "y*", &params)) {
        return NULL;
    }
    PyObject *result = NULL;
    ss_error err = {0};
    ss_code code;
    if (check_open(self) == 0 && check_indices(self, &params) == 0) {
        WITHOUT_GIL(code, call(self->engine, params.buf, (int32_t)(params.len / (Py_ssize_t)sizeof(int32_t)), &err));
        result = none_or_raise(code, &err);
    }
    PyBuffer_Release(&params);
    return result;
}

static PyObject *engine_drop(EngineObject *self, PyObject *args)
{
    return call_with_indices(self, args, ss_engine_drop);
}

static PyObject *engine_adopt(EngineObject *self, PyObject *args)
{
    return call_with_indices(self, args, ss_engine_adopt);
}

static PyObject *engine_publish(EngineObject *self, PyObject *args)
{
    return call_with_indices(self, args, ss_engine_publish);
}

static PyObject *engine_gather(EngineObject *self, PyObject *unused)
{
    (void)unused;
    if (check_open(self) < 0) {
        return NULL;
    }
    ss_error err = {0};
    ss_code code;
    WITHOUT_GIL(code, ss_engine_gather(self->engine, &err));
    return none_or_raise(code, &err);
}

static PyObject *engine_end_step(EngineObject *self, PyObject *unused)
{
    (void)unused;
    if (check_open(self) < 0) {
        return NULL;
    }
    ss_engine_end_step(self->engine);
    Py_RETURN_NONE;
}

static PyObject *engine_lost_peer(EngineObject *self, PyObject *unused)
{
    (void)unused;
    if (check_open(self) < 0) {
        return NULL;
    }
    int rank = ss_engine_lost_peer(self->engine);
    return rank < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(rank);
}

static PyObject *engine_reset_masters(EngineObject *self, PyObject *unused)
{
    (void)unused;
    if (check_open(self) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    ss_engine_reset_masters(self->engine);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* One group's options: (lr, beta1, beta2, eps, weight_decay, momentum, dampening, decoupled, amsgrad, nesterov, maximize) */
static int parse_options(PyObject *tuple, ss_options *o)
{
    return PyArg_ParseTuple(tuple, "dddddddpppp", &o->lr, &o->beta1, &o->beta2, &o->eps, &o->weight_decay, &o->momentum,
                            &o->dampening, &o->decoupled, &o->amsgrad, &o->nesterov, &o->maximize);
}

PyDoc_STRVAR(update_doc,
             "update(rule, group, options, steps, states)\n\n"
             "One fused update. `group`: int32 buffer, each parameter's index into `options` or -1. `options`: list of tuples.\n"
             "`steps`: address of one float per parameter. `states`: up to three int64 buffers with the address of this rank's\n"
             "segment of that state, one per bucket.");

static PyObject *engine_update(EngineObject *self, PyObject *args)
{
    int rule;
    Py_buffer group;
    PyObject *option_list, *states;
    unsigned long long steps;
    if (!PyArg_ParseTuple(args, "iy*O!KO!", &rule, &group, &PyList_Type, &option_list, &steps, &PyList_Type, &states)) {
        return NULL;
    }
    Py_buffer views[3];
    int n_views = 0;
    PyObject *result = NULL;
    Py_ssize_t n_options = PyList_GET_SIZE(option_list), n_states = PyList_GET_SIZE(states);
    ss_options *options = calloc((size_t)n_options + 1, sizeof *options);
    ss_update update = {.rule = (ss_rule)rule, .group = group.buf, .options = options, .steps = (float *)(uintptr_t)steps};
    if (options == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (check_open(self) < 0) {
        goto done;
    }
    if (group.len != self->n_params * 4 || n_states > 3) {
        PyErr_SetString(PyExc_ValueError, "update: group needs one index per parameter, states at most three lists");
        goto done;
    }
    for (Py_ssize_t k = 0; k < self->n_params; k++) {
        if (update.group[k] >= n_options) {
            PyErr_SetString(PyExc_IndexError, "update: a group index is out of range");
            goto done;
        }
    }
    for (Py_ssize_t k = 0; k < n_options; k++) {
        if (!parse_options(PyList_GET_ITEM(option_list, k), &options[k])) {
            goto done;
        }
    }
    for (; n_views < n_states; n_views++) {
        if (PyObject_GetBuffer(PyList_GET_ITEM(states, n_views), &views[n_views], PyBUF_SIMPLE) < 0) {
            goto done;
        }
        if (views[n_views].len != ss_engine_layout(self->engine)->n_buckets * (Py_ssize_t)sizeof(float *)) {
            n_views++;
            PyErr_SetString(PyExc_ValueError, "update: a state needs one address per bucket");
            goto done;
        }
        update.state[n_views] = views[n_views].buf;
    }
    ss_error err = {0};
    ss_code code;
    WITHOUT_GIL(code, ss_engine_update(self->engine, &update, &err));
    result = none_or_raise(code, &err);
done:
    while (n_views > 0) {
        PyBuffer_Release(&views[--n_views]);
    }
    PyBuffer_Release(&group);
    free(options);
    return result;
}

static PyObject *engine_stats(EngineObject *self, PyObject *unused)
{
    (void)unused;
    if (check_open(self) < 0) {
        return NULL;
    }
    ss_stats s;
    Py_BEGIN_ALLOW_THREADS
    ss_engine_stats(self->engine, &s);
    Py_END_ALLOW_THREADS
    return Py_BuildValue(
        "{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:d,s:d,s:d,s:d,s:K,s:K,s:K,s:K,s:K}", "steps", (unsigned long long)s.steps, "closes",
        (unsigned long long)s.closes, "backwards", (unsigned long long)s.backwards, "launched_early",
        (unsigned long long)s.launched_early, "launched_at_end", (unsigned long long)s.launched_at_end, "launched_at_close",
        (unsigned long long)s.launched_at_close, "late_rounds", (unsigned long long)s.late_rounds, "exposed_seconds",
        s.exposed_seconds, "overlapped_seconds", s.overlapped_seconds, "update_seconds", s.update_seconds, "wait_seconds",
        s.traffic.wait_seconds, "reduce_scatter_bytes", (unsigned long long)s.traffic.reduce_scatter_bytes,
        "all_gather_bytes", (unsigned long long)s.traffic.all_gather_bytes, "control_bytes",
        (unsigned long long)s.traffic.control_bytes, "reduce_scatters", (unsigned long long)s.traffic.reduce_scatters,
        "all_gathers", (unsigned long long)s.traffic.all_gathers);
}

static PyObject *engine_memory(EngineObject *self, PyObject *unused)
{
    (void)unused;
    if (check_open(self) < 0) {
        return NULL;
    }
    ss_memory m;
    Py_BEGIN_ALLOW_THREADS
    ss_engine_memory(self->engine, &m);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K}", "params", (unsigned long long)m.params, "grads",
                         (unsigned long long)m.grads, "padding", (unsigned long long)m.padding, "master",
                         (unsigned long long)m.master, "carry", (unsigned long long)m.carry);
}

/* [(first parameter, last parameter, parameters, elements used, segment), ...] */
static PyObject *engine_buckets(EngineObject *self, PyObject *unused)
{
    (void)unused;
    if (check_open(self) < 0) {
        return NULL;
    }
    const ss_layout *layout = ss_engine_layout(self->engine);
    PyObject *list = PyList_New(layout->n_buckets);
    for (int32_t b = 0; list != NULL && b < layout->n_buckets; b++) {
        const ss_bucket_shape *shape = &layout->buckets[b];
        PyObject *members = PyList_New(shape->n_members);
        for (int32_t k = 0; members != NULL && k < shape->n_members; k++) {
            PyList_SET_ITEM(members, k, PyLong_FromLong(layout->members[shape->first_member + k]));
        }
        PyObject *item = members != NULL ? Py_BuildValue("{s:N,s:L,s:L,s:i,s:i}", "members", members, "used",
                                                         (long long)shape->used, "segment", (long long)shape->segment,
                                                         "param_dtype", shape->param_dtype, "grad_dtype",
                                                         shape->grad_dtype)
                                         : NULL;
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, b, item);
    }
    return list;
}

static PyMethodDef methods[] = {
    {"close_down", (PyCFunction)engine_close_down, METH_NOARGS, "Removes hooks and frees the transport."},
    {"place", (PyCFunction)engine_place, METH_VARARGS, place_doc},
    {"piece", (PyCFunction)engine_piece, METH_O, piece_doc},
    {"is_whole", (PyCFunction)engine_is_whole, METH_O, "is_whole(i): does parameter i lie in one rank's segment?"},
    {"slot", (PyCFunction)engine_slot, METH_O, slot_doc},
    {"watch", (PyCFunction)engine_watch, METH_O, "watch(tensor): its backward reports its end."},
    {"hide_low_gradients", (PyCFunction)engine_hide_low_gradients, METH_O,
     "hide_low_gradients(hide): .grad is None where its dtype is not the parameter's, until shown or needed."},
    {"moved", (PyCFunction)engine_moved, METH_O,
     "moved(in_bucket) -> index of a cast or moved parameter, or -1; others re-assigned are copied back into buckets."},
    {"set_last_backward", (PyCFunction)engine_set_last_backward, METH_O, NULL},
    {"set_divide_factor", (PyCFunction)engine_set_divide_factor, METH_O, NULL},
    {"grad", (PyCFunction)engine_grad, METH_O, "grad(i) -> a new plain tensor over the gradient slot of a placed parameter."},
    {"synchronise_with", (PyCFunction)engine_synchronise_with, METH_VARARGS, synchronise_with_doc},
    {"averaged", (PyCFunction)engine_averaged, METH_NOARGS, "The averages are in the slots: the round ends."},
    {"close", (PyCFunction)engine_close, METH_VARARGS, close_doc},
    {"norm", (PyCFunction)engine_norm, METH_VARARGS, "norm(order, i) -> float, or None when it is not known."},
    {"clip", (PyCFunction)engine_clip, METH_VARARGS, clip_doc},
    {"clip_on_device", (PyCFunction)engine_clip_on_device, METH_VARARGS, clip_on_device_doc},
    {"gradient", (PyCFunction)engine_gradient, METH_O, "gradient(i) -> 0: none, 1: held, 2: the window must be closed."},
    {"local", (PyCFunction)engine_local, METH_O, NULL},
    {"scale", (PyCFunction)engine_scale, METH_VARARGS, NULL},
    {"materialise", (PyCFunction)engine_materialise, METH_O, "materialise(i) -> the pending scale, now in the piece."},
    {"set_scale", (PyCFunction)engine_set_scale, METH_VARARGS, NULL},
    {"edited", (PyCFunction)engine_edited, METH_O, "edited(i) -> edits(). The piece was written."},
    {"edits", (PyCFunction)engine_edits, METH_NOARGS, "How often pieces were written since gradients were reduced."},
    {"zero", (PyCFunction)engine_zero, METH_O, NULL},
    {"drop", (PyCFunction)engine_drop, METH_VARARGS, NULL},
    {"adopt", (PyCFunction)engine_adopt, METH_VARARGS, NULL},
    {"publish", (PyCFunction)engine_publish, METH_VARARGS, NULL},
    {"gather", (PyCFunction)engine_gather, METH_NOARGS, NULL},
    {"end_step", (PyCFunction)engine_end_step, METH_NOARGS, NULL},
    {"lost_peer", (PyCFunction)engine_lost_peer, METH_NOARGS, "A rank that has ended, or None. Never blocks."},
    {"reset_masters", (PyCFunction)engine_reset_masters, METH_NOARGS, NULL},
    {"update", (PyCFunction)engine_update, METH_VARARGS, update_doc},
    {"stats", (PyCFunction)engine_stats, METH_NOARGS, NULL},
    {"memory", (PyCFunction)engine_memory, METH_NOARGS, NULL},
    {"buckets", (PyCFunction)engine_buckets, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *get_sync(EngineObject *self, void *closure)
{
    (void)closure;
    return check_open(self) < 0 ? NULL : PyBool_FromLong(ss_engine_sync(self->engine));
}

static int set_sync(EngineObject *self, PyObject *value, void *closure)
{
    (void)closure;
    if (check_open(self) < 0) {
        return -1;
    }
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError, "sync cannot be deleted");
        return -1;
    }
    ss_engine_set_sync(self->engine, PyObject_IsTrue(value));
    return 0;
}

static PyObject *get_transport(EngineObject *self, void *closure)
{
    (void)closure;
    return check_open(self) < 0 ? NULL : PyUnicode_FromString(ss_engine_transport_name(self->engine));
}

static PyObject *get_divide_factor(EngineObject *self, void *closure)
{
    (void)closure;
    return check_open(self) < 0 ? NULL : PyFloat_FromDouble(ss_engine_divide_factor(self->engine));
}

static PyGetSetDef properties[] = {
    {"sync", (getter)get_sync, (setter)set_sync, "Does a backward synchronise?", NULL},
    {"transport", (getter)get_transport, NULL, "The transport's name.", NULL},
    {"divide_factor", (getter)get_divide_factor, NULL, "What sums of gradients are divided by.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(EngineObject, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, engine_new},         {Py_tp_dealloc, engine_dealloc}, {Py_tp_methods, methods},
    {Py_tp_getset, properties},      {Py_tp_members, members},
    {Py_tp_doc, "One wrapped model on one rank."}, {0, NULL},
};

PyType_Spec ss_engine_type_spec = {
    .name = "shardstep._C.Engine",
    .basicsize = sizeof(EngineObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
