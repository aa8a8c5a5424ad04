"""``DistributedDataParallel``: torch DDP's class form over the same engine."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from shardstep._engine import Engine
from shardstep._module import ENGINE, Synchronised


class _Reducer:
    """What torch's pipelining asks of ``ddp.reducer``."""

    def prepare_for_backward(self, outputs: Any) -> None:
        """Nothing: whether a backward synchronises is decided while it runs."""


class DistributedDataParallel(Synchronised, TorchDDP):
    """Drop-in for ``torch.nn.parallel.DistributedDataParallel``.

    As constructed it is *replicated*: after a synchronising backward every ``.grad`` holds the average over ranks, and any
    optimizer may be used; unused parameters need no flag. ``ShardedOptimizer(optimizer, ddp)`` makes it *sharded*.

    Args: as torch's, by name. ``find_unused_parameters``, ``static_graph``, ``check_reduction`` and ``dim`` are accepted and
    not needed. ``transport`` and ``timeout`` are those of :func:`shardstep.wrap`.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: "dist.ProcessGroup | None" = None,
        bucket_cap_mb: "float | None" = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        *,
        transport: str = "auto",
        timeout: float = 600.0,
    ):
        nn.Module.__init__(self)
        if device_ids:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with single-device GPU modules; "
                f"this release trains on CPU, so leave device_ids out (got {device_ids!r})"
            )
        if not any(p.requires_grad for p in module.parameters()):
            raise RuntimeError("DistributedDataParallel is not needed when a module doesn't have any parameter that requires "
                               "a gradient.")
        engine = Engine(
            module, sharded=False, process_group=process_group, transport=transport, bucket_cap_mb=bucket_cap_mb,
            timeout=timeout, init_sync=init_sync,
        )
        self.module = module
        self.device_ids = self.output_device = None
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.process_group = engine.group.process_group
        self.device = torch.device("cpu")
        self.device_type = "cpu"
        self.bucket_bytes_cap = int((bucket_cap_mb or 25) * 2**20)
        self.reducer = _Reducer()
        self.__dict__[ENGINE] = engine

    @property
    def require_backward_grad_sync(self) -> bool:
        return self._engine.core.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._engine.core.sync = bool(value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine
        args, kwargs = engine.before_forward(args, kwargs)
        if self.broadcast_buffers and not engine.sharded and engine.core.sync and torch.is_grad_enabled():
            engine.broadcast_buffers_once(self.module)
        output = self.module(*args, **kwargs)
        engine.after_forward(output)
        return output

    def no_sync(self) -> "contextlib.AbstractContextManager[None]":
        """As torch DDP's."""
        return Synchronised.no_sync(self)

    def _become_sharded(self) -> Engine:
        old = self._engine
        settings = dict(old.settings)
        gradients = [(p, p.grad) for p in old.params if p.grad is not None]
        old.close_down()
        engine = Engine(self.module, sharded=True, init_sync=False, **settings)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        if self.broadcast_buffers:
            engine.broadcast_buffers(self.module)
            engine.buffers_of = self.module
        self.__dict__[ENGINE] = engine
        return engine

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = nn.Module.load_state_dict(self, *args, **kwargs)
        self._engine.check()
        self._engine.core.reset_masters()
        return result

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self._engine.check_apply(fn)
        return nn.Module._apply(self, fn, *args, **kwargs)

    def unwrap(self) -> nn.Module:
        """Ends the synchronisation and returns the inner module. Local."""
        self._engine.close_down()
        return self.module

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if key not in (ENGINE, "process_group", "reducer")}

    def __setstate__(self, state: dict) -> None:
        """A pickled or copied wrapper is synchronised anew over the default process group. Collective, as in torch DDP."""
        self.__dict__.update(state)
        engine = Engine(self.module, sharded=False)
        self.process_group = engine.group.process_group
        self.reducer = _Reducer()
        self.__dict__[ENGINE] = engine

    def __deepcopy__(self, memo: dict) -> nn.Module:
        """A plain, detached copy of the inner module: copies are for averaging and evaluation and must not communicate."""
        import copy

        return copy.deepcopy(self.module, memo)
