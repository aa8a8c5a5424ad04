"""Process groups: who takes part, and which transport they use."""

import functools
import hashlib
import os
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

from shardstep import _C
from shardstep._device import Device, nccl_library, nccl_of_wheel
from shardstep._errors import Error, MismatchError, TransportError, UsageError

TRANSPORTS = ("auto", "shm", "c10d", "nccl")

#: Gloo groups in a forked child, which has none of the threads that their end would wait for: they stay until it exits.
FORKED: "list[dist.ProcessGroup]" = []

#: Seconds by which Gloo's own timeout comes after ours, which says what was waited for; Gloo closes its connections.
GLOO_GRACE = 30.0

#: Names of users' groups over which a wrapped model communicates.
BORROWED: "set[str | None]" = set()


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
        self.channel: list[dist.ProcessGroup] = []  # Gloo groups that a c10d transport keeps for itself
        self.borrowed: str | None = None  # or the name of the user's group that it uses
        if self.rank < 0:
            raise UsageError("this process is not a member of the process group it was given")

    def open_data(self, timeout: float) -> str:
        """The name of a group that no other model and no collective of the user's uses. Collective.

        Collectives of one group are paired in the order of their calls, so two models whose backwards run in another order
        on another rank would be averaged with each other.
        """
        name, kind = self.process_group.group_name, _backend_for_cpu(self.process_group)
        if kind == "gloo":
            return self.open_gloo("data", timeout)
        if name in BORROWED:
            raise UsageError(
                f"another wrapped model communicates over this {kind} process group already, and collectives of the two could "
                "be taken for each other; give every model a process_group of its own (torch.distributed.new_group)"
            )
        BORROWED.add(name)
        self.borrowed = name
        return name

    def open_gloo(self, purpose: str, timeout: float) -> str:
        """The name of a new Gloo group of the same ranks. Collective.

        Made by hand, because ``dist.new_group`` names a subgroup by its ranks: once the first is destroyed, the next would
        find the first one's addresses in the store.
        """
        name = f"shardstep/{purpose}/{self.name}"
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        later = timedelta(seconds=timeout + GLOO_GRACE)
        backend = dist.ProcessGroupGloo(store, self.rank, self.world, later)
        group = dist.ProcessGroup(store, self.rank, self.world)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_group_name(name)
        _register_process_group(name, group)
        self.channel.append(group)
        return name

    def release(self) -> None:
        """Lets the transport's groups go."""
        channel, self.channel = self.channel, []
        if os.getpid() != self.pid:
            FORKED.extend(channel)
            return
        for group in channel:
            _unregister_process_group(group.group_name)
        BORROWED.discard(self.borrowed)

    @functools.cached_property
    def name(self) -> str:
        """Of this object, on all its ranks, among all that there are and were. Collective when it is asked for first."""
        return self.gather(uuid.uuid4().hex)[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Collective."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def agree(self, describe: "Callable[[], list[tuple[str, Any]]]", what: str) -> None:
        """:meth:`require_equal` of what ``describe()`` returns. When it raises a UsageError, this rank raises that and the
        others a MismatchError that quotes it: nobody waits. Collective."""
        refused = None
        try:
            items = describe()
        except UsageError as error:
            refused, items = error, [("refused", str(error))]
        try:
            self.require_equal(items, what)
        except MismatchError as mismatch:
            raise (refused or mismatch) from None
        if refused is not None:
            raise refused

    def require_equal(
        self,
        items: list[tuple[str, Any]],
        what: str,
        remedy: str = "build the same model with the same arguments on every rank",
    ) -> None:
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
                    f"{remedy}"
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


def _backend_for_cpu(group: "dist.ProcessGroup") -> str:
    try:
        return group._get_backend(torch.device("cpu")).name().lower()
    except RuntimeError:  # a group written in Python
        return type(group).__name__


def _identity() -> "str | None":
    """Equal for processes that can share memory with each other; None where none can."""
    try:
        return _C.shm_identity()
    except TransportError:
        return None


def _open_shm(group: Group, timeout: float) -> Any:
    """A capsule, or the reason (a string) why some rank cannot use shared memory. Collective."""
    hosts = set(group.gather(_identity()))
    if None in hosts:
        return "the host cannot be identified"
    if len(hosts) > 1:
        return "the ranks are on different hosts, users or network namespaces"
    capsule, failed = None, None
    try:
        capsule = _C.open_shm(group.name, group.rank, group.world, timeout)
    except Error as error:
        failed = error
    try:
        everyone = group.gather(str(failed) if failed is not None else None)
    except RuntimeError as error:
        raise failed or error from None  # a rank has died
    reasons = [f"rank {rank}: {why}" for rank, why in enumerate(everyone) if why]
    return capsule if not reasons else "; ".join(reasons)


def _open_c10d(group: Group, timeout: float) -> Any:
    if group.process_group is None:
        raise UsageError("transport='c10d' needs a process group: call shardstep.init() or init_process_group first")
    return _C.open_c10d(group.open_data(timeout), group.open_gloo("control", timeout), group.rank, group.world, timeout)


def _open_nccl(group: Group, timeout: float, device: Device) -> Any:
    control = group.open_gloo("control", timeout) if group.world > 1 else None
    return _C.open_nccl(
        device.capsule, control, device.identity, nccl_library(), nccl_of_wheel(), group.rank, group.world, timeout
    )


def open_transport(kind: str, group: Group, timeout: float, device: "Device | None" = None) -> Any:
    """The transport ``kind`` as a capsule for ``_C.Engine``; for tensors on ``device``, None being the CPU. Collective; every
    rank gets the same kind."""
    if device is not None:
        return _open_nccl(group, timeout, device)
    if kind == "c10d":
        return _open_c10d(group, timeout)
    found = _open_shm(group, timeout)
    if not isinstance(found, str):
        return found
    if kind == "shm" or group.process_group is None:
        raise TransportError(f"transport='shm' is not possible here: {found}")
    return _open_c10d(group, timeout)
