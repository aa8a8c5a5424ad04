"""What a wrap's optimizers need of the layout, what of them ranks compare, and which cannot be sharded at all."""

import array
import dataclasses
import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from shardstep._errors import UsageError

if TYPE_CHECKING:
    from shardstep._engine import Engine

#: torch.optim classes whose update of an element depends on that element alone: parameters may be cut anywhere.
ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adam", "AdamW", "SGD")
)
#: Those whose update needs a parameter whole (singular values, sums over rows), but no other parameter.
WHOLE = (torch.optim.Muon, torch.optim.Adafactor)
REFUSED = {
    torch.optim.LBFGS: "its line search needs all parameters and evaluates the loss a different number of times on each rank",
    torch.optim.SparseAdam: "it needs sparse gradients, and gradients are densified into flat buckets",
}
WHOLE_KIND = 1  # csrc/core/layout.h


@dataclasses.dataclass(frozen=True)
class Plan:
    """The optimizers of a :func:`shardstep.wrap` or of a :class:`shardstep.ShardedOptimizer`, with its arguments."""

    optimizers: "tuple[Optimizer, ...]" = ()
    elementwise: bool = False
    whole: bool = False
    clip_grad_norm: "float | None" = None
    skip_nonfinite: bool = False

    def needs_whole(self, optimizer: Optimizer) -> bool:
        return type(optimizer) in WHOLE or (type(optimizer) not in ELEMENTWISE and self.whole)

    def users(self) -> "list[tuple[Optimizer, bool]]":
        return [(optimizer, self.needs_whole(optimizer)) for optimizer in self.optimizers]

    def describe(self, engine: "Engine") -> "list[tuple[str, Any]]":
        """What must be equal on all ranks. Raises UsageError for what cannot be."""
        limit = self.clip_grad_norm
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0):
            raise UsageError(f"clip_grad_norm must be a positive number or None, not {limit!r}")
        if self.elementwise and self.whole:
            raise UsageError("elementwise=True and whole=True contradict each other; pass the one that is true of the update")
        items: list[tuple[str, Any]] = [
            ("(elementwise, whole, clip_grad_norm, skip_nonfinite)",
             str((self.elementwise, self.whole, self.clip_grad_norm, self.skip_nonfinite)))
        ]
        for k, optimizer in enumerate(self.optimizers):
            self._refuse(optimizer)
            name = f"optimizer {k}, {type(optimizer).__name__}"
            items.append((name, f"{len(optimizer.param_groups)} param groups"))
            for number, group in enumerate(optimizer.param_groups):
                check_group(optimizer, group)
                options = {
                    key: option
                    for key, value in group.items()
                    if key != "params" and (option := _comparable(value)) is not None
                }
                items.append((f"options of param group {number} of {name}", str(options)))
                items.append((f"parameters of param group {number} of {name}", self._members(engine, optimizer, number)))
        return items

    def _refuse(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"optimizer must be a torch.optim.Optimizer, or a list of them, not {optimizer!r}")
        kind = type(optimizer)
        name = f"{kind.__module__}.{kind.__name__}"
        for refused, reason in REFUSED.items():
            if isinstance(optimizer, refused):
                base = f"torch.optim.{refused.__name__}"
                raise UsageError(f"{base if kind is refused else f'{name}, a {base},'} cannot be sharded: {reason}")
        if kind.__name__ == "ShardedOptimizer":
            raise UsageError("this optimizer is sharded already")
        if kind not in ELEMENTWISE + WHOLE and not self.elementwise and not self.whole:
            raise UsageError(
                f"{name} is not known to shardstep. If its update of each element depends on that element's own weight, "
                "gradient and state alone, pass elementwise=True; if it needs a parameter whole, but no other parameter, "
                "whole=True; otherwise it cannot be sharded"
            )

    def _members(self, engine: "Engine", optimizer: Optimizer, number: int) -> str:
        """A group's parameters, in few words. ``engine`` has collected its own, and may not have placed them yet."""
        members = []
        for parameter in optimizer.param_groups[number]["params"]:
            i = engine.index.get(id(parameter))
            if i is None:
                check_foreign(engine, parameter, number)
                continue
            members.append((engine.names[i], parameter.requires_grad))
            if self.needs_whole(optimizer):
                check_whole(engine, optimizer, i)
        digest = hashlib.sha256(repr(members).encode()).hexdigest()[:8]
        ends = f", {members[0][0]!r} to {members[-1][0]!r}" if members else ""
        return f"{len(members)} parameters{ends} (digest {digest})"


def _comparable(value: Any) -> Any:
    """A hyper-parameter as something with a repr that is equal where it is, or None."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_comparable(item) for item in value) if len(value) < 10 else None
    return None


REFUSED_FLAGS = {
    "differentiable": "no graph goes through a sharded update",
    "capturable": "a sharded step waits for other ranks and cannot be recorded",
}


def check_group(optimizer: Optimizer, group: "dict[str, Any]") -> None:
    """``foreach`` and ``fused`` say how torch is to compute the same; other flags would change what a step is."""
    for flag, reason in REFUSED_FLAGS.items():
        if group.get(flag):
            raise UsageError(
                f"{type(optimizer).__name__}({flag}=True) is not supported: {reason}; leave {flag} False in every param group"
            )


def check_foreign(engine: "Engine", parameter: torch.Tensor, group: int) -> None:
    if parameter.requires_grad and id(parameter) not in engine.registry.ignored:
        raise UsageError(
            f"param group {group} has a parameter of shape {tuple(parameter.shape)} that is not a parameter of the wrapped "
            "model; give each model its own optimizer"
        )


def check_whole(engine: "Engine", optimizer: Optimizer, i: int) -> None:
    """Raises when parameter i, which the optimizer needs whole, was cut over ranks before it came, or is complex."""
    if engine.params[i].is_complex():
        raise UsageError(
            f"{type(optimizer).__name__} needs parameters whole, and parameter {engine.names[i]!r} is complex: complex "
            "parameters are trained as pairs of real numbers, by elementwise optimizers"
        )
    if engine.sharded and not engine.closed and engine.placed(i) and not engine.core.is_whole(i):
        raise UsageError(
            f"{type(optimizer).__name__} needs parameters whole, and parameter {engine.names[i]!r} is cut over the ranks "
            "already: pass the optimizer to shardstep.wrap(model, [optimizer, ...]) from the start, attach each to a "
            "DistributedDataParallel before the first backward, and add a parameter before it is first trained"
        )


def kinds_of(parameters: "Iterable[torch.Tensor]", users: "list[tuple[Optimizer, bool]]") -> array.array:
    """Which parameters may share a bucket, for ``_C.Engine.place``: those of one optimizer. Each step then sends and gathers
    its own buckets only. Those of none may be added to one later: they are whole if any optimizer would need that."""
    kinds: dict[int, int] = {}
    unclaimed = WHOLE_KIND if any(whole for _, whole in users) else 0
    for number, (optimizer, whole) in enumerate(users, start=1):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            kind = kinds.get(id(parameter), 2 * number)
            kinds[id(parameter)] = kind | WHOLE_KIND if whole else kind
    return array.array("i", [kinds.get(id(parameter), unclaimed) for parameter in parameters])
