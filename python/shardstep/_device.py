"""Accelerators: on which one a model is, and where NCCL is found."""

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Device(NamedTuple):
    """An accelerator as the C core sees it."""

    capsule: Any
    identity: str  # equal for ranks that use the same one


def device_of(parameters: "Iterable[torch.Tensor]") -> "Device | None":
    """The accelerator that the parameters are on; None for the CPU, which needs none of this."""
    return None


def nccl_library() -> "str | None":
    """The library that ``SHARDSTEP_NCCL`` names, to be used whatever else there is."""
    return os.environ.get("SHARDSTEP_NCCL") or None


def nccl_of_wheel() -> "str | None":
    """The library of pip's nvidia-nccl package, which torch depends on."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # no package of nvidia's at all
        return None
    folders = found.submodule_search_locations if found is not None else None
    library = Path(folders[0]) / "lib" / "libnccl.so.2" if folders else None
    return str(library) if library is not None and library.is_file() else None
