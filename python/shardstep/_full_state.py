"""Makes torch's ``StateDictOptions(full_state_dict=True)`` gather our shards too.

``torch.distributed.checkpoint.state_dict`` gathers DTensors and ShardedTensors by their types; another kind of sharded tensor
has no place there to say how it is gathered. So the function that gathers is extended, for ``FlatShard`` alone.
"""

import inspect
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from shardstep._errors import UsageError
from shardstep._flat_shard import FlatShard

MODULE = "torch.distributed.checkpoint.state_dict"


def extend_torch() -> None:
    """Does it, once, if that module is in use at all: importing it takes half a second. Raises UsageError for a torch that
    gathers in another way."""
    module: Any = sys.modules.get(MODULE)
    of_torch = getattr(module, "_gather_state_dict", None)
    if module is None or hasattr(of_torch, "of_torch"):
        return
    if of_torch is None or "ranks_only" not in inspect.signature(of_torch).parameters:
        raise UsageError(
            f"torch {torch.__version__} gathers a full state dict in a way that shardstep does not know, and would take one "
            "rank's part of the optimizer's state for all of it; save with shardstep.checkpoint.save(..., full=True) instead"
        )

    def gather_state_dict(state_dict: "dict[str, Any]", *, ranks_only: tuple = (), **options: Any) -> "dict[str, Any]":
        keep = not ranks_only or dist.get_rank() in ranks_only

        def whole(shard: FlatShard) -> torch.Tensor:
            tensor = shard.gather()
            return tensor if keep else tensor.new_empty(0)

        return of_torch(tree_map_only(FlatShard, whole, state_dict), ranks_only=ranks_only, **options)

    gather_state_dict.of_torch = of_torch
    module._gather_state_dict = gather_state_dict
