"""What belongs to one rank alone: its random state, the user's extra, and buffers that differ between ranks."""

import hashlib
import io
import random
import sys
from pathlib import Path
from typing import Any

import torch

from shardstep._errors import CheckpointError


def name_of(rank: int) -> str:
    return f"rank-{rank}.pt"


def random_state() -> "dict[str, Any]":
    """Of every generator that training draws from by default, in types that load without executing code."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, key, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = (kind, [int(word) for word in key], int(position), int(has_gauss), float(cached))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: "dict[str, Any]") -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def digest(buffers: "dict[str, torch.Tensor]") -> str:
    file = io.BytesIO()
    torch.save(buffers, file)
    return hashlib.sha256(file.getvalue()).hexdigest()


def packed(extra: Any, buffers: "dict[str, torch.Tensor]") -> bytes:
    """Raises CheckpointError for an extra that could be read back only by executing code."""
    file = io.BytesIO()
    torch.save({"extra": extra, "random": random_state(), "buffers": buffers}, file)
    try:
        unpacked(file.getvalue())
    except Exception as error:
        raise CheckpointError(
            "extra holds something that cannot be loaded without executing code: put tensors, numbers, strings and containers "
            f"of them into it, a scheduler's or a loader's state_dict() for example ({str(error).splitlines()[0]})"
        ) from error
    return file.getvalue()


def unpacked(content: bytes) -> "dict[str, Any]":
    return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")


def load(checkpoint: Path, rank: int) -> "dict[str, Any]":
    path = checkpoint / name_of(rank)
    try:
        return unpacked(path.read_bytes())
    except Exception as error:
        raise CheckpointError(f"{path} is refused: {type(error).__name__}: {str(error).splitlines()[0]}") from error
