"""shardstep: whole replicas, one synchronisation per optimizer step, sharded FP32 master weights and optimizer state."""

import importlib
from typing import Any

import torch

try:
    from shardstep import _C
except ImportError as error:
    raise ImportError(
        f"shardstep's extension does not load with torch {torch.__version__}: {error}. It works with the torch it was built "
        "against only; rebuild it: pip install --force-reinstall --no-deps --no-build-isolation shardstep"
    ) from error

if _C.torch_version != torch.__version__:
    raise ImportError(
        f"shardstep was built against torch {_C.torch_version} but this is torch {torch.__version__}; rebuild it: "
        "pip install --force-reinstall --no-deps --no-build-isolation shardstep"
    )

from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardstep._ddp import DistributedDataParallel
from shardstep._errors import (
    AbortedError,
    CheckpointError,
    Error,
    MismatchError,
    PeerLostError,
    RankFailedError,
    TimeoutError,
    TransportError,
    UsageError,
)
from shardstep._launch import init, launch
from shardstep._module import wrap
from shardstep._optim import ShardedOptimizer, before_foreign_step


def __getattr__(name: str) -> Any:
    """``shardstep.checkpoint`` is imported when it is first used: torch.distributed.checkpoint takes half a second."""
    if name == "checkpoint":
        return importlib.import_module("shardstep.checkpoint")
    raise AttributeError(f"module 'shardstep' has no attribute {name!r}")


register_optimizer_step_pre_hook(before_foreign_step)

__version__ = "0.1.0"

__all__ = [
    "AbortedError",
    "CheckpointError",
    "DistributedDataParallel",
    "Error",
    "MismatchError",
    "PeerLostError",
    "RankFailedError",
    "ShardedOptimizer",
    "TimeoutError",
    "TransportError",
    "UsageError",
    "init",
    "launch",
    "wrap",
]
