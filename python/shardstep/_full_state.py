"""Makes torch's ``StateDictOptions(full_state_dict=True)`` gather our shards too.

``torch.distributed.checkpoint.state_dict`` gathers DTensors and ShardedTensors by their types; another kind of sharded tensor
has no place there to say how it is gathered. So the function that gathers is extended, for ``FlatShard`` alone.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from shardstep._flat_shard import FlatShard

MODULE = "torch.distributed.checkpoint.state_dict"


def extend_torch() -> None:
    """Does it, once, if that module is in use at all: importing it takes half a second."""
    module: Any = sys.modules.get(MODULE)
    if module is None or hasattr(module._gather_state_dict, "of_torch"):
        return
    of_torch = module._gather_state_dict

    def gather_state_dict(state_dict: "dict[str, Any]", *, ranks_only: tuple = (), **options: Any) -> "dict[str, Any]":
        keep = not ranks_only or dist.get_rank() in ranks_only

        def whole(shard: FlatShard) -> torch.Tensor:
            tensor = shard.gather()
            return tensor if keep else tensor.new_empty(0)

        return of_torch(tree_map_only(FlatShard, whole, state_dict), ranks_only=ranks_only, **options)

    gather_state_dict.of_torch = of_torch
    module._gather_state_dict = gather_state_dict
