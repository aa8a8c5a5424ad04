"""``full=True``: files that ``torch.load`` reads in one process, written by all ranks at once, each what it has.

Rank 0 writes a file with room for every tensor; then each rank puts its parts where they belong. So nothing is gathered, and
no rank needs more memory than the training has.
"""

import os
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardstep._flat_shard import Cut, FlatShard, is_dense, memory_order
from shardstep.checkpoint._bytes import write_at
from shardstep.checkpoint._folder import naming

Path = tuple  # of keys, from the root of a tree to a tensor
PROBE = 2**20  # bytes


def lay_out(file: FilePath, tree: Any) -> dict[Path, int]:
    """Writes the file without the content of its tensors, and returns where each belongs. The space is taken: a full disk is
    noticed here."""
    made: dict[int, torch.Tensor] = {}  # what is one object (of a tied parameter) is one in the file

    def placeholder(path: Path, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            shard = _shard(tensor)
            with FakeTensorMode():
                made[id(tensor)] = shard.cut.whole(torch.empty(shard.numel(), dtype=shard.dtype))
        return made[id(tensor)]

    with naming(file):
        try:
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(_map(tree, placeholder), file)
        except RuntimeError:  # torch's writer does not say what the system said
            _take_space(file, PROBE)
            raise
        _take_space(file, 0)
    offsets: dict[Path, int] = {}
    with FakeTensorMode():
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    _map(loaded, lambda path, tensor: offsets.update({path: tensor.untyped_storage()._checkpoint_offset}))
    return offsets


def _take_space(file: FilePath, more: int) -> None:
    with open(file, "r+b") as opened:
        os.posix_fallocate(opened.fileno(), 0, os.fstat(opened.fileno()).st_size + more)


def fill_in(file: FilePath, tree: Any, offsets: dict[Path, int]) -> None:
    """Writes this rank's parts, and waits until they are on disk."""
    with naming(file), open(file, "r+b") as opened:

        def write(path: Path, tensor: torch.Tensor) -> None:
            shard = _shard(tensor)
            write_at(opened.fileno(), shard.local, offsets[path] + shard.cut.begin * shard.local.element_size())

        _map(tree, write)
        os.fsync(opened.fileno())


def _shard(tensor: torch.Tensor) -> FlatShard:
    """The tensor as a shard, of which this rank has everything."""
    if isinstance(tensor, FlatShard):
        return tensor
    tensor = tensor.detach()
    tensor = tensor if is_dense(tensor) else tensor.contiguous()
    cut = Cut(tensor.shape, 0, tensor.numel(), memory_order(tensor))
    return FlatShard(cut.of(tensor), cut)


def _map(tree: Any, function: "Callable[[Path, torch.Tensor], Any]", path: Path = ()) -> Any:
    """The tree with each tensor replaced."""
    if isinstance(tree, torch.Tensor):
        return function(path, tree)
    if isinstance(tree, dict):
        return {key: _map(value, function, (*path, key)) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_map(value, function, (*path, k)) for k, value in enumerate(tree))
    return tree
