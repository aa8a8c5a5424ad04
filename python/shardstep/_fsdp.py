"""FSDP2's methods, for scripts written for ``fully_shard``, on a module wrapped in place.

Parameters are whole on every rank all the time, so what steers when FSDP2 gathers and frees them has nothing to do here;
arguments are still checked as FSDP2 checks them. What would put the user's own code into the communication is refused.
"""

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from shardstep._errors import UsageError

if TYPE_CHECKING:
    import torch


class Unsharded:
    """What ``unshard(async_op=True)`` returns: parameters are there already."""

    def wait(self) -> None:
        pass


class FSDPMethods:
    # -- with a meaning here --------------------------------------------------------------------------------------------

    def reset_iter_state(self) -> None:
        """FSDP2's recovery after an exception: :meth:`abort_window`. Collective."""
        self.abort_window()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """FSDP2's earlier name of :meth:`set_gradient_divide_factor`."""
        warnings.warn("Use `set_gradient_divide_factor` instead", FutureWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    # -- nothing to do: parameters are whole, and every rank has them ----------------------------------------------------

    def reshard(self) -> None:
        """Nothing: parameters are whole all the time."""

    def unshard(self, async_op: bool = False) -> "Unsharded | None":
        """Nothing: parameters are whole all the time. With ``async_op`` a handle that is done already."""
        return Unsharded() if async_op else None

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Nothing: parameters are whole all the time."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Nothing: parameters are whole all the time."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Nothing: parameters are whole all the time."""

    def set_modules_to_forward_prefetch(self, modules: "Iterable[nn.Module]") -> None:
        """Nothing: there is nothing to gather before a forward."""
        _check_modules(modules)

    def set_modules_to_backward_prefetch(self, modules: "Iterable[nn.Module]") -> None:
        """Nothing: there is nothing to gather before a backward."""
        _check_modules(modules)

    def set_post_optim_event(self, event: "torch.Event") -> None:
        """Nothing: ``step()`` returns when the new weights are in place."""

    # -- nothing to do: how gradients are reduced is not FSDP2's way -----------------------------------------------------

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Nothing, as in FSDP2 without replicas of the shards: there is a reduce-scatter and no all-reduce."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Nothing: ranks may use different parameters in any case."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Nothing: gradients are always summed and scaled afterwards."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Nothing: gradients are reduced where they are, without input buffers."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Nothing: no all-gather runs beside a reduce-scatter."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Nothing: gradients are reduced where they are, without staging buffers."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Nothing: weights are gathered into place, without staging buffers."""

    # -- refused ---------------------------------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Refused: UsageError."""
        _refuse("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Refused: UsageError."""
        _refuse("set_custom_reduce_scatter")

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> NoReturn:
        """Refused: UsageError."""
        _refuse("set_all_reduce_hook")


def _check_modules(modules: "Iterable[nn.Module]") -> None:
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")


def _refuse(name: str) -> NoReturn:
    raise UsageError(
        f"{name}: gradients and weights travel on shardstep's own channel, which takes no collectives or hooks of yours; "
        "leave the call out, or edit the reduced gradients between backward() and step()"
    )
