"""Joining the other ranks, and starting them from a notebook or a script."""

import codecs
import contextlib
import io
import linecache
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import torch.distributed as dist

from shardstep._errors import RankFailedError, TimeoutError, UsageError
from shardstep._groups import seconds
from shardstep._rank import Outcome, Task

T = TypeVar("T")

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOOPBACK = "127.0.0.1"

OTHERS = 2.0  # seconds in which, after a rank has failed, the others can say what they have to say
END = 2.0  # seconds from SIGINT to SIGKILL
EXIT = 10.0  # seconds that a rank which is done may take to exit
START_POLL = 0.005  # seconds between looks at whether the other ranks have started
POLL = 0.05  # seconds between looks at whether a rank is alive
OUTPUT = 10_000  # bytes of a rank's output in an error


def init(timeout: "float | timedelta" = 600.0) -> None:
    """Joins the ranks that torchrun started, over Gloo. Collective.

    Does nothing when a process group exists already, or when torchrun's environment is absent: the process then trains
    alone (world size 1). ``timeout``, in seconds or as a timedelta, is the process group's.
    """
    if dist.is_initialized() or not all(os.environ.get(name) for name in TORCHRUN):
        return
    limit = seconds(timeout)
    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=limit)))
    store = dist.PrefixStore(f"shardstep/start/{_agree_on_start(store, rank, world, limit)}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit))


def _agree_on_start(store: "dist.Store", rank: int, world: int, timeout: float) -> str:
    """A name for this start of the ranks that no earlier one had. Collective.

    When torchrun starts ranks again it gives them the store that those before them had, and Gloo, which goes by the same names
    every time, may find the address of a process that is dead (pytorch/pytorch#135712). ``TORCHELASTIC_RESTART_COUNT`` is no
    such name: each of several agents counts by itself. So every rank brings a number of its own, and takes rank 0's for the
    name once rank 0 has seen that number.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    numbers, seen = [f"shardstep/start/of/{r}" for r in range(world)], "shardstep/start/seen"

    def found(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    store.set(numbers[rank], mine)
    while time.monotonic() < deadline:
        if rank == 0:
            store.set(seen, " ".join(found(key) or "none" for key in numbers))
            if store.add(f"shardstep/start/agreed/{mine}", 0) == world - 1:
                return mine
        elif len(everyone := found(seen).split()) == world and everyone[rank] == mine:
            store.add(f"shardstep/start/agreed/{everyone[0]}", 1)
            return everyone[0]
        time.sleep(START_POLL)
    raise TimeoutError(f"rank {rank} has waited {timeout:g} s in vain for all {world} ranks to call init()")


def launch(fn: Callable[..., T], *args: Any, nproc_per_node: int = 2, **kwargs: Any) -> list[T]:
    """Calls ``fn(*args, **kwargs)`` on ``nproc_per_node`` ranks of this host, from a notebook or a script.

    Each rank is a fresh process with torchrun's environment and a process group (:func:`init`) that is there before
    ``fn`` is called and destroyed afterwards. ``fn`` may be defined in a notebook's cell or a script's ``__main__``, be
    a lambda, and refer to what is round it; that and the arguments are copied to every rank. A rank computes on one
    thread unless ``OMP_NUM_THREADS`` says otherwise.

    What rank 0 prints appears here as it comes, progress bars included. What the others print is shown only when a rank
    fails. An interrupt (Ctrl-C, a notebook's stop button) ends all ranks: each gets a KeyboardInterrupt, and is killed
    if it has not ended two seconds later. No rank outlives the call, nor does what it has started in its process group.

    Needs cloudpickle: ``pip install cloudpickle``.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        RankFailedError: ``fn`` raised on a rank, or a rank died. It has every failed rank's traceback; the other ranks
            were ended.
        UsageError: ``fn`` or an argument cannot be copied to another process, or cloudpickle is missing.
    """
    if isinstance(nproc_per_node, bool) or not isinstance(nproc_per_node, int) or nproc_per_node < 1:
        raise UsageError(f"nproc_per_node must be a positive number of processes, not {nproc_per_node!r}")
    task = Task(list(sys.path), _sources_in_no_file(), _pickled((fn, args, kwargs)))
    request = pickle.dumps(tuple(task))

    # The store lives here as it lives in torchrun's agent, on a port that the kernel chose and this process holds.
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    ranks: list[_Rank] = []
    try:
        for number in range(nproc_per_node):
            ranks.append(_Rank(number, nproc_per_node, port))
        for rank in ranks:
            rank.send(request)
        _follow(ranks)
        if any(rank.failed for rank in ranks):
            raise _failure(ranks)
        for rank in ranks:
            rank.connection.close()  # lets it go
        _wait(ranks, EXIT)
        ranks[0].forward()
    finally:
        _end(ranks)
        del store
    return [_unpickled(rank.rank, rank.outcome) for rank in ranks if rank.outcome]


class _Rank:
    """A rank's process, and what is known of it."""

    def __init__(self, rank: int, world: int, port: int):
        self.rank = rank
        self.outcome: Outcome | None = None
        environment = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self.log = tempfile.TemporaryFile()
        here, there = socket.socketpair()
        with there:
            self.process = subprocess.Popen(
                [sys.executable, "-u", Path(__file__).with_name("_rank.py"), str(there.fileno()), str(os.getpid())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else self.log,
                stderr=subprocess.PIPE if rank == 0 else subprocess.STDOUT,
                pass_fds=[there.fileno()],
                start_new_session=True,  # Ctrl-C reaches the caller alone, and a rank ends with what it has started
            )
        self.connection = Connection(here.detach())
        self.streams = []
        if rank == 0:
            self.streams = [_Stream(self.process.stdout, "stdout"), _Stream(self.process.stderr, "stderr")]

    def send(self, request: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead already: seen soon enough
            self.connection.send_bytes(request)

    def receive(self) -> None:
        """Takes the outcome when there is one, or notices that the process has ended without."""
        if self.outcome is not None:
            return
        ended = self.exit_status()  # asked first: what it has sent before is there
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                self.outcome = Outcome(*pickle.loads(self.connection.recv_bytes()))
                return
        if ended is not None:
            how = f"exit code {ended}" if ended >= 0 else _signal_name(-ended)
            # Before everything that others raised, which is the consequence. (A rank that raised is kept alive until
            # all have been heard, so that its end has no consequences.)
            self.outcome = Outcome(None, f"died: {how}", f"the process died: {how}", when=0.0)

    def forward(self) -> None:
        for stream in self.streams:
            stream.forward()

    def exit_status(self) -> "int | None":
        """As ``Popen.poll()``, which would free the process id: it is needed still, to end what the rank has started."""
        if self.process.returncode is not None:
            return self.process.returncode
        found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    @property
    def failed(self) -> bool:
        return self.outcome is not None and self.outcome.result is None

    def signal(self, number: int) -> None:
        if self.process.returncode is None:
            os.killpg(self.process.pid, number)  # exists as long as the process has not been reaped

    def output(self) -> str:
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - OUTPUT))
        return self.log.read().decode(errors="replace").strip()


class _Stream:
    """Rank 0's stdout or stderr, forwarded to the caller's."""

    def __init__(self, pipe: Any, name: str):
        self.pipe, self.name = pipe, name
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.ended = False
        os.set_blocking(pipe.fileno(), False)

    def forward(self) -> None:
        """All that is there now: a pipe holds less than this reads."""
        if self.ended:
            return
        try:
            data = os.read(self.pipe.fileno(), 1 << 20)
        except BlockingIOError:
            return
        self.ended = not data
        text = self.decoder.decode(data, final=self.ended)
        if text:
            target = getattr(sys, self.name)  # looked up each time: a notebook's cell, a test's capture
            target.write(text)
            target.flush()


def _follow(ranks: "list[_Rank]") -> None:
    """Returns when every rank has told its outcome, or a little after one has failed."""
    deadline = None
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.connection, selectors.EVENT_READ, rank)
        for stream in ranks[0].streams:
            selector.register(stream.pipe, selectors.EVENT_READ, stream)
        while True:
            for key, _ in selector.select(POLL):
                if isinstance(key.data, _Stream):
                    key.data.forward()
                    if key.data.ended:
                        selector.unregister(key.fileobj)
            for rank in ranks:
                rank.receive()
                if rank.outcome and rank.connection in selector.get_map():
                    selector.unregister(rank.connection)
            if all(rank.outcome for rank in ranks):
                break
            if deadline is None and any(rank.failed for rank in ranks):
                deadline = time.monotonic() + OTHERS
            if deadline is not None and time.monotonic() > deadline:
                break
    ranks[0].forward()


def _wait(ranks: "list[_Rank]", timeout: float) -> None:
    """Until all have exited, or ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not all(rank.exit_status() is not None for rank in ranks) and time.monotonic() < deadline:
        ranks[0].forward()
        time.sleep(0.01)


def _end(ranks: "list[_Rank]") -> None:
    """Ends the ranks and what they have started, in bounded time. Those that run get a KeyboardInterrupt first."""
    try:
        for rank in ranks:
            if rank.exit_status() is None:
                rank.signal(signal.SIGINT)
        _wait(ranks, END)
    finally:  # also when the caller is interrupted once more
        for rank in ranks:
            rank.signal(signal.SIGKILL)
        for rank in ranks:
            rank.process.wait()
            rank.connection.close()
            rank.log.close()
            for stream in rank.streams:
                stream.pipe.close()


def _failure(ranks: "list[_Rank]") -> RankFailedError:
    failures = sorted(((rank.rank, rank.outcome) for rank in ranks if rank.outcome and rank.failed), key=lambda f: f[1].when)
    first, outcome = failures[0]
    tracebacks = {rank: outcome.traceback.rstrip() for rank, outcome in failures}
    parts = [f"rank {first} of {len(ranks)} {outcome.summary}"]
    parts += [f"--- rank {rank}\n{text}" for rank, text in tracebacks.items()]
    parts += [f"--- rank {rank.rank} printed\n{output}" for rank in ranks if (output := rank.output())]
    error = RankFailedError("\n\n".join(parts))
    error.rank, error.tracebacks = first, tracebacks
    return error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _pickled(call: tuple) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise UsageError("launch() needs cloudpickle to send functions to the ranks: pip install cloudpickle") from None

    def code_with_its_file(code: CodeType) -> tuple:
        """cloudpickle leaves the file's name out; tracebacks and torch.compile find the source by it."""
        make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
        return make, tuple(code.co_filename if arg == "<dynamic-code>" else arg for arg in args)

    class Pickler(cloudpickle.Pickler):
        dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: code_with_its_file})

    try:
        with io.BytesIO() as stream:
            Pickler(stream).dump(call)
            return stream.getvalue()
    except Exception as error:
        name = getattr(call[0], "__qualname__", repr(call[0]))
        raise UsageError(
            f"{name} cannot be sent to the ranks: it, an argument, or something that it refers to cannot be pickled "
            f"({type(error).__name__}: {error}); create it inside the function instead"
        ) from error


def _unpickled(rank: int, outcome: Outcome) -> Any:
    try:
        return pickle.loads(outcome.result or b"")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"what rank {rank} returned cannot be unpickled here ({why})") from error


def _sources_in_no_file() -> "dict[str, list[str]]":
    """Lines of what was typed, a notebook's cells above all: so that the ranks' tracebacks show them."""
    entries = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)}
    return {name: list(lines) for name, (_, _, lines, _) in entries.items()}
