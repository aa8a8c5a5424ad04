"""Accelerators: on which one a model is, and where NCCL is found."""

import importlib.util
import os
import platform
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardstep import _C
from shardstep._errors import UsageError


class Device(NamedTuple):
    """An accelerator as the C core sees it."""

    capsule: Any
    identity: str  # equal for ranks that use the same one


def device_of(names: "list[str]", parameters: "list[torch.Tensor]") -> "Device | None":
    """The accelerator that all parameters are on; None for the CPU, which needs none of this.

    Raises:
        UsageError: they are on several devices.
        TransportError: the CUDA kernels cannot be used here.
    """
    if not parameters:
        return None
    device = parameters[0].device
    for name, parameter in zip(names, parameters):
        if parameter.device != device:
            raise UsageError(
                f"parameter {names[0]!r} is on {device} and parameter {name!r} on {parameter.device}; a wrapped model lives on "
                "one device"
            )
    if device.type == "cpu":
        return None
    kernels = Path(__file__).with_name("_cuda.so")
    capsule = _C.open_device(str(device), str(kernels), torch.version.cuda)
    return Device(capsule, f"{platform.node()} {torch.cuda.get_device_properties(device).uuid}")


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
