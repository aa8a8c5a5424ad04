"""The sharded optimizer: a torch optimizer whose update each rank makes for its own pieces only."""

import array
import copy
import math
import operator
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig
from torch.optim import Optimizer

from shardstep import _join
from shardstep._engine import AT_STEP, DOUBLE, LOW, WANT_NORM, WANT_NOTHING, Engine, collector_paused, engines, indices
from shardstep._errors import UsageError
from shardstep._full_state import extend_torch
from shardstep._late import Late
from shardstep._plan import ELEMENTWISE, WHOLE, Plan, check_foreign, check_group
from shardstep._rules import MASTER, FusedRule, TorchRule, WholeRule, piece_of
from shardstep._state import LazyState


class ShardedOptimizer(Optimizer):
    """Shards ``optimizer`` over the ranks of the wrapped ``model``.

    Args:
        optimizer: a ``torch.optim.Optimizer`` over parameters of ``model``; its groups, options and warm state are taken
            over. Use the object returned here from then on; schedulers built on either see the same groups.
        model: a module that went through :func:`shardstep.wrap`, or a :class:`shardstep.DistributedDataParallel`, which
            thereby turns from replicated to sharded.
        elementwise: say that an optimizer class of your own updates each element from that element's own values alone.
        whole: say that one of your own needs each parameter whole (the rows of a matrix, its singular values), but no other
            parameter. Such parameters, like those of ``torch.optim.Muon`` and ``Adafactor``, are not cut over the ranks but
            divided among them, balanced by size.
        clip_grad_norm: before each update, clip the gradients of this optimizer's parameters to this global L2 norm, as
            ``torch.nn.utils.clip_grad_norm_`` of these parameters would, without a pass over them.
        skip_nonfinite: a step in which that norm is NaN or infinite changes nothing: no weight, no state, no count of steps.

    The construction is collective. ``param_groups`` hold the model's own parameters and ``state`` is keyed by them; state
    tensors are this rank's flat pieces (of a whole parameter all or nothing, in the parameter's shape). An optimizer may be
    for some of the parameters only: the others are reduced, and left alone by its step. After a step ``grad_norm`` is the norm
    before clipping (None unless one of the two options asks for it), ``step_was_skipped`` says whether the step was skipped,
    alike on all ranks: by ``skip_nonfinite``, or by a ``GradScaler``, which does not call ``step()`` then (it is True as soon
    as the scaler has found an infinity). ``skipped_steps`` counts those that ``skip_nonfinite`` has skipped so far.
    On a GPU reading them waits for it; a step with SGD, Adam or AdamW does not, whether it clips or skips or not.

    Raises:
        UsageError: for optimizers that need all parameters at once, and options that cannot be used.
        MismatchError: ranks have different optimizers or options; on every rank alike.
    """

    grad_norm, step_was_skipped, skipped_steps = Late(float), Late(bool), Late(int)

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        elementwise: bool = False,
        whole: bool = False,
        clip_grad_norm: "float | None" = None,
        skip_nonfinite: bool = False,
    ):
        from shardstep._module import sharded_engine_of

        plan = Plan((optimizer,), elementwise, whole, clip_grad_norm, skip_nonfinite)
        self._set_up(optimizer, sharded_engine_of(model, plan), plan)

    @classmethod
    def of(cls, plan: Plan, engine: Engine) -> "list[ShardedOptimizer]":
        """Those of a wrap, whose engine has been made with this plan."""
        made = [cls.__new__(cls) for _ in plan.optimizers]
        for self, optimizer in zip(made, plan.optimizers):
            self._set_up(optimizer, engine, plan)
            self._clipped_together = made
        return made

    @collector_paused()
    def _set_up(self, optimizer: Optimizer, engine: Engine, plan: Plan) -> None:
        self.engine = engine
        self.wrapped = optimizer
        self.whole = plan.needs_whole(optimizer)
        self.grad_norm: float | None = None
        self.step_was_skipped = False
        self.skipped_steps = 0
        self._max_norm = plan.clip_grad_norm
        self._skip_nonfinite = plan.skip_nonfinite
        self._clipped_together = [self]  # whose gradients the norm counts
        self._rule: FusedRule | TorchRule | None = None
        self._members: tuple[array.array, list[torch.Tensor]] | None = None  # placed parameters, and others
        self._groups: list[list[torch.Tensor]] = []  # the members of each group, when they were looked at last
        warm = dict(optimizer.state)
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = hooks
        self._rule = FusedRule(self) if _is_fused(optimizer, engine) else WholeRule(self) if self.whole else TorchRule(self)
        self.state = self.entries = LazyState(
            self._rule.entry, live=isinstance(self._rule, TorchRule), complete=type(optimizer) in ELEMENTWISE + WHOLE
        )
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                self._take(parameter, index, warm.get(parameter, {}) if warm else {})
        self._groups = [list(group["params"]) for group in self.param_groups]
        self._rule.prepare()
        self._number = self.engine.add_optimizer(self)

    # -- membership ---------------------------------------------------------------------------------------------------

    def _take(self, parameter: torch.Tensor, group_index: int, warm: "dict[str, Any]") -> None:
        i = self.engine.index.get(id(parameter))
        if i is None:
            check_foreign(self.engine, parameter, group_index)
            return
        if self.engine.placed(i):
            self._rule.add(i, group_index, warm)
        elif warm:
            self.state[parameter] = warm  # frozen: kept whole, and cut when it joins the layout

    def take_placed(self, placed: "Iterable[int]") -> None:
        """Parameters unfrozen after wrapping have joined the layout."""
        self._members = None
        groups = {id(p): index for index, group in enumerate(self.param_groups) for p in group["params"]}
        for i in placed:
            index = groups.get(id(self.engine.params[i]))
            if index is not None:
                self._rule.add(i, index, self.entries.take(self.engine.params[i]))

    def add_param_group(self, param_group: "dict[str, Any]") -> None:
        """As torch's. Alike on all ranks; local, unless a parameter is new to the layout: then the next step communicates."""
        super().add_param_group(param_group)
        self._members = None
        if self._rule is None:  # torch's constructor: the members are taken later
            return
        index, group = len(self.param_groups) - 1, self.param_groups[-1]
        try:
            check_group(self.wrapped, group)
            for parameter in group["params"]:
                self._take(parameter, index, {})
        except UsageError:  # as if it had not been called
            del self.param_groups[index]
            self._groups = []  # those taken by now are looked at again
            raise
        if self.param_groups is not self.wrapped.param_groups:
            self.wrapped.param_groups.append(group)
        self._groups.append(list(group["params"]))

    def _follow_groups(self) -> None:
        """Members that the user has taken out of a group, put into one or moved, since the last look."""
        groups = [group["params"] for group in self.param_groups]
        if len(groups) == len(self._groups) and all(
            len(now) == len(then) and all(map(operator.is_, now, then)) for now, then in zip(groups, self._groups)
        ):
            return
        self._members = None
        self._rule.forget_groups()
        for index, members in enumerate(groups):
            for parameter in members:
                self._take(parameter, index, {})
        self._groups = [list(members) for members in groups]
        self.wrapped.param_groups[:] = self.param_groups

    def _follow_state(self) -> None:
        """What the user has done to ``state`` since the last look. State that is gone is made anew, as in torch."""
        if self.state is not self.entries:
            given, self.state = self.state, self.entries
            self.entries.clear()
            self.entries.update(given)
        edited = self.entries.edits()
        if not edited:
            return
        groups = {id(p): number for number, members in enumerate(self._groups) for p in members}
        for parameter in edited:
            i, group = self.engine.index.get(id(parameter)), groups.get(id(parameter))
            if i is None or group is None or not self.engine.placed(i):
                continue
            entry = self.entries.take(parameter)
            if entry:
                self._rule.load(i, entry)
            else:
                self._rule.reset(i, group)

    # -- the step -----------------------------------------------------------------------------------------------------

    def _attached(self) -> Engine:
        if "engine" not in self.__dict__:
            raise UsageError(
                "this optimizer is a copy (by pickle or copy) and no model's gradients reach it; use the original, or give a "
                "new torch optimizer its state_dict() and wrap that"
            )
        return self.engine

    @torch.no_grad()
    def step(self, closure: "Callable[[], Any] | None" = None) -> Any:
        """One update on every rank. Collective: closes the window, updates this rank's pieces, gathers parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self._attached()
        if engine.closed:
            raise UsageError("the model was unwrapped; this optimizer no longer has anything to step")
        engine.check()
        self._follow_groups()
        for group in self.param_groups:
            check_group(self.wrapped, group)
        self._follow_state()
        engine.close(
            AT_STEP, WANT_NORM if self._wants_norm and not self._clips_on_device else WANT_NOTHING, param=self._number
        )
        if engine.uneven is not None and engine.uneven.enabled:
            engine.uneven.share(engine, self)
        self._finish_step()
        self.wrapped._opt_called = True  # for schedulers that were built on it
        return loss

    @property
    def _wants_norm(self) -> bool:
        return self._skip_nonfinite or self._max_norm is not None

    @property
    def _clips_on_device(self) -> bool:
        fused = all(isinstance(optimizer._rule, FusedRule) for optimizer in self._clipped_together)
        return self._wants_norm and self.engine.device is not None and fused

    def _finish_step(self) -> None:
        """What comes after the close of a step. Collective."""
        if self._clips_on_device:
            self._clip_on_device()
            self._rule.step()
        else:
            self.step_was_skipped = self._wants_norm and not self._clip()
            if not self.step_was_skipped:
                self._rule.step()
        self.engine.core.gather()
        self.engine.note_step()

    # -- torch.distributed.algorithms.join.Joinable -------------------------------------------------------------------

    @torch.no_grad()
    def shadow_step(self) -> None:
        """The part of a rank that has joined in a step of the others, after its close. Collective."""
        self._follow_groups()
        self._follow_state()
        self._finish_step()

    _join_config = _JoinConfig.construct_disabled_join_config()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _join.join_hook(self, self._attached(), **kwargs)

    @property
    def join_device(self) -> torch.device:
        return self._attached().params[0].device

    @property
    def join_process_group(self) -> Any:
        return self._attached().group.process_group

    def _clipped(self) -> "array.array":
        """The parameters whose gradients are clipped together with ours."""
        placed = indices([])
        for optimizer in self._clipped_together:
            if optimizer is not self:
                optimizer._follow_groups()
            placed.extend(optimizer.placed())
        return placed

    def _clip_on_device(self) -> None:
        """Clips where the host does not wait for the device: what is known is known there. The update skips itself."""
        limit = float("inf") if self._max_norm is None else self._max_norm
        norm = self.engine.core.clip_on_device(self._clipped(), limit, self._skip_nonfinite)[0].clone()
        self.grad_norm, self.step_was_skipped = norm, False
        if self._skip_nonfinite:
            skipped = self.step_was_skipped = ~norm.isfinite()
            ShardedOptimizer.skipped_steps.add(self, skipped)
            Engine.skipped_steps.add(self.engine, skipped)

    def _clip(self) -> bool:
        """Notes the norm and clips. False when the step is to be skipped."""
        placed = self._clipped()
        limit = float("inf") if self._max_norm is None else self._max_norm
        norm = self.grad_norm = self.engine.core.clip(placed, limit, self._skip_nonfinite)
        if math.isfinite(norm) or not self._skip_nonfinite:
            return True
        self.skipped_steps += 1
        self.engine.skipped_steps += 1
        if self.skipped_steps == 1 and self.engine.group.rank == 0:
            culprit = next(i for i in placed if not math.isfinite(self.engine.norm(i, 2.0)))
            warnings.warn(
                f"skip_nonfinite: the norm of the gradients is {norm}, so this step is skipped on all ranks; the first that is "
                f"not finite is that of parameter {self.engine.names[culprit]!r}. This is said once; skipped steps are counted "
                "in optimizer.skipped_steps",
                stacklevel=6,
            )
        return False

    def _split(self) -> "tuple[array.array, list[torch.Tensor]]":
        """Our parameters that are in the layout, by index, and the others."""
        if self._members is None:
            everyone = [p for group in self.param_groups for p in group["params"]]
            placed = [i for p in everyone if (i := self.engine.index.get(id(p))) is not None and self.engine.placed(i)]
            inside = {id(self.engine.params[i]) for i in placed}
            self._members = indices(placed), [p for p in everyone if id(p) not in inside]
        return self._members

    def placed(self) -> "array.array":
        """Our parameters that are in the layout, by index."""
        return self._split()[0]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's: gradients become None, or zero. Local; drops what has not been stepped with."""
        self._attached()
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        self._follow_groups()
        owned, others = self._split()
        self.engine.core.drop(owned)
        for parameter in others:
            parameter.grad = None

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> "dict[str, Any]":
        """torch's format. State tensors are :class:`FlatShard`: this rank's part under the whole tensor's shape, for
        torch.distributed.checkpoint at any world size, and for ``torch.save`` to be loaded at the same one. Parameters of low
        precision carry their FP32 master as ``master_param``."""
        extend_torch()
        return self.state_to_save()

    def state_to_save(self) -> "dict[str, Any]":
        """:meth:`state_dict` for those who need nothing of torch.distributed.checkpoint's ``state_dict`` module."""
        if "engine" in self.__dict__:
            self._follow_groups()
            self._follow_state()
        saved = super().state_dict()
        everyone = [parameter for group in self.param_groups for parameter in group["params"]]
        for position, parameter in enumerate(everyone):
            i = self.engine.index.get(id(parameter))
            if i is None or not self.engine.placed(i):
                continue
            state = {
                key: self.engine.shard(i, value) if type(value) is torch.Tensor and value.dim() == 1 else value
                for key, value in self._rule.to_save(i).items()
            }
            if parameter.dtype in LOW:
                state[MASTER] = self.engine.shard(i, self.engine.slots[i]["piece_master"])
            if state:
                saved["state"][position] = state
        in_order = {position: saved["state"].pop(position) for position in range(len(everyone)) if position in saved["state"]}
        saved["state"] = {**in_order, **saved["state"]}  # alike on all ranks, which gather one after the other
        return saved

    def load_state_dict(self, state_dict: "dict[str, Any]") -> None:
        """Loads what :meth:`state_dict` gave, at the same world size, or a state_dict of the unsharded optimizer. Local."""
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._follow_groups()
        self._follow_state()
        groups, saved_groups = self.param_groups, state_dict["param_groups"]
        if len(groups) != len(saved_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        if any(len(g["params"]) != len(s["params"]) for g, s in zip(groups, saved_groups)):
            raise ValueError("loaded state dict contains a parameter group that doesn't match the size of optimizer's group")
        for group, saved in zip(groups, saved_groups):
            group.update(copy.deepcopy({key: value for key, value in saved.items() if key != "params"}))
            for parameter, position in zip(group["params"], saved["params"]):
                i = self.engine.index.get(id(parameter))
                state = state_dict["state"].get(position, {})
                if i is None or not self.engine.placed(i):
                    if i is not None and state:
                        self.state[parameter] = copy.deepcopy(state)
                    continue
                master = state.get(MASTER)
                if master is not None and (mine := self.engine.slots[i]["piece_master"]) is not None:
                    mine.copy_(piece_of(master, i, self.engine))
                    self.engine.masters_loaded = True
                self._rule.load(i, state)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank."""
        return self._rule.bytes()


Joinable.register(ShardedOptimizer)


def _is_fused(optimizer: Optimizer, engine: Engine) -> bool:
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return False
    members = [p for group in optimizer.param_groups for p in group["params"] if id(p) in engine.index]
    return all(p.dtype not in DOUBLE for p in members)


def before_foreign_step(optimizer: Optimizer, args: tuple, kwargs: "dict[str, Any]") -> None:
    """A global pre-step hook: an optimizer that is not sharded must not step a sharded parameter. The averages of a replicated
    model, FP32 until then, get the dtype of their parameter, which Adam and others of torch's insist on."""
    if isinstance(optimizer, ShardedOptimizer):
        return
    for engine in engines():
        if not engine.sharded and not engine.low:
            continue
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            i = engine.index.get(id(parameter))
            if i is not None and not engine.sharded:
                if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                    parameter.grad = parameter.grad.to(parameter.dtype)
            elif i is not None:
                raise UsageError(
                    f"{type(optimizer).__name__}.step() was called on parameter {engine.names[i]!r} of a sharded model; step "
                    "the optimizer that shardstep.wrap() returned, or make this one a "
                    "shardstep.ShardedOptimizer(optimizer, model)"
                )
