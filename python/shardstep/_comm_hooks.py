"""DDP's communication hooks: user code that makes the averages of a replicated model instead of the transport.

At the end of a synchronising backward every bucket is handed to the hook, in the order in which their gradients come, once
per window; then the futures are waited for, and what they hold becomes the gradients.
"""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from shardstep._engine import Engine
from shardstep._errors import UsageError

BUILTIN = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
#: torch's hooks that average, sent as it is or in low precision; and those that make a hook send in low precision.
AVERAGING = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
COMPRESSING = tuple(
    f"{wrapper.__name__}.<locals>.{wrapper.__name__}_hook"
    for wrapper in (default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper)
)


class GradBucket:
    """``torch.distributed.GradBucket``'s protocol over one bucket of gradients."""

    def __init__(self, index: int, is_last: bool, parameters: "list[torch.Tensor]", slots: "list[torch.Tensor]"):
        self._index = index
        self._is_last = is_last
        self._parameters = parameters
        self._slots = slots
        self._buffer = torch.cat([slot.reshape(-1) for slot in slots])  # without the gaps that align parameters

    def index(self) -> int:
        """0 for the bucket of the parameters registered last, whose gradients come first."""
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """This rank's gradients, one after the other, undivided."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def parameters(self) -> "list[torch.Tensor]":
        return list(self._parameters)

    def gradients(self) -> "list[torch.Tensor]":
        """Views of :meth:`buffer`, one per parameter and of its shape."""
        parts = self._buffer.split([slot.numel() for slot in self._slots])
        return [part.view(slot.shape) for part, slot in zip(parts, self._slots)]

    def finish(self, result: Any) -> None:
        """``result``, what the hook's future holds, becomes the gradients."""
        if not isinstance(result, torch.Tensor) or result.numel() != self._buffer.numel():
            shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise UsageError(
                f"the communication hook's future for bucket {self._index} holds {shape}, not one tensor with the bucket's "
                f"{self._buffer.numel()} elements"
            )
        for part, slot in zip(result.reshape(-1).split([slot.numel() for slot in self._slots]), self._slots):
            slot.copy_(part.view(slot.shape))


class CommHook:
    """A registered hook and its state."""

    def __init__(self, engine: Engine, state: Any, hook: Callable[..., Any]):
        self.engine = weakref.ref(engine)
        self.state = state
        self.hook = hook

    def average(self) -> None:
        """Every bucket through the hook. After a close has left this rank's gradients in their slots."""
        engine = self.engine()
        waiting = []
        with torch.no_grad():
            members = [bucket["members"] for bucket in engine.core.buckets()]
            for b, indices in enumerate(members):
                slots = [engine.core.grad(i) for i in indices]
                bucket = GradBucket(b, b + 1 == len(members), [engine.params[i] for i in indices], slots)
                waiting.append((bucket, self.hook(self.state, bucket)))
            for bucket, future in waiting:
                if not isinstance(future, torch._C.Future):
                    raise UsageError(
                        f"the communication hook {name_of(self.hook)} returned {type(future).__name__}, not a "
                        "torch.futures.Future with the bucket's averaged gradients"
                    )
                bucket.finish(future.wait())
        engine.core.averaged()


def name_of(hook: Any) -> str:
    return getattr(hook, "__qualname__", None) or repr(hook)


def check(hook: Any) -> None:
    """As torch's own check, with its exceptions."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation not in (inspect.Parameter.empty, dist.GradBucket):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    if signature.return_annotation not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]):
        raise ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")


def refuse_sharded(hook: Any) -> None:
    """A sharded model's gradients are never whole on a rank, so that there is nothing to hand to a hook. torch's own that
    average have nothing to do: averages in FP32 are what happens anyway, whatever precision they would have sent (as with
    FSDP2's ``reduce_dtype``)."""
    inner = hook
    while getattr(inner, "__module__", None) == default_hooks.__name__ and inner.__qualname__ in COMPRESSING:
        inner = inspect.getclosurevars(inner).nonlocals["hook"]
    if inner in AVERAGING:
        return
    raise UsageError(
        f"communication hook {name_of(hook)} cannot run on a sharded model: gradients are reduce-scattered and no rank has "
        "whole buckets to hand to it. torch's allreduce_hook, fp16_compress_hook and bf16_compress_hook are taken (averages "
        "stay FP32); leave the optimizer unsharded to use another one"
    )
