"""Real worker processes, one per rank, for the tests that need several ranks.

    def body(rank, world, factor):                 # module-level: it is pickled by reference
        ...
        return something_picklable

    results = ranks.run(2, body, 3.0)              # one result per rank, or a failure with every rank's traceback
    results = ranks.run(2, body, 3.0, fresh=True)  # in processes of its own, gone afterwards
    outcomes = ranks.outcomes(2, body, 3.0)        # fresh too; errors and deaths are returned, not raised

There is one pool of workers per world size, which stays from test to test (starting ranks costs seconds otherwise),
with a Gloo group over loopback whose store lives here, as it lives in the agent under torchrun. After any failure the
pool is killed and the next call builds a new one. Workers are forked by a server that has imported torch and has used
none of it.
"""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pathlib
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta

#: Ranks that still run this long after another rank has failed are shown where they are and killed.
GRACE = 5.0
PR_SET_PDEATHSIG = 1

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["pytest", "torch", "torch.distributed", "torch.distributed.checkpoint", "torch._dynamo", "shardstep"]
)
_pools = {}


# -- in the worker ----------------------------------------------------------------------------------------------


def _worker(connection, rank, world, environment, log_path, group, group_timeout):
    # The fork server ends with the tests' process, unless its children keep it alive, and its children end with it.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)
    os.setsid()  # so that what a rank has started dies with it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = open(log_path, "a", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    os.environ.update(environment)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        if group:
            dist.init_process_group("gloo", timeout=timedelta(seconds=group_timeout))
        import shardstep  # noqa: F401 - so that its absence is said once and plainly

        reply = ("ok", None)
    except Exception as error:
        reply = _failure(error, started)
    gc.collect()
    gc.freeze()  # what is imported stays: later collections look at the tests' objects only
    connection.send_bytes(pickle.dumps(reply))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            break
        started = time.monotonic()
        try:
            function, args, kwargs = pickle.loads(request)
            random.seed(0)
            torch.manual_seed(0)
            reply = pickle.dumps(("ok", function(rank, world, *args, **kwargs)))
            del function, args, kwargs
        except BaseException as error:  # pytest's own outcomes are no Exceptions
            reply = pickle.dumps(_failure(error, started))
        gc.collect()
        connection.send_bytes(reply)
    log.flush()
    os._exit(0)  # no farewell between ranks: some may be gone


def _failure(error, started):
    seconds = time.monotonic() - started
    return ("error", type(error).__name__, str(error), seconds, traceback.format_exc())


# -- in the tests' process --------------------------------------------------------------------------------------


class _Pool:
    def __init__(self, world, group=True, group_timeout=30.0):
        import torch.distributed as dist

        self.world = world
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="shardstep-ranks-"))
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes, self.connections, self.logs = [], [], []
        self.alive = True
        for rank in range(world):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            here, there = _context.Pipe()
            log = self.folder / f"rank{rank}.log"
            log.touch()
            process = _context.Process(
                target=_worker, args=(there, rank, world, environment, str(log), group, group_timeout), daemon=True
            )
            process.start()
            there.close()
            self.processes.append(process)
            self.connections.append(here)
            self.logs.append(log)
        started = self._collect(time.monotonic() + 60.0, GRACE, ())
        if any(outcome[0] != "ok" for outcome in started):
            message = _report("workers did not start", started)
            self.kill()
            raise AssertionError(message)

    def call(self, function, args, kwargs, timeout, grace, abandon=()):
        for log in self.logs:
            with contextlib.suppress(OSError):
                os.truncate(log, 0)
        request = pickle.dumps((function, args, kwargs))
        try:
            for connection in self.connections:
                connection.send_bytes(request)
            outcomes = self._collect(time.monotonic() + timeout, grace, abandon)
        except BaseException:  # the test's own time limit, or Ctrl-C
            self.kill()
            raise
        if any(outcome[0] != "ok" for outcome in outcomes):
            self.kill()
        return outcomes

    def _collect(self, deadline, grace, abandon):
        outcomes = [None] * self.world
        while True:
            waiting = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
            if all(rank in abandon for rank in waiting):
                break
            left = deadline - time.monotonic()
            if left <= 0:
                break
            handles = {self.connections[rank]: rank for rank in waiting}
            handles.update({self.processes[rank].sentinel: rank for rank in waiting})
            for handle in multiprocessing.connection.wait(list(handles), timeout=left):
                rank = handles[handle]
                if outcomes[rank] is None:
                    outcomes[rank] = self._outcome(rank)
                    if outcomes[rank][0] != "ok" and grace is not None:
                        deadline = min(deadline, time.monotonic() + grace)
        still = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        for rank in still:
            outcomes[rank] = ("running", "")
        if still:
            for rank, stack in self._stacks([rank for rank in still if rank not in abandon]).items():
                outcomes[rank] = ("running", stack)
        return outcomes

    def _outcome(self, rank):
        connection, process = self.connections[rank], self.processes[rank]
        try:
            if connection.poll():
                return pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            pass
        process.join(5.0)
        code = process.exitcode
        return ("died", -code if code is not None and code < 0 else 0, f"exit code {code}\n{self.log(rank)}")

    def _stacks(self, which):
        """Where each rank is, in Python, by faulthandler."""
        before = {rank: self.logs[rank].stat().st_size for rank in which}
        for rank in which:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        answered, deadline = set(), time.monotonic() + 3.0
        while len(answered) < len(which) and time.monotonic() < deadline:
            time.sleep(0.1)
            answered = {rank for rank in which if self.logs[rank].stat().st_size > before[rank]}
        time.sleep(0.1 if which else 0.0)  # the rest of the last one
        return {rank: self.log(rank) if rank in answered else "(does not answer)" for rank in which}

    def log(self, rank):
        return self.logs[rank].read_text(errors="replace")[-8000:]

    def close(self):
        """Lets idle workers go, and kills those that do not."""
        for connection in self.connections:
            connection.close()
        deadline = time.monotonic() + 2.0
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self):
        self.alive = False
        for process in self.processes:
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # itself and what it has started
                process.kill()
        for process in self.processes:
            process.join(5.0)
        for connection in self.connections:
            connection.close()
        self.store = None
        shutil.rmtree(self.folder, ignore_errors=True)


def _pool(world):
    pool = _pools.get(world)
    if pool is None or not pool.alive:
        pool = _pools[world] = _Pool(world)
    return pool


def _report(what, outcomes):
    lines = [what]
    for rank, outcome in enumerate(outcomes):
        kind = outcome[0]
        if kind == "ok":
            lines.append(f"--- rank {rank}: finished")
        elif kind == "error":
            lines.append(f"--- rank {rank}: {outcome[1]} after {outcome[3]:.1f} s\n{outcome[4].rstrip()}")
        elif kind == "died":
            lines.append(f"--- rank {rank}: died of {_signal_name(outcome[1])}; {outcome[2].rstrip()}")
        else:
            lines.append(f"--- rank {rank}: still running\n{outcome[1].rstrip()}")
    return "\n".join(lines)


def _signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:
        return "no signal"


def run(world, function, *args, timeout=60.0, fresh=False, **kwargs):
    """Calls ``function(rank, world, *args, **kwargs)`` on every rank and returns the results in rank order.

    Raises one AssertionError with every rank's traceback when a rank raised, died or was not done after ``timeout``
    seconds. A rank that calls ``pytest.skip`` skips the test.
    """
    pool = _Pool(world) if fresh else _pool(world)
    try:
        outcomes = pool.call(function, args, kwargs, timeout, GRACE)
    finally:
        if fresh:
            pool.close()
    if any(outcome[0] != "ok" for outcome in outcomes):
        import pytest

        for outcome in outcomes:
            if outcome[:2] == ("error", "Skipped"):
                pytest.skip(outcome[2])
        raise AssertionError(_report(f"{function.__name__} failed with {world} ranks", outcomes))
    return [outcome[1] for outcome in outcomes]


def outcomes(world, function, *args, timeout=60.0, group=True, group_timeout=30.0, abandon=(), **kwargs):
    """As :func:`run` with ``fresh=True``, but returns what became of each rank:

    ``("ok", result)``, ``("error", name of the exception's type, message, seconds, traceback)``,
    ``("died", signal, log)``, or ``("running", stack)`` for a rank that was not done after ``timeout`` seconds. Ranks
    in ``abandon`` (stopped, say) are not waited for. Without ``group`` no process group is initialised; torchrun's
    environment is there.
    """
    pool = _Pool(world, group, group_timeout)
    try:
        return pool.call(function, args, kwargs, timeout, None, abandon)
    finally:
        pool.close()


def shutdown():
    """Ends every pool. For the end of the session."""
    for pool in _pools.values():
        if pool.alive:
            pool.close()
    _pools.clear()
