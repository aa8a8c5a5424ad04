"""``export``: the weights alone, for programs that only want those."""

import json
import os
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardstep._errors import CheckpointError, UsageError
from shardstep.checkpoint._bytes import content_of
from shardstep.checkpoint._folder import naming, sync_folder
from shardstep.checkpoint._load import open_checked
from shardstep.checkpoint._saved import MODEL, Saved

#: Their names in a safetensors header.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}
BATCH = 256 * 2**20  # bytes that are in memory at a time, or one tensor


def export(
    dir: "str | os.PathLike",
    to: "str | os.PathLike | None" = None,
    *,
    format: str = "safetensors",
    dtype: "torch.dtype | None" = None,
) -> Path:
    """Writes the weights and buffers of a checkpoint as one safetensors file, under their names in the model. Local, for one
    process, which needs no model and holds a few tensors at a time.

    Args:
        dir: as for :func:`load`.
        to: the file; by default beside the checkpoint, ``step-<step>.safetensors``.
        dtype: what floating-point tensors are cast to; by default they stay what they were saved as, FP32 masters for a model
            that was trained in low precision.

    Returns: the file's path. Raises CheckpointError, as :func:`load` does; UsageError for another format.
    """
    if format != "safetensors":
        raise UsageError(f"format={format!r}: only 'safetensors' can be written")
    checkpoint, saved = open_checked(dir)
    path = Path(to) if to is not None else checkpoint.with_name(f"{checkpoint.name}.safetensors")
    tensors, begin = {}, 0
    for key in saved.model_keys():
        if saved.entries[key] is None:
            continue  # a module's extra state
        kind = dtype if dtype is not None and saved.dtype(key).is_floating_point else saved.dtype(key)
        if kind not in DTYPES:
            raise CheckpointError(f"{key!r} is of {kind}, for which safetensors has no name")
        end = begin + saved.size(key).numel() * kind.itemsize
        shape = list(saved.size(key))
        tensors[key.removeprefix(f"{MODEL}.")] = {"dtype": DTYPES[kind], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    header += b" " * (-len(header) % 8)
    beside = path.with_name(f".exporting-{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with naming(beside), open(beside, "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for tensor in _read(saved, [f"{MODEL}.{name}" for name in tensors]):
                file.write(content_of(tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor))
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return path


def _read(saved: Saved, keys: list[str]) -> "Iterator[torch.Tensor]":
    batch: dict[str, Any] = {}
    for key in keys:
        batch[key] = saved.target(key)
        if sum(tensor.nbytes for tensor in batch.values()) >= BATCH:
            saved.read(batch)
            yield from batch.values()
            batch = {}
    saved.read(batch)
    yield from batch.values()

