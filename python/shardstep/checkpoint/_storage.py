"""torch.distributed.checkpoint's files, written with their checksums and read without trusting them."""

import contextlib
import dataclasses
import enum
import hashlib
import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner

from shardstep._errors import CheckpointError
from shardstep.checkpoint._bytes import read_at
from shardstep.checkpoint._folder import File, digest, naming

METADATA = ".metadata"


class _Digesting:
    """A file that is written from its beginning to its end, and what was written."""

    def __init__(self, path: Path, progress: "Callable[[int], None]"):
        self._file = open(path, "wb", buffering=2**20)
        self._sha = hashlib.sha256()
        self._bytes = 0
        self._progress = progress
        self.fileno, self.flush, self.close = self._file.fileno, self._file.flush, self._file.close

    def write(self, data: Any) -> int:
        written = self._file.write(data)
        self._sha.update(data)
        self._bytes += written
        self._progress(written)
        return written

    def tell(self) -> int:
        return self._bytes

    def written(self) -> File:
        return File(self._bytes, self._sha.hexdigest())


class _Files(FileSystem):
    def __init__(self, progress: "Callable[[int], None]"):
        self.written: dict[str, File] = {}
        self._progress = progress

    @contextlib.contextmanager
    def create_stream(self, path: "str | os.PathLike", mode: str) -> "Iterator[io.IOBase]":
        if mode != "wb":
            raise ValueError(f"mode {mode!r}: checkpoints are only written here")
        with naming(Path(path)), contextlib.closing(_Digesting(Path(path), self._progress)) as stream:
            yield cast(Any, stream)
        self.written[Path(path).name] = stream.written()


class Writer:
    """Writes what one rank has of a checkpoint, one tensor after the other; and, on rank 0, the metadata of all."""

    def __init__(self, folder: Path, rank: int, world: int, progress: "Callable[[int], None]" = lambda n: None):
        self.folder = folder
        self._rank, self._world = rank, world
        self._writer = _FileSystemWriter(folder)
        self._writer.fs = _Files(progress)
        self._planner = DefaultSavePlanner()

    def write(self, state: "dict[str, Any]") -> "tuple[Any, Any, dict[str, File]]":
        """Each rank passes what it is to write, so nothing is there twice. Returns what rank 0 needs for :meth:`finish`."""
        self._planner.set_up_planner(state, self._writer.storage_meta(), self._rank == 0)
        plan = self._planner.create_local_plan()
        mine = self._writer.prepare_global_plan([plan] * self._world)[self._rank]
        results = self._writer.write_data(mine, self._planner).value()
        return plan, results, self._writer.fs.written

    def finish(self, plans: list[Any], results: list[Any]) -> File:
        """Raises ValueError when the parts do not make up the whole."""
        _, metadata = self._planner.create_global_plan(plans)
        self._writer.finish(metadata, results)
        return digest(self.folder / METADATA)


class _FileSystemWriter(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # by default it has the path, which is that of a folder that will be renamed


# -- reading ----------------------------------------------------------------------------------------------------------

_ADMITTED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}


def _member(cls: type, name: str) -> enum.Enum:
    """What an enumeration's member is pickled as a getattr of by some Python releases, 3.11.2 for one."""
    if not (isinstance(cls, enum.EnumMeta) and name in cls.__members__):
        raise pickle.UnpicklingError(f"it asks for {name!r} of {cls!r}, which has no place in a checkpoint's metadata")
    return cls.__members__[name]


class _MetadataUnpickler(pickle.Unpickler):
    """DCP's metadata is a pickle. This one makes DCP's own plain classes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _ADMITTED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which has no place in a checkpoint's metadata")


def read_metadata(folder: Path) -> Metadata:
    """Executes nothing that the file says. Raises CheckpointError."""
    path = folder / METADATA
    try:
        with open(path, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(f"{path} is refused: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} is refused: it holds a {type(metadata).__name__}")
    for index, where in metadata.storage_data.items():
        if Path(where.relative_path).name != where.relative_path:
            raise CheckpointError(f"{path} is refused: {index.fqn!r} is said to be in {where.relative_path!r}")
    return metadata


BLOCK = 2**20  # bytes that are read at a time, or one row of a tensor


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__(folder)
        self.set_up_storage_reader(metadata, True)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "torch.futures.Future[None]":
        """As torch's, which reads what each rank has written of a tensor whole, before it takes a part; this needs no memory
        to speak of."""
        others = []
        opened: dict[str, Any] = {}
        with contextlib.ExitStack() as files:
            for item in plan.items:
                where = self.storage_data[item.storage_index]
                if item.type == LoadItemType.BYTE_IO or where.transform_descriptors:
                    others.append(item)
                    continue
                if where.relative_path not in opened:
                    opened[where.relative_path] = files.enter_context(open(self.path / where.relative_path, "rb"))
                file = opened[where.relative_path]
                with FakeTensorMode():  # its layout alone
                    stored = torch.load(self._slice_file(file, where), map_location="cpu", weights_only=True)
                begin = where.offset + stored.untyped_storage()._checkpoint_offset
                target = planner.resolve_tensor(item).detach()
                part = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
                _copy(file.fileno(), begin, part, target)
                planner.commit_tensor(item, target)
        return super().read_data(dataclasses.replace(plan, items=others), planner)


def _copy(descriptor: int, begin: int, part: torch.Tensor, target: torch.Tensor) -> None:
    """Reads a tensor of which only the layout is known, in a storage that is in a file from ``begin`` on."""
    if part.numel() == 0:
        return
    slowest = max(range(part.dim()), key=lambda d: part.stride(d) if part.size(d) > 1 else -1, default=0)
    if part.numel() > 1 and part.nbytes > BLOCK:
        half = part.size(slowest) // 2
        for first, length in ((0, half), (half, part.size(slowest) - half)):
            _copy(descriptor, begin, part.narrow(slowest, first, length), target.narrow(slowest, first, length))
        return
    extent = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride()))
    block = torch.empty(extent, dtype=part.dtype)
    read_at(descriptor, block, begin + part.storage_offset() * part.itemsize)
    target.copy_(block.as_strided(part.shape, part.stride()))


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """As torch's, which unpickles whatever is there."""
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, torch.load(value, weights_only=True))


def read(folder: Path, metadata: Metadata, state: "dict[str, Any]") -> None:
    """Loads into the tensors of ``state``, in place, and replaces what is no tensor. Local. Executes nothing that files say."""
    planner = _Planner()
    reader = _Reader(folder, metadata)
    planner.set_up_planner(state, metadata, True)
    plan = planner.finish_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()

