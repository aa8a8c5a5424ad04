"""``FlatShard``: this rank's flat range of a sharded tensor, as torch.distributed.checkpoint sees it.

A shard cuts a parameter anywhere in its memory, not between rows. DCP stores tensors in axis-aligned boxes and reads them
back whichever way the reader cuts them, so a shard shows itself as the few boxes that it is made of.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from shardstep._errors import UsageError

if TYPE_CHECKING:  # torch.distributed.checkpoint takes half a second to import, and only checkpoints need it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

aten = torch.ops.aten


class Box(NamedTuple):
    """An axis-aligned part of a tensor, and where it begins in the flat range that it is cut from."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int


def boxes_of(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """The flat range ``[begin, end)`` of a row-major tensor in at most ``2 * len(shape) - 1`` boxes, in order.

    A range is a tail of one row, then whole rows, then a head of one row; tail and head are ranges of a row's shape.
    """
    boxes: list[Box] = []

    def cut(prefix: tuple[int, ...], shape: tuple[int, ...], begin: int, end: int, at: int) -> None:
        if begin >= end:
            return
        ones = (1,) * len(prefix)
        if len(shape) <= 1:
            boxes.append(Box(prefix + (begin,) * len(shape), ones + (end - begin,) * len(shape), at))
            return
        row = math.prod(shape[1:])
        first, last = -(-begin // row), end // row  # of the whole rows
        if first > last:  # within one row
            cut((*prefix, last), shape[1:], begin - last * row, end - last * row, at)
            return
        if begin < first * row:
            cut((*prefix, first - 1), shape[1:], begin - (first - 1) * row, row, at)
        if first < last:
            offsets = (*prefix, first) + (0,) * len(shape[1:])
            boxes.append(Box(offsets, (*ones, last - first, *shape[1:]), at + first * row - begin))
        cut((*prefix, last), shape[1:], 0, end - last * row, at + last * row - begin)

    cut((), tuple(shape), begin, end, 0)
    return boxes


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a dense tensor, the slowest first: as its memory has them."""
    return tuple(sorted(range(tensor.dim()), key=lambda d: (tensor.size(d) > 1, -tensor.stride(d))))


def is_dense(tensor: torch.Tensor) -> bool:
    """Do its elements fill a range of memory without gaps or overlaps, in some order of its dimensions?"""
    return tensor.permute(memory_order(tensor)).is_contiguous()


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory under a storage that ends where the tensor does: saving it writes no more than its own bytes."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return torch.from_dlpack(tensor.detach())


class Cut:
    """Which part of a tensor a rank holds: elements ``[begin, begin + numel)`` in memory order. Immutable."""

    def __init__(
        self,
        shape: Sequence[int],
        begin: int,
        numel: int,
        order: "Sequence[int] | None" = None,
        group: "dist.ProcessGroup | None" = None,
    ):
        self.shape = torch.Size(shape)
        self.begin, self.numel = begin, numel
        self.order = tuple(range(len(self.shape)) if order is None else order)
        self.group = group  # the ranks that hold the rest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cut) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple:
        return tuple(self.shape), self.begin, self.numel, self.order

    def __reduce__(self) -> tuple:
        return Cut, self._key()[:4]

    def __deepcopy__(self, memo: dict) -> "Cut":
        return self

    def _back(self) -> list[int]:
        """Where in the order of memory each of the tensor's own dimensions is."""
        return [self.order.index(d) for d in range(len(self.order))]

    def boxes(self) -> list[Box]:
        """In the tensor's own dimensions. A tensor without elements is one box on every rank, so that it is there at all."""
        if self.shape.numel() == 0:
            return [Box((0,) * len(self.shape), tuple(self.shape), 0)]
        ordered = [self.shape[d] for d in self.order]
        back = self._back()
        return [
            Box(tuple(offsets[k] for k in back), tuple(sizes[k] for k in back), at)
            for offsets, sizes, at in boxes_of(ordered, self.begin, self.begin + self.numel)
        ]

    def part(self, flat: torch.Tensor, box: Box) -> torch.Tensor:
        """The box's elements as a view of ``flat``, the range that this is a cut of."""
        sizes = [box.sizes[d] for d in self.order]
        return alone(flat.narrow(0, box.begin, math.prod(sizes))).view(sizes).permute(self._back())

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This cut of the whole tensor, flat."""
        flat = whole.detach().permute(self.order).reshape(-1)
        return flat[self.begin : self.begin + self.numel]

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        """All elements in memory order as a view in the tensor's shape."""
        return flat.view([self.shape[d] for d in self.order]).permute(self._back())


class FlatShard(torch.Tensor):
    """This rank's flat range of a tensor that is sharded over ranks, under the whole tensor's shape.

    It is a name for ``local``, a one-dimensional tensor of ``cut.numel`` elements, and shares its memory. Everything in
    torch.distributed.checkpoint can save it, and load into it in place. It computes nothing.
    """

    local: torch.Tensor
    cut: Cut
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, local: torch.Tensor, cut: Cut) -> "FlatShard":
        if local.dim() != 1 or local.numel() != cut.numel:
            raise ValueError(f"a shard of {cut.numel} elements cannot have a tensor of shape {tuple(local.shape)}")
        local = local.detach()
        shard = torch.Tensor._make_wrapper_subclass(cls, cut.shape, dtype=local.dtype, device=local.device)
        shard.local, shard.cut = local, cut
        return shard

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: "dict[str, Any] | None" = None) -> Any:
        kwargs = kwargs or {}
        shard = next(x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, FlatShard))
        if func in (aten.detach.default, aten.alias.default):
            return FlatShard(shard.local, shard.cut)
        if func in (aten.clone.default, aten._to_copy.default):
            kwargs.pop("memory_format", None)
            return FlatShard(func(shard.local, **kwargs), shard.cut)
        if func is aten.equal.default and all(isinstance(x, FlatShard) for x in args):
            return args[0].cut == args[1].cut and torch.equal(args[0].local, args[1].local)
        if func is aten.new_empty.default:  # async_save's stager: it allocates, and then sets `local` and `cut`
            nothing = shard.local.new_empty(0, **kwargs)
            return FlatShard(nothing, Cut(args[1], 0, 0))
        raise NotImplementedError(
            f"{func} on a FlatShard: this rank holds {shard.cut.numel} of its {shard.numel()} elements, in .local. For the "
            "whole tensor use torch.distributed.checkpoint.state_dict with StateDictOptions(full_state_dict=True), or "
            "shardstep.checkpoint.save(..., full=True)"
        )

    def __deepcopy__(self, memo: dict) -> "FlatShard":
        copied = memo[id(self)] = FlatShard(self.local.clone(), self.cut)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return FlatShard, (alone(self.local), self.cut)

    def __repr__(self) -> str:
        end = self.cut.begin + self.cut.numel
        return f"FlatShard(shape={tuple(self.shape)}, [{self.cut.begin}, {end}), dtype={self.dtype})"

    def gather(self) -> torch.Tensor:
        """The whole tensor, in a new tensor on every rank. Collective."""
        cut = self.cut
        if cut.group is None and cut.numel < self.numel():
            raise UsageError(f"{self!r} was copied or loaded, and does not know the ranks that hold the rest of it")
        flat = self.local.new_zeros(self.numel())
        flat[cut.begin : cut.begin + cut.numel] = self.local
        if cut.group is not None and self.numel() > 0:
            dist.all_reduce(flat.view(torch.uint8), group=cut.group)  # of each byte all ranks but one have zero: exact
        return cut.whole(flat)

    # -- what torch.distributed.checkpoint calls ----------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, shard: Any) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.cut.boxes()]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> torch.Tensor:
        for box in self.cut.boxes():
            if box.offsets == tuple(index.offset or ()):
                return self.cut.part(self.local, box)
        raise ValueError(f"{index.fqn}: no box of {self!r} begins at {index.offset}")


torch.serialization.add_safe_globals([FlatShard, Cut])

