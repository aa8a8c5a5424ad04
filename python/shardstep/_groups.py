"""Process groups: who takes part, and which transport they use."""

import hashlib
import os
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

from shardstep import _C
from shardstep._errors import MismatchError, TransportError, UsageError

TRANSPORTS = ("auto", "shm", "c10d")

#: Gloo groups in a forked child, which has none of the threads that their end would wait for: they stay until it exits.
FORKED: "list[dist.ProcessGroup]" = []


class Group:
    """The ranks of one wrapped model: a torch process group, or this process alone."""

    def __init__(self, process_group: "dist.ProcessGroup | None" = None):
        if process_group is None and dist.is_available() and dist.is_initialized():
            process_group = dist.group.WORLD
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise UsageError(f"process_group must be a torch.distributed process group, not {process_group!r}")
        self.pid = os.getpid()
        self.process_group = process_group
        self.rank = dist.get_rank(process_group) if process_group is not None else 0
        self.world = dist.get_world_size(process_group) if process_group is not None else 1
        self.control: dist.ProcessGroup | None = None  # the Gloo group that a c10d transport keeps for itself
        if self.rank < 0:
            raise UsageError("this process is not a member of the process group it was given")

    def open_control(self, timeout: float) -> "dist.ProcessGroup":
        """A Gloo group of the same ranks for a c10d transport's control messages. Collective.

        Made by hand, because ``dist.new_group`` names a subgroup by its ranks: once the first is destroyed, the next would
        find the first one's addresses in the store.
        """
        name = f"shardstep/control/{self.gather(uuid.uuid4().hex)[0]}"
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        backend = dist.ProcessGroupGloo(store, self.rank, self.world, timedelta(seconds=timeout))
        control = dist.ProcessGroup(store, self.rank, self.world)
        control._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        control._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        control._set_group_name(name)
        _register_process_group(name, control)
        self.control = control
        return control

    def release(self) -> None:
        """Lets the control group go."""
        control, self.control = self.control, None
        if control is None:
            return
        if os.getpid() != self.pid:
            FORKED.append(control)
        else:
            _unregister_process_group(control.group_name)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Collective."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def require_equal(self, items: list[tuple[str, Any]], what: str) -> None:
        """Raises the same MismatchError on every rank when ``items`` (name, value) differ between ranks. Collective."""
        digest = hashlib.sha256(repr(items).encode()).hexdigest()
        if len(set(self.gather(digest))) == 1:
            return
        everyone = self.gather(items)
        first = everyone[0]
        for rank, theirs in enumerate(everyone[1:], start=1):
            for position in range(max(len(first), len(theirs))):
                a = first[position] if position < len(first) else None
                b = theirs[position] if position < len(theirs) else None
                if a == b:
                    continue
                error = MismatchError(
                    f"ranks have different {what}: rank 0 has {_describe(a)}, rank {rank} has {_describe(b)}; "
                    "build the same model with the same arguments on every rank"
                )
                error.rank = rank
                raise error
        raise MismatchError(f"ranks have different {what}")


def _describe(item: "tuple[str, Any] | None") -> str:
    if item is None:
        return "nothing in its place"
    name, value = item
    return f"{name!r}: {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def seconds(timeout: "float | timedelta") -> float:
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise UsageError(f"timeout must be a positive number of seconds or a timedelta, not {timeout!r}")
    return float(value)


def _identity() -> "str | None":
    """Equal for processes that can share memory with each other; None where none can."""
    try:
        return _C.shm_identity()
    except TransportError:
        return None


def _open_shm(group: Group, timeout: float) -> Any:
    """A capsule, or the reason (a string) why some rank cannot use shared memory. Collective."""
    answers = group.gather((_identity(), uuid.uuid4().hex))
    hosts = {host for host, _ in answers}
    if None in hosts:
        return "the host cannot be identified"
    if len(hosts) > 1:
        return "the ranks are on different hosts, users or network namespaces"
    try:
        capsule, reason = _C.open_shm(answers[0][1], group.rank, group.world, timeout), None
    except TransportError as error:
        capsule, reason = None, str(error)
    reasons = [f"rank {rank}: {why}" for rank, why in enumerate(group.gather(reason)) if why]
    return capsule if not reasons else "; ".join(reasons)


def _open_c10d(group: Group, timeout: float) -> Any:
    if group.process_group is None:
        raise UsageError("transport='c10d' needs a process group: call shardstep.init() or init_process_group first")
    control = group.open_control(timeout)
    return _C.open_c10d(group.process_group.group_name, control.group_name, group.rank, group.world, timeout)


def open_transport(kind: str, group: Group, timeout: float) -> Any:
    """The transport ``kind`` as a capsule for ``_C.Engine``. Collective; every rank gets the same kind."""
    if kind == "c10d":
        return _open_c10d(group, timeout)
    found = _open_shm(group, timeout)
    if not isinstance(found, str):
        return found
    if kind == "shm" or group.process_group is None:
        raise TransportError(f"transport='shm' is not possible here: {found}")
    return _open_c10d(group, timeout)
