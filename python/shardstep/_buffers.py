"""A wrapped model's buffers: rank 0's become everyone's, at the start and then once per window."""

import weakref
import zlib
from collections.abc import Collection
from typing import Any

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
        self._none = not any(True for _ in module.buffers())

    @property
    def any(self) -> bool:
        """Had the module any when it was wrapped?"""
        return not self._none

    def named(self) -> "list[tuple[str, torch.Tensor]]":
        module = self._module()
        if module is None:
            return []
        return [(name, b) for name, b in module.named_buffers() if name not in self._ignored and b.numel() > 0]

    def broadcast(self, source: int = 0) -> None:
        """The buffers of rank ``source`` become everyone's. Collective, unless the module had none when it was wrapped.

        Raises MismatchError on every rank when they differ in name, shape or dtype, as caches made in a forward may."""
        if self._group.world == 1 or self._none:
            return
        named = self.named()
        self._require_equal([(name, ("buffer of shape", tuple(b.shape), b.dtype)) for name, b in named])
        buffers = tuple(b.detach() for _, b in named)
        if buffers:
            # A graph that has saved one (BatchNorm's statistics) may still run its backward, as in torch DDP.
            with torch.autograd._unsafe_preserve_version_counter(buffers):
                dist._broadcast_coalesced(self._group.process_group, list(buffers), CHUNK, source)

    def _require_equal(self, items: "list[tuple[str, Any]]") -> None:
        digest = zlib.crc32(repr(items).encode())
        extremes = torch.tensor([digest, -digest])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group.process_group)
        if extremes[0] != -extremes[1]:
            self._group.require_equal(
                items, "buffers", "make them alike, keep them out of the module's buffers, or pass broadcast_buffers=False"
            )
