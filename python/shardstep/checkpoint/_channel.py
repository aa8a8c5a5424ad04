"""What ranks tell each other while they save and load: apart from training, which may go on meanwhile."""

import functools
import json
import pickle
import time
import weakref
import zlib
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from shardstep import _C
from shardstep._errors import AbortedError, CheckpointError, Error, MismatchError, PeerLostError, TimeoutError
from shardstep._groups import Group, open_transport, seconds

T = TypeVar("T")

POLL = 0.005  # seconds between looks at who has come
EXPLAIN = 0.5  # seconds in which the cause of a failure may show


class Channel:
    """A transport of its own between the ranks of a model. Opening it is collective."""

    def __init__(self, process_group: "dist.ProcessGroup | None", transport: str, timeout: float):
        group = Group(process_group)
        self.rank, self.world = group.rank, group.world
        self.broken = False
        if transport == "c10d":  # the user's group carries nothing: exchanges go over one of their own
            data, control = group.process_group.group_name, group.open_gloo("checkpoint", timeout)
            self._transport = _C.open_c10d(data, control, group.rank, group.world, timeout)
        else:
            self._transport = open_transport(transport, group, timeout)
        weakref.finalize(self, group.release).atexit = False

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Collective. Raises PeerLostError, TimeoutError or AbortedError, naming the
        rank."""
        try:
            return [pickle.loads(zlib.decompress(m)) for m in _C.exchange(self._transport, _packed(value))]
        except (TimeoutError, KeyboardInterrupt):  # the others may wait for this rank yet, or come later
            self._give_up("gave up")
            raise
        except BaseException:
            self.broken = True
            raise

    def _give_up(self, how: str) -> None:
        self.broken = True
        _C.fail(self._transport, f"rank {self.rank} {how}")

    def agree(self, doing: str, action: "Callable[[], T]") -> list[T]:
        """Every rank's result of ``action()``. Collective. Raises on every rank when the action has raised on any."""
        cause: Exception | None = None
        try:
            mine: Any = True, action()
        except Exception as error:
            cause, mine = error, (False, (type(error).__name__, str(error)))
        except BaseException:  # Ctrl-C: the others need not wait
            self._give_up(f"was interrupted while {doing}")
            raise
        try:
            outcomes = self.exchange(mine)
        except Error as error:
            raised = type(error)(f"while {doing}: {error}")
            raised.rank = error.rank
            raise raised from cause
        failures = {rank: reason for rank, (done, reason) in enumerate(outcomes) if not done}
        if failures:
            reasons = "; ".join(f"rank {rank}: {name}: {text}" for rank, (name, text) in failures.items())
            failed = CheckpointError(f"while {doing}: {reasons}")
            failed.rank = min(failures)
            raise failed from cause
        return [result for _, result in outcomes]

    def locally(self, doing: str, action: "Callable[[], T]") -> T:
        """As :meth:`agree`, for a result that is of no use to the others."""
        results: list[T] = []
        self.agree(doing, lambda: results.append(action()))
        return results[0]

    def require_equal(self, doing: str, values: "list[dict[str, Any]]") -> None:
        """Raises the same MismatchError on every rank when what the ranks have said differs."""
        for rank, theirs in enumerate(values):
            for name, value in theirs.items():
                if value != values[0][name]:
                    error = MismatchError(
                        f"while {doing}: rank 0 was called with {name}={values[0][name]!r} and rank {rank} with "
                        f"{name}={value!r}; every rank makes the same call"
                    )
                    error.rank = rank
                    raise error


def _packed(value: Any) -> bytes:
    return zlib.compress(pickle.dumps(value), 1)


#: Each engine's channel, from its first save or load on.
CHANNELS: "weakref.WeakKeyDictionary[Any, Channel]" = weakref.WeakKeyDictionary()

#: How often each engine's ranks have met, or tried to, in order to open one.
MEETINGS: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


def channel_of(engine: Any, doing: str) -> Channel:
    """Collective the first time, and the first time after a failure."""
    channel = CHANNELS.get(engine)
    if channel is None or channel.broken:
        number = MEETINGS[engine] = MEETINGS.get(engine, 0) + 1
        timeout = seconds(engine.settings["timeout"])
        meeting = _Meeting(engine, number, doing)
        meeting.attend(timeout)
        try:
            channel = CHANNELS[engine] = Channel(engine.group.process_group, engine.core.transport, timeout)
        except RuntimeError:  # torch's collectives do not say that a rank has died
            meeting.look_for(EXPLAIN)
            raise
    return channel


class _Meeting:
    """Waiting for all ranks to come to the same point: in the store, because a rank could not leave a collective of its process
    group again. There ``state`` has the ranks that have come, or why one of them has left."""

    def __init__(self, engine: Any, number: int, doing: str):
        self.engine, self.doing = engine, doing
        self.rank, self.world = engine.group.rank, engine.group.world
        self.key = f"shardstep/meeting/{engine.group.name}/{number}"
        self.state: dict[str, Any] = {"here": [], "left": None}
        self.stored = ""

    @functools.cached_property
    def store(self) -> "dist.Store":
        return dist.distributed_c10d._get_default_store()

    def attend(self, timeout: float) -> None:
        if self.world == 1:
            return
        deadline = time.monotonic() + timeout
        while self.rank not in self.state["here"]:
            self.look()
            self.change({**self.state, "here": [*self.state["here"], self.rank]})
        try:
            while len(self.state["here"]) < self.world:
                self.look()
                if time.monotonic() > deadline:
                    self.raise_timeout(timeout)
                time.sleep(POLL)
                self.read(self.store.get(self.key))
        except BaseException as error:
            while not self.state["left"] and len(self.state["here"]) < self.world:
                self.change({**self.state, "left": (self.rank, str(error))})
            if self.state["left"] or not isinstance(error, TimeoutError):
                raise  # otherwise the last has come at the last moment

    def change(self, state: "dict[str, Any]") -> None:
        """Unless somebody else has changed it meanwhile."""
        self.read(self.store.compare_set(self.key, self.stored, json.dumps(state)))

    def read(self, stored: bytes) -> None:
        self.stored = stored.decode()
        self.state = json.loads(self.stored)

    def look(self) -> None:
        lost = self.engine.core.lost_peer()
        if lost is not None:
            self.fail(PeerLostError, lost, f"rank {lost} has ended while rank {self.rank} waited for it")
        if self.state["left"]:
            rank, why = self.state["left"]
            self.fail(AbortedError, rank, f"rank {rank} has given up: {why}")

    def look_for(self, seconds: float) -> None:
        """Looks again and again: a process that has closed its sockets may not be seen to have ended yet."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            time.sleep(POLL)

    def raise_timeout(self, timeout: float) -> None:
        absent = [rank for rank in range(self.world) if rank not in self.state["here"]]
        ranks = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent[:10]))}"
        self.fail(TimeoutError, absent[0], f"rank {self.rank} has waited {timeout:g} s in vain for {ranks} to do the same")

    def fail(self, kind: type[Error], rank: int, text: str) -> NoReturn:
        error = kind(f"while {self.doing}: {text}")
        error.rank = rank
        raise error
