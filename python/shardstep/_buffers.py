"""A wrapped model's buffers: rank 0's become everyone's, at the start and then once per window."""

import weakref
from collections.abc import Collection, Iterator

import torch
import torch.distributed as dist
from torch import nn

from shardstep._groups import Group

CHUNK = 32 * 2**20  # bytes that are sent as one


class Buffers:
    """The buffers of ``module`` that ranks share; those named in ``ignored`` are each rank's own.

    They are collected anew every time, because a module may replace a buffer."""

    def __init__(self, module: nn.Module, group: Group, follow: bool, ignored: "Collection[str]"):
        self._module = weakref.ref(module)
        self._group = group
        self._ignored = frozenset(ignored)
        #: Do they follow rank 0's after the start?
        self.follow = follow

    def named(self) -> "list[tuple[str, torch.Tensor]]":
        module = self._module()
        if module is None or not any(part._buffers for part in _parts(module)):
            return []
        return [(name, b) for name, b in module.named_buffers() if name not in self._ignored and b.numel() > 0]

    def broadcast(self, source: int = 0) -> None:
        """The buffers of rank ``source`` become everyone's. Collective, unless there are none."""
        if self._group.world == 1:
            return
        buffers = tuple(b.detach() for _, b in self.named())
        if buffers:
            # A graph that has saved one (BatchNorm's statistics) may still run its backward, as in torch DDP.
            with torch.autograd._unsafe_preserve_version_counter(buffers):
                dist._broadcast_coalesced(self._group.process_group, list(buffers), CHUNK, source)


def _parts(module: nn.Module) -> "Iterator[nn.Module]":
    """Every submodule, at a fraction of what ``modules()`` costs: this is asked once per step."""
    todo, seen = [module], set()
    while todo:
        part = todo.pop()
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            yield part
            todo.extend(part._modules.values())
