"""The program that :func:`shardstep.launch` starts once per rank: ``_rank.py <socket> <parent's process id>``.

Run by path, in a fresh interpreter, and nothing here imports torch: the first thing to do is to tie this process to its
parent's life.
"""

import ctypes
import faulthandler
import linecache
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1
CHECKPOINT_THREAD = "shardstep-checkpoint"  # writes in the background


class Task(NamedTuple):
    """What a rank is sent, pickled as a plain tuple: this module has another name in either process."""

    path: list  # sys.path
    sources: dict  # file name: lines, of code that is in no file (a notebook's cells)
    call: bytes  # (fn, args, kwargs) by cloudpickle


class Outcome(NamedTuple):
    """What a rank answers, pickled as a plain tuple. ``result`` by cloudpickle; or else the rest."""

    result: "bytes | None"
    summary: str = ""  # in a line, after "rank r"
    traceback: str = ""
    when: float = 0.0  # time.monotonic(), one clock for all processes of a host


def run(task: Task) -> Outcome:
    try:
        sys.path[:] = task.path
        for name, lines in task.sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)  # without a time it is not checked
        fn, args, kwargs = pickle.loads(task.call)

        import shardstep

        shardstep.init()
        result = fn(*args, **kwargs)
        for thread in threading.enumerate():
            if thread.name == CHECKPOINT_THREAD:  # the caller ends ranks that take long to exit
                thread.join()
        return Outcome(_pickled(result))
    except BaseException as error:
        when = time.monotonic()
        if isinstance(error, KeyboardInterrupt):
            raise
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None  # without this function
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        summary = traceback.format_exception_only(type(error), error)[-1].strip()
        return Outcome(None, f"raised {summary}", "".join(lines), when)


def _pickled(result: Any) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        from shardstep import UsageError

        raise UsageError(
            f"what the function returned, a {type(result).__name__}, cannot be pickled to go back to the caller "
            f"({error}); return tensors, numbers and containers of them"
        ) from error


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        os._exit(1)  # the parent was gone before that
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the caller was started ignoring it
    faulthandler.enable()
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    try:
        outcome = run(Task(*pickle.loads(connection.recv_bytes())))
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(pickle.dumps(tuple(outcome)))
        # A rank that is done, or has failed, stays until the caller has heard of all: peers may still read its memory,
        # and would report its end instead of what they have to say.
        connection.recv_bytes()
    except (EOFError, OSError):
        pass
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)  # at once: the caller does not wait for long
    destroy_process_group()


def destroy_process_group() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
