"""Joining the other ranks."""

import os
from datetime import timedelta

import torch.distributed as dist

from shardstep._groups import seconds

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init(timeout: "float | timedelta" = 600.0) -> None:
    """Joins the ranks that torchrun started, over Gloo. Collective.

    Does nothing when a process group exists already, or when torchrun's environment is absent: the process then trains
    alone (world size 1). ``timeout``, in seconds or as a timedelta, is the process group's.
    """
    if dist.is_initialized() or not all(os.environ.get(name) for name in TORCHRUN):
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds(timeout)))
