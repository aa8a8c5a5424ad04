/* shardstep._C: the extension module. Transports are opened here and handed to Engine as capsules. */
#include "python/python.h"

#include "kernels/kernels.h"
#include "transport/c10d.h"
#include "transport/nccl.h"
#include "transport/shm.h"

static void close_transport(PyObject *capsule)
{
    ss_transport *transport = PyCapsule_GetPointer(capsule, SS_TRANSPORT_CAPSULE);
    if (transport != NULL) {
        transport->ops->close(transport);
    }
}

static PyObject *wrap_transport(ss_transport *transport, ss_code code, const ss_error *err)
{
    if (code != SS_OK) {
        ss_raise_error(err);
        return NULL;
    }
    PyObject *capsule = PyCapsule_New(transport, SS_TRANSPORT_CAPSULE, close_transport);
    if (capsule == NULL) {
        transport->ops->close(transport);
    }
    return capsule;
}

PyDoc_STRVAR(open_shm_doc,
             "open_shm(nonce, rank, world, timeout) -> capsule\n\n"
             "Collective among processes of one host that know the same nonce. Raises TransportError where that is not\n"
             "possible.");

static PyObject *open_shm(PyObject *module, PyObject *args)
{
    (void)module;
    const char *nonce;
    int rank, world;
    double timeout;
    if (!PyArg_ParseTuple(args, "siid", &nonce, &rank, &world, &timeout)) {
        return NULL;
    }
    ss_error err = {0};
    ss_shm_wire *wire = NULL;
    ss_transport *transport = NULL;
    ss_transport_callbacks none = {0};
    ss_code code;
    Py_BEGIN_ALLOW_THREADS
    code = ss_shm_wire_open(nonce, rank, world, timeout, &wire, &err);
    if (code == SS_OK) {
        code = ss_shm_open(wire, ss_kernels_get(NULL), &none, &transport, &err);
    }
    Py_END_ALLOW_THREADS
    return wrap_transport(transport, code, &err);
}

static PyObject *shm_identity(PyObject *module, PyObject *args)
{
    (void)module;
    (void)args;
    char line[512];
    ss_error err = {0};
    if (ss_shm_identity(line, sizeof line, &err) != SS_OK) {
        ss_raise_error(&err);
        return NULL;
    }
    return PyUnicode_FromString(line);
}

PyDoc_STRVAR(open_c10d_doc,
             "open_c10d(data_group, control_group, rank, world, timeout) -> capsule\n\n"
             "A transport over two torch process groups, given by name: one for buckets, a Gloo one for control messages.");

static PyObject *open_c10d(PyObject *module, PyObject *args)
{
    (void)module;
    const char *data, *control;
    int rank, world;
    double timeout;
    if (!PyArg_ParseTuple(args, "ssiid", &data, &control, &rank, &world, &timeout)) {
        return NULL;
    }
    ss_error err = {0};
    ss_transport *transport = NULL;
    ss_transport_callbacks none = {0};
    ss_code code;
    Py_BEGIN_ALLOW_THREADS
    code = ss_c10d_open(data, control, rank, world, timeout, &none, &transport, &err);
    Py_END_ALLOW_THREADS
    return wrap_transport(transport, code, &err);
}

static void release_device(PyObject *capsule)
{
    ss_device_release(PyCapsule_GetPointer(capsule, SS_DEVICE_CAPSULE));
}

PyDoc_STRVAR(open_device_doc,
             "open_device(name, kernels, torch_cuda) -> capsule\n\n"
             "torch's device of that name, as \"cuda:0\", with the library of CUDA kernels at path `kernels`. `torch_cuda` is\n"
             "torch.version.cuda.");

static PyObject *open_device(PyObject *module, PyObject *args)
{
    (void)module;
    const char *name, *kernels, *torch_cuda;
    if (!PyArg_ParseTuple(args, "ssz", &name, &kernels, &torch_cuda)) {
        return NULL;
    }
    ss_error err = {0};
    ss_device *device = NULL;
    if (ss_shim_device(name, kernels, torch_cuda, &device, &err) != SS_OK) {
        ss_raise_error(&err);
        return NULL;
    }
    PyObject *capsule = PyCapsule_New(device, SS_DEVICE_CAPSULE, release_device);
    if (capsule == NULL) {
        ss_device_release(device);
    }
    return capsule;
}

PyDoc_STRVAR(open_nccl_doc,
             "open_nccl(device, control_group, identity, library, wheel, rank, world, timeout) -> capsule\n\n"
             "Collective. A transport over a communicator of its own on `device` (a capsule); `control_group` is the name of a\n"
             "Gloo group for control messages, None for one rank; `identity` names the GPU; `library` is NCCL's path or None,\n"
             "`wheel` where it may be besides.");

static PyObject *open_nccl(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *capsule;
    ss_nccl_options options = {0};
    if (!PyArg_ParseTuple(args, "Ozszziid", &capsule, &options.control_group, &options.identity, &options.override,
                          &options.wheel, &options.rank, &options.world, &options.timeout)) {
        return NULL;
    }
    ss_device *device = PyCapsule_GetPointer(capsule, SS_DEVICE_CAPSULE);
    if (device == NULL) {
        return NULL;
    }
    ss_error err = {0};
    ss_transport *transport = NULL;
    ss_code code;
    Py_BEGIN_ALLOW_THREADS
    code = ss_nccl_open(&options, device, &transport, &err);
    Py_END_ALLOW_THREADS
    return wrap_transport(transport, code, &err);
}

PyDoc_STRVAR(exchange_doc,
             "exchange(transport, message) -> list of every rank's message\n\n"
             "Collective. Messages may differ in length. The transport must not belong to an Engine.");

PyDoc_STRVAR(fail_doc,
             "fail(transport, message)\n\n"
             "Ends the other ranks' waits on this transport with an AbortedError of this message. It is of no use afterwards.");

static PyObject *kernel_isa(PyObject *module, PyObject *args)
{
    (void)module;
    (void)args;
    return PyUnicode_FromString(ss_kernels_get(NULL)->isa);
}

static PyMethodDef methods[] = {
    {"open_shm", open_shm, METH_VARARGS, open_shm_doc},
    {"shm_identity", shm_identity, METH_NOARGS, "A line that is equal for processes which can use open_shm together."},
    {"open_c10d", open_c10d, METH_VARARGS, open_c10d_doc},
    {"open_device", open_device, METH_VARARGS, open_device_doc},
    {"open_nccl", open_nccl, METH_VARARGS, open_nccl_doc},
    {"exchange", ss_py_exchange, METH_VARARGS, exchange_doc},
    {"fail", ss_py_fail, METH_VARARGS, fail_doc},
    {"kernel_isa", kernel_isa, METH_NOARGS, "The instruction set of the kernels in use."},
    {NULL, NULL, 0, NULL},
};

static int exec_module(PyObject *module)
{
    ss_module_state *state = PyModule_GetState(module);
    state->engine_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &ss_engine_type_spec, NULL);
    if (state->engine_type == NULL || PyModule_AddType(module, state->engine_type) < 0) {
        return -1;
    }
    return PyModule_AddStringConstant(module, "torch_version", SHARDSTEP_TORCH_VERSION);
}

static int traverse_module(PyObject *module, visitproc visit, void *arg)
{
    ss_module_state *state = PyModule_GetState(module);
    Py_VISIT(state->engine_type);
    return 0;
}

static int clear_module(PyObject *module)
{
    ss_module_state *state = PyModule_GetState(module);
    Py_CLEAR(state->engine_type);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, exec_module}, {0, NULL}};

static PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "shardstep._C",
    .m_doc = "The C core of shardstep.",
    .m_size = sizeof(ss_module_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = traverse_module,
    .m_clear = clear_module,
};

PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
