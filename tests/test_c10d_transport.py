"""The c10d transport, driven through its vtable by ctypes, one process per rank.

Run as a script this file is the launcher of one scenario: it imports torch once and forks the ranks.
"""

import ctypes
import faulthandler
import functools
import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES_C = ["core/status.c", *(f"kernels/{n}.c" for n in ("dispatch", "kernels_portable", "kernels_avx2",
                                                          "kernels_avx512"))]
FLAGS_C = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]

OK, USAGE, MISMATCH, PEER_LOST, TIMEOUT, TRANSPORT, ABORTED, NO_MEMORY, INTERRUPTED = range(9)
GRAD, PARAM = 0, 1
F32, F64, BF16, F16 = range(4)
PENDING, DONE, SETTLED = range(3)
NONE = ctypes.c_size_t(-1).value


# ------------------------------------------------------------------------------------------------ the library


@functools.cache
def build_library() -> pathlib.Path:
    """The transport and what it needs as a shared library, kept by the hash of its sources. All C++ is one unit of
    compilation: torch's headers take ten seconds."""
    import torch

    package = pathlib.Path(torch.__file__).parent
    csrc = ROOT / "csrc"
    common = ["-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{csrc}"]
    torch_flags = ["-std=c++20", "-O0", "-D_GLIBCXX_USE_CXX11_ABI=1"]
    for include in (package / "include", package / "include/torch/csrc/api/include", sysconfig.get_path("include")):
        torch_flags += ["-isystem", str(include)]
    digest = hashlib.sha256(repr((torch.__version__, FLAGS_C, torch_flags, common)).encode())
    headers = [*(f"core/{n}.h" for n in ("dtype", "region", "status")),
               *(f"transport/{n}.h" for n in ("transport", "c10d", "control"))]
    shim = [*(csrc / "shim").glob("c10d*"), *(csrc / "shim").glob("control.*"), ROOT / "tests/c/c10d_and_other_backend.cpp"]
    core = [*(csrc / h for h in headers), *csrc.glob("kernels/*.h"), *(csrc / s for s in SOURCES_C)]
    for path in sorted([*core, *shim]):
        digest.update(path.read_bytes())
    folder = pathlib.Path(tempfile.gettempdir()) / f"shardstep-c10d-{os.getuid()}-{digest.hexdigest()[:16]}"
    library = folder / "c10d.so"
    if library.exists():
        return library
    folder.mkdir(exist_ok=True, mode=0o700)
    commands = [["g++", *torch_flags, *common, "-c", str(ROOT / "tests/c/c10d_and_other_backend.cpp")],
                *(["gcc", *FLAGS_C, *common, "-c", str(csrc / s)] for s in SOURCES_C)]
    objects = [str(folder / f"{os.getpid()}-{i}.o") for i in range(len(commands))]
    running = [subprocess.Popen([*c, "-o", o], stderr=subprocess.PIPE, text=True) for c, o in zip(commands, objects)]
    for process in running:
        _, messages = process.communicate(timeout=300)
        assert process.returncode == 0, messages
    made = folder / f"{os.getpid()}.so"
    subprocess.run(["g++", "-shared", "-o", made, *objects, f"-L{package}/lib", "-ltorch_cpu", "-lc10", "-lm",
                    f"-Wl,-rpath,{package}/lib"], check=True, timeout=120)
    for path in objects:
        os.unlink(path)
    made.rename(library)
    return library


class Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("rank", ctypes.c_int), ("bucket", ctypes.c_int),
                ("message", ctypes.c_char * 1024)]


class Spec(ctypes.Structure):
    _fields_ = [("segment", ctypes.c_int64), ("grad_dtype", ctypes.c_int), ("param_dtype", ctypes.c_int),
                ("grad_offset", ctypes.c_size_t), ("param_offset", ctypes.c_size_t)]


class Region(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("references", ctypes.c_int),
                ("destroy", ctypes.CFUNCTYPE(None, ctypes.c_void_p))]


REDUCED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
ASKED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Callbacks(ctypes.Structure):
    _fields_ = [
        ("reduced", REDUCED), ("interrupted", ASKED), ("ctx", ctypes.c_void_p), ("reduce_begin", ctypes.c_void_p),
        ("reduce_end", ctypes.c_void_p),
    ]


class Traffic(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint64) for n in ("reduce_scatter_bytes", "all_gather_bytes", "control_bytes",
                                               "reduce_scatters", "all_gathers")] + [("wait", ctypes.c_double)]


def _op(*arguments, result=ctypes.c_int):
    return ctypes.CFUNCTYPE(result, ctypes.c_void_p, *arguments)


_E, _I, _P, _S = ctypes.POINTER(Error), ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t


class Ops(ctypes.Structure):
    _fields_ = [
        ("size", _S), ("name", ctypes.c_char_p), ("in_order", _I),
        ("add_chunk", _op(ctypes.POINTER(Spec), _I, _S, ctypes.POINTER(ctypes.POINTER(Region)), _E)),
        ("launch", _op(_I, _I, _E)), ("poll", _op(_I, ctypes.POINTER(_I), _E)), ("reduce", _op(_I, _E)),
        ("settle", _op(_E)), ("exchange", _op(ctypes.c_char_p, _S, _P, _E)), ("publish", _op(_I, _I, _E)),
        ("collect", _op(_I, _I, _E)), ("release", _op(_I, _E)), ("gather", _op(_P, _S, _E)),
        ("fail", _op(ctypes.c_char_p, result=None)), ("lost", _op()),
        ("close", _op(result=None))]


class CTransport(ctypes.Structure):
    _fields_ = [("ops", ctypes.POINTER(Ops)), ("rank", _I), ("world", _I), ("timeout", ctypes.c_double),
                ("callbacks", Callbacks), ("traffic", Traffic)]


class TransportError(Exception):
    def __init__(self, error):
        self.code, self.rank, self.bucket, self.text = error.code, error.rank, error.bucket, error.message.decode()
        super().__init__(f"code {self.code}, rank {self.rank}, bucket {self.bucket}: {self.text}")


class Transport:
    def __init__(self, data, control, rank, world, timeout):
        self.rank, self.world, self.finished, self.stop = rank, world, [], False
        self._callbacks = Callbacks(REDUCED(lambda _, *range_: self.finished.append(range_)),
                                    ASKED(lambda _: self.stop), None)
        library = ctypes.CDLL(os.environ["TEST_LIBRARY"])
        handle, error = ctypes.POINTER(CTransport)(), Error()
        if library.ss_c10d_open(data.encode(), control.encode(), rank, world, ctypes.c_double(timeout),
                                ctypes.byref(self._callbacks), ctypes.byref(handle), ctypes.byref(error)):
            raise TransportError(error)
        self.c, self.ops = handle.contents, handle.contents.ops.contents
        assert self.ops.size == ctypes.sizeof(Ops) and self.ops.in_order == 1

    def call(self, name, *arguments):
        error = Error()
        code = getattr(self.ops, name)(ctypes.addressof(self.c), *arguments, ctypes.byref(error))
        if code:
            assert code == error.code
            raise TransportError(error)

    def code_of(self, name, *arguments):
        try:
            self.call(name, *arguments)
        except TransportError as error:
            return error.code
        return OK

    def poll(self, bucket):
        state = _I()
        self.call("poll", bucket, ctypes.byref(state))
        return state.value

    def exchange(self, message):
        everything = ctypes.create_string_buffer(len(message) * self.world)
        self.call("exchange", message, len(message), ctypes.addressof(everything))
        return [everything.raw[k * len(message):(k + 1) * len(message)] for k in range(self.world)]

    def fail(self, message):
        self.ops.fail(ctypes.addressof(self.c), message.encode())

    def close(self):
        self.ops.close(ctypes.addressof(self.c))

    def add(self, *buckets):
        """buckets: (segment, gradient dtype, parameter dtype or None). Gives [[gradients, parameters]] as tensors."""
        specs, offset = (Spec * len(buckets))(), 0
        sizes = {F32: 4, F64: 8, BF16: 2, F16: 2}
        for spec, (segment, grad, param) in zip(specs, buckets):
            spec.segment, spec.grad_dtype, spec.param_dtype = segment, grad, F32 if param is None else param
            spec.grad_offset, offset = offset, offset + segment * self.world * sizes[grad]
            spec.param_offset = NONE
            if param is not None:
                spec.param_offset, offset = offset, offset + segment * self.world * sizes[param]
        self.region = ctypes.POINTER(Region)()
        self.call("add_chunk", specs, len(buckets), offset, ctypes.byref(self.region))
        assert self.region.contents.base % 256 == 0 and self.region.contents.bytes >= offset
        self.buckets = [[self._tensor(s.grad_offset, s.segment, s.grad_dtype),
                         None if s.param_offset == NONE else self._tensor(s.param_offset, s.segment, s.param_dtype)]
                        for s in specs]
        return self.buckets

    def _tensor(self, offset, segment, dtype):
        import torch

        dtype = {F32: torch.float32, F64: torch.float64, BF16: torch.bfloat16, F16: torch.float16}[dtype]
        memory = (ctypes.c_uint8 * (segment * self.world * dtype.itemsize)).from_address(
            self.region.contents.base + offset)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


# ------------------------------------------------------------------------------------------------ the scenarios


def groups(rank, world):
    """The names of a data and a control group."""
    import torch.distributed as dist

    return [dist.new_group(list(range(world))).group_name for _ in range(2)]


def value(rank, bucket, round_, n, dtype):
    """Integers small enough that every sum of them is exact."""
    import torch

    period = torch.arange(251, dtype=torch.float64) * (rank + 1) % 251 + 7 * bucket + 3 * round_ - 100 * rank
    return period.to(dtype).repeat(n // 251 + 1)[:n]


def check_rounds(t, layout, rounds):
    """rounds: [(buckets, {rank: buckets it does not contribute to})]."""
    import torch

    planes = t.buckets
    moved = count = 0
    for number, (buckets, idle) in enumerate(rounds):
        t.finished.clear()
        for b in buckets:
            grad = planes[b][0]
            contributes = b not in idle.get(t.rank, ())
            grad.copy_(value(t.rank, b, number, grad.numel(), grad.dtype) if contributes
                       else torch.full_like(grad, float("nan")))
            t.call("launch", b, int(contributes))
        early = t.poll(buckets[0])
        assert early in (PENDING, SETTLED)
        assert t.exchange(bytes([t.rank + 65]) * (number + 1)) == [bytes([k + 65]) * (number + 1)
                                                                  for k in range(t.world)]
        for b in reversed(buckets):
            t.call("reduce", b)
            assert t.poll(b) == SETTLED
            grad, n = planes[b][0], layout[b][0]
            expected = sum(value(k, b, number, grad.numel(), grad.dtype) for k in range(t.world)
                           if b not in idle.get(k, ()))
            mine = slice(t.rank * n, (t.rank + 1) * n)
            assert torch.equal(grad[mine], expected[mine]), (number, b)
            moved += n * grad.itemsize * (t.world - 1)
            count += 1
        assert t.code_of("launch", buckets[0], 1) == USAGE
        t.call("settle")
        for b in buckets:  # every element of my segment exactly once, in order
            ends = [0]
            for bucket, begin, end in t.finished:
                if bucket == b:
                    assert begin == ends[-1]
                    ends.append(end)
            assert ends[-1] == layout[b][0], (ends, layout[b])
    return moved, count


def check_gathers(t, layout, repeats=2):
    import torch

    moved = 0
    for repeat in range(repeats):
        for plane in (PARAM, GRAD):
            buckets = [b for b in range(len(layout)) if t.buckets[b][plane] is not None]
            for b in buckets:
                tensor, n = t.buckets[b][plane], layout[b][0]
                tensor.fill_(float("nan"))
                tensor[t.rank * n:(t.rank + 1) * n] = value(t.rank, b, repeat, n, torch.float64).to(tensor.dtype)
                t.call("publish", plane, b)
                moved += n * tensor.itemsize * (t.world - 1)
            for b in reversed(buckets):
                tensor, n = t.buckets[b][plane], layout[b][0]
                t.call("collect", plane, b)
                expected = torch.cat([value(k, b, repeat, n, torch.float64).to(tensor.dtype) for k in range(t.world)])
                assert torch.equal(tensor, expected), (plane, b)
            t.call("release", plane)
    return moved


LAYOUT = [(128, F32, F32), (20_096, F32, BF16), (384, F64, F64), (1_280, F32, F16), (256, F32, None)]
ROUNDS = [([0, 1, 2, 3, 4], {}), ([1], {}), ([3, 0, 2], {0: [0, 2]}), ([0, 1, 2, 3, 4], {0: [1, 2, 3]})]


def everything(rank, world, data=None, factor=1):
    control = groups(rank, world)
    t = Transport(data or control[0], control[1], rank, world, timeout=20)
    t.add(*LAYOUT)
    assert all(not grad.any() for grad, _ in t.buckets)
    rounds = ROUNDS if world > 1 else [(b, {}) for b, _ in ROUNDS]
    moved, count = check_rounds(t, LAYOUT, rounds)
    assert t.c.traffic.reduce_scatter_bytes == moved * factor and t.c.traffic.reduce_scatters == count
    gathered = check_gathers(t, LAYOUT)
    assert t.c.traffic.all_gather_bytes == gathered and t.c.traffic.all_gathers == 2 * (len(LAYOUT) * 2 - 1)
    before = t.c.traffic.control_bytes
    for size in (1, 100, 1 << 20):
        assert t.exchange(bytes([rank]) * size) == [bytes([k]) * size for k in range(world)]
    assert t.c.traffic.control_bytes - before == (world - 1) * (1 + 100 + (1 << 20))
    assert t.code_of("reduce", 0) == t.code_of("launch", 99, 1) == t.code_of("publish", PARAM, 4) == USAGE
    region, grad = t.region, t.buckets[0][0]
    t.exchange(b"done")
    t.close()
    grad.fill_(1)  # the region outlives its transport
    assert region.contents.references == 1
    region.contents.destroy(ctypes.addressof(region.contents))


def scratch_is_bounded(rank, world):
    """More in flight than the scratch memory holds: what is over waits in the queue."""
    t = Transport(*groups(rank, world), rank, world, timeout=30)
    layout = [(6 << 20, F32, None)] * 4  # 24 MiB of scratch each at two ranks
    t.add(*layout)
    check_rounds(t, layout, [([0, 1, 2, 3], {}), ([2, 3], {1: [2]})])
    t.close()


def python_group(rank, world):
    """A group whose collectives are Python methods: called with the GIL released, destroyed without it."""
    import torch.distributed as dist

    inner = dist.new_group(list(range(world)))

    class Group(dist.ProcessGroup):
        def getBackendName(self):  # noqa: N802
            return "mine"

        def getGroupName(self):  # noqa: N802
            return "python-group"

        def allreduce(self, tensors, options):
            return inner.allreduce(tensors, options)

        def broadcast(self, tensors, options):
            return inner.broadcast(tensors, options)

    group = Group(rank, world)
    dist.distributed_c10d._register_process_group("python-group", group)
    everything(rank, world, "python-group", factor=2)


def other_backend(rank, world):
    """A backend that is not Gloo and, like MPI, forbids that output and input overlap."""
    data, control = groups(rank, world)
    library = ctypes.CDLL(os.environ["TEST_LIBRARY"])
    assert library.make_other_group(data.encode(), b"other-group") == 0
    everything(rank, world, "other-group")


def wrong_arguments(rank, world):
    data, control = groups(rank, world)
    for arguments in ((data, data, rank, world), ("no such group", control, rank, world),
                      (data, control, 1 - rank, world)):
        try:
            Transport(*arguments, timeout=5)
        except TransportError as error:
            assert error.code == USAGE and "rank" in error.text, error
        else:
            raise AssertionError(arguments)


def expect(code, within, call, *texts):
    start = time.monotonic()
    try:
        call()
    except TransportError as error:
        took = time.monotonic() - start
        assert error.code == code and took < within, (error, took)
        for text in texts:
            assert text in error.text, (text, error)
        return error
    raise AssertionError("no error")


def start_round(rank, world, timeout):
    t = Transport(*groups(rank, world), rank, world, timeout=timeout)
    t.add((1 << 18, F32, F32), (1 << 18, F32, F32))
    t.exchange(b"ready")
    return t


def dead_peer(rank, world):
    t = start_round(rank, world, 30)
    if rank == 1:
        t.call("launch", 0, 1)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    for b in (0, 1):
        t.call("launch", b, 1)
    t.call("reduce", 0)
    time.sleep(0.6 if rank == 0 else 0)
    error = expect(PEER_LOST, 2.0, lambda: t.call("reduce", 1), "rank 1", "bucket 1", "reduce-scatter")
    assert error.rank == 1 and error.bucket == 1
    expect(PEER_LOST, 0.1, lambda: t.exchange(b"again"), "rank 1")
    start = time.monotonic()
    t.fail("not heard any more")
    t.close()
    assert time.monotonic() - start < 0.1


def dead_peer_in_exchange(rank, world):
    t = start_round(rank, world, 30)
    if rank == 0:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    assert expect(PEER_LOST, 2.0, lambda: t.exchange(b"hello"), "exchange").rank == 0
    t.close()


def dead_peer_seen_by_gloo_alone(rank, world):
    """No pidfd and no store, as neither can be opened: the backend's own error has to do."""
    import datetime
    import resource

    import torch.distributed as dist

    names = groups(rank, world)
    dist.distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=1))  # for a second connection
    ctypes.CDLL(os.environ["TEST_LIBRARY"])
    os.close(free := os.dup(0))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    t = Transport(*names, rank, world, timeout=30)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    t.add((1 << 18, F32, F32))
    t.exchange(b"ready")
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    t.call("launch", 0, 1)
    error = expect(PEER_LOST, 2.0, lambda: t.call("reduce", 0), "bucket 0", "unknown")
    assert error.rank == -1
    t.close()


def failing_peer(rank, world):
    t = start_round(rank, world, 30)
    if rank == 0:
        time.sleep(0.3)
        start = time.monotonic()
        t.fail("the loss is on fire")
        assert time.monotonic() - start < 0.1
        expect(ABORTED, 0.1, lambda: t.call("launch", 0, 1), "given up")
        time.sleep(1)
    else:
        t.call("launch", 0, 1)
        call = (lambda: t.call("reduce", 0)) if rank == 1 else (lambda: t.exchange(b"x"))
        error = expect(ABORTED, 1.5, call, "the loss is on fire")
        assert error.rank == 0
    t.close()


def late_peer(rank, world):
    t = start_round(rank, world, 1.0)
    if rank == 1:
        time.sleep(2.5)
    t.buckets[0][0].fill_(rank + 1.0)
    t.call("launch", 0, 1)
    if rank == 0:
        error = expect(TIMEOUT, 1.4, lambda: t.call("reduce", 0), "reduce-scatter", "bucket 0", "1 seconds")
        assert error.bucket == 0
        t.stop = True
        expect(INTERRUPTED, 0.3, lambda: t.call("reduce", 0), "interrupted")
        t.stop = False
        time.sleep(1)
    t.call("reduce", 0)  # neither of the two has harmed the collective
    t.call("settle")
    assert (t.buckets[0][0][rank << 18:(rank + 1) << 18] == 3).all()
    t.close()


# ------------------------------------------------------------------------------------------------ the launcher


def rank_main(scenario, rank, world, port):
    faulthandler.enable()
    faulthandler.dump_traceback_later(50, exit=True)
    try:
        import datetime

        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=30))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world,
                                timeout=datetime.timedelta(seconds=20))
        globals()[scenario](rank, world)
    except BaseException:
        sys.stderr.write(f"--- rank {rank} ---\n{traceback.format_exc()}")
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def host_store():
    """A process that hosts the store, as a launcher does: (its pid, the port). Not this one: a store has a thread, and
    a process with threads must not fork."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        time.sleep(60)
        os._exit(0)
    os.close(writer)
    return pid, int(os.read(reader, 16))


def launch(scenario, world):
    import torch.distributed  # noqa: F401  once, not in every rank

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    host, port = host_store()
    ranks = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            rank_main(scenario, rank, world, port)
        ranks[pid] = rank
    codes, end = {}, time.monotonic() + 55
    while ranks and time.monotonic() < end:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.02)
    for pid, rank in ranks.items():
        os.kill(pid, signal.SIGKILL)
        codes[rank] = "hung"
    os.kill(host, signal.SIGKILL)
    print({rank: codes[rank] for rank in sorted(codes)})


def run(scenario, world, dead=()):
    result = subprocess.run([sys.executable, "-W", "ignore", __file__, scenario, str(world)], text=True, timeout=70,
                            capture_output=True, env={**os.environ, "TEST_LIBRARY": str(build_library())})
    expected = {rank: -signal.SIGKILL if rank in dead else 0 for rank in range(world)}
    assert result.stdout.strip() == str({k: int(v) for k, v in expected.items()}), result.stdout + result.stderr


def test_rounds_exchanges_and_gathers_on_one_rank():
    run("everything", 1)


def test_rounds_exchanges_and_gathers_on_two_ranks():
    run("everything", 2)


def test_rounds_exchanges_and_gathers_on_three_ranks():
    run("everything", 3)


def test_rounds_exchanges_and_gathers_on_four_ranks():
    run("everything", 4)


def test_more_buckets_in_flight_than_scratch_memory():
    run("scratch_is_bounded", 2)


def test_group_implemented_in_python():
    run("python_group", 2)


def test_backend_that_forbids_aliasing():
    run("other_backend", 3)


def test_wrong_arguments_are_refused():
    run("wrong_arguments", 2)


def test_dead_peer_is_named_by_every_rank():
    run("dead_peer", 3, dead=[1])


def test_dead_peer_ends_an_exchange():
    run("dead_peer_in_exchange", 3, dead=[0])


def test_dead_peer_is_noticed_by_the_backend_alone():
    run("dead_peer_seen_by_gloo_alone", 2, dead=[1])


def test_fail_reaches_every_wait():
    run("failing_peer", 3)


def test_timeout_and_interrupt_leave_the_round_alive():
    run("late_peer", 2)


if __name__ == "__main__":
    launch(sys.argv[1], int(sys.argv[2]))
