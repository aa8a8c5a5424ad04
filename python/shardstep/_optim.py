"""The sharded optimizer: a torch optimizer whose update each rank makes for its own pieces only.

``SGD``, ``Adam`` and ``AdamW`` are updated by fused kernels (``FusedRule``), every other elementwise optimizer by torch
itself on flat pieces (``TorchRule``).
"""

import array
import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardstep._engine import AT_STEP, HELD, LOW, Engine, collector_paused, indices, owner_of
from shardstep._errors import UsageError
from shardstep._flat_shard import FlatShard
from shardstep._full_state import extend_torch

ADAM, SGD = range(2)
STATE_NAMES = (("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ("momentum_buffer",))

#: torch.optim classes whose update of an element depends on that element alone.
ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adam", "AdamW", "SGD")
)
REFUSED = {
    "LBFGS": "its line search needs all parameters and evaluates the loss a different number of times on each rank",
    "Muon": "its update orthogonalises whole matrices, and a rank holds only a piece of them",
    "Adafactor": "its second moment is factored over whole rows and columns, and a rank holds only a piece of a matrix",
    "SparseAdam": "it needs sparse gradients, and gradients are densified into flat buckets",
}
#: State of torch's optimizers that is one number per parameter, whatever the parameter's shape.
SCALAR_STATE = ("step", "mu_product", "eta", "mu")
MASTER = "master_param"


class FusedRule:
    """The C kernels. State lives in one flat tensor per bucket and kind; ``optimizer.state`` shows views of it."""

    def __init__(self, owner: "ShardedOptimizer"):
        self.owner = owner
        self.engine = owner.engine
        self.kind = SGD if type(owner.wrapped) is torch.optim.SGD else ADAM
        self.steps = torch.zeros(len(self.engine.params), dtype=torch.float32)
        self.flat: dict[str, dict[int, torch.Tensor]] = {}
        self.groups = array.array("i", [-1]) * len(self.engine.params)
        self._unset: set[int] = set()  # SGD: momentum buffers that the first step will fill
        self._made: dict[int, tuple[str, ...]] = {}  # per group: the kinds of state that its members have
        self._addresses: list[array.array] | None = None

    def add(self, i: int, group_index: int, warm: "dict[str, Any]") -> None:
        group = self.owner.param_groups[group_index]
        self.groups[i] = group_index
        self._addresses = None
        parameter = self.engine.params[i]
        state = self.owner.state[parameter]
        for name in self._names(group):
            view = self._view(name, i)
            value = warm.get(name)
            if value is not None:
                view.copy_(piece_of(value, i, self.engine))
            state[name] = view
        if self.kind == ADAM:
            state["step"] = self.steps[i]
            if "step" in warm:
                self.steps[i] = float(warm["step"])
        elif group["momentum"] != 0:
            if warm.get("momentum_buffer") is None:
                state["momentum_buffer"] = None
                self._unset.add(i)
            else:
                self.steps[i] = 1.0

    def _names(self, group: "dict[str, Any]") -> "tuple[str, ...]":
        names = STATE_NAMES[self.kind]
        if self.kind == SGD:
            return names if group["momentum"] != 0 else ()
        return names if group["amsgrad"] else names[:2]

    def _view(self, name: str, i: int) -> torch.Tensor:
        slot = self.engine.slots[i]
        bucket = slot["bucket"]
        flat = self.flat.setdefault(name, {})
        if bucket not in flat:
            flat[bucket] = torch.zeros(slot["segment"], dtype=torch.float32)
            self._addresses = None
        return flat[bucket].narrow(0, slot["in_segment"], slot["numel"])

    def _addresses_of(self, name: str) -> array.array:
        flat = self.flat.get(name, {})
        return array.array("q", [flat[b].data_ptr() if b in flat else 0 for b in range(self.engine.n_buckets)])

    def _options(self, group: "dict[str, Any]") -> tuple:
        lr, decay, maximize = float(group["lr"]), float(group["weight_decay"]), group["maximize"]
        if self.kind == SGD:
            return (lr, 0, 0, 0, decay, float(group["momentum"]), float(group["dampening"]), False, False,
                    group["nesterov"], maximize)
        beta1, beta2 = map(float, group["betas"])
        decoupled = type(self.owner.wrapped) is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
        return (lr, beta1, beta2, float(group["eps"]), decay, 0, 0, decoupled, group["amsgrad"], False, maximize)

    def step(self) -> None:
        core = self.engine.core
        for index, group in enumerate(self.owner.param_groups):
            self._ensure_state(index, group)
        if self._addresses is None:
            self._addresses = [self._addresses_of(name) for name in STATE_NAMES[self.kind]]
        options = [self._options(group) for group in self.owner.param_groups]
        core.update(self.kind, self.groups, options, self.steps.data_ptr(), self._addresses)
        if self._unset:
            for i in [i for i in self._unset if self.steps[i] > 0]:
                self.owner.state[self.engine.params[i]]["momentum_buffer"] = self._view("momentum_buffer", i)
                self._unset.discard(i)

    def _ensure_state(self, index: int, group: "dict[str, Any]") -> None:
        """Makes the state that an option switched on since (momentum, amsgrad) needs."""
        names = self._names(group)
        if self._made.get(index) == names:
            return
        for parameter in group["params"]:
            i = self.engine.index.get(id(parameter))
            if i is not None and self.groups[i] >= 0:
                state = self.owner.state[parameter]
                for name in names:
                    view = self._view(name, i)
                    if name not in state:
                        state[name] = view if self.kind == ADAM else None
                        if self.kind == SGD:  # its next step fills the buffer, undampened, as a first step does
                            self.steps[i] = 0.0
                            self._unset.add(i)
        self._made[index] = names

    def load(self, i: int, saved: "dict[str, Any]") -> None:
        parameter = self.engine.params[i]
        state = self.owner.state[parameter]
        for name in self._names(self.owner.param_groups[self.groups[i]]):
            value = saved.get(name)
            view = self._view(name, i)
            if value is None:
                view.zero_()
            else:
                view.copy_(piece_of(value, i, self.engine))
            state[name] = view
        if self.kind == ADAM:
            self.steps[i] = float(saved.get("step", 0.0))
            state["step"] = self.steps[i]
        elif "momentum_buffer" in state:
            has = saved.get("momentum_buffer") is not None
            self.steps[i] = 1.0 if has else 0.0
            if not has:
                state["momentum_buffer"] = None
                self._unset.add(i)
            else:
                self._unset.discard(i)

    def state_of(self, i: int) -> "dict[str, Any]":
        """A momentum buffer that the first step will fill is there to be loaded into, as a loaded one."""
        state = self.owner.state[self.engine.params[i]]
        return {name: self._view(name, i) if value is None else value for name, value in state.items()}

    def bytes(self) -> int:
        return sum(t.nbytes for flat in self.flat.values() for t in flat.values())


class TorchRule:
    """The wrapped optimizer's own ``step`` on flat pieces of the FP32 masters. A piece may be empty: it is stepped like the
    others, so that ranks have the same state under the same names."""

    def __init__(self, owner: "ShardedOptimizer"):
        self.owner = owner
        self.engine = owner.engine
        self.shards: dict[int, nn.Parameter] = {}
        self.members: list[int] = []
        self.optimizer = owner.wrapped
        self._warm = dict(self.optimizer.state)
        self.optimizer.state.clear()
        # Steps of the wrapped optimizer happen inside ours, which runs the user's hooks.
        self.optimizer._optimizer_step_pre_hooks = type(self.optimizer._optimizer_step_pre_hooks)()
        self.optimizer._optimizer_step_post_hooks = type(self.optimizer._optimizer_step_post_hooks)()

    def add(self, i: int, group_index: int, warm: "dict[str, Any]") -> None:
        self.members.append(i)
        slot = self.engine.slots[i]
        piece = slot["piece_master"] if slot["piece_master"] is not None else slot["piece_param"]
        self.shards[i] = nn.Parameter(piece)
        if warm:
            self.load(i, warm)
        else:
            self._fill(i, self.owner.param_groups[group_index])

    def _fill(self, i: int, group: "dict[str, Any]") -> None:
        """Makes the state that torch makes in its first step, so that there is something to load into before it."""
        if type(self.optimizer) not in ELEMENTWISE:
            return
        shard = self.shards[i]
        shard.grad = shard.new_zeros(()).expand_as(shard)
        lists = len(inspect.signature(self.optimizer._init_group).parameters) - 1
        self.optimizer._init_group({**group, "params": [shard]}, *([] for _ in range(lists)))
        shard.grad = None
        if shard in self.optimizer.state:
            self.owner.state[self.engine.params[i]] = self.optimizer.state[shard]

    def load(self, i: int, saved: "dict[str, Any]") -> None:
        shard = self.shards[i]
        state = {
            key: piece_of(value, i, self.engine).to(shard.dtype if value.is_floating_point() else value.dtype, copy=True)
            if isinstance(value, torch.Tensor) and key not in SCALAR_STATE and value.dim() + self._is_scalar(i) > 0
            else (value.clone() if isinstance(value, torch.Tensor) else value)
            for key, value in saved.items()
            if key != MASTER
        }
        self.optimizer.state[shard] = state
        self.owner.state[self.engine.params[i]] = state

    def _is_scalar(self, i: int) -> bool:
        return self.engine.params[i].dim() == 0

    def step(self) -> None:
        core = self.engine.core
        stepped = [i for i in self.members if core.gradient(i) == HELD]
        core.adopt(indices(stepped))
        for shard in self.shards.values():
            shard.grad = None
        for i in stepped:
            core.materialise(i)
            self.shards[i].grad = self.engine.slots[i]["piece_grad"]
        outer = self.owner.param_groups
        inner = [
            {**group, "params": [self.shards[i] for p in group["params"] if (i := self.engine.index.get(id(p))) in self.shards]}
            for group in outer
        ]
        saved = self.optimizer.param_groups
        self.optimizer.param_groups = inner
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = saved
        for before, after in zip(outer, inner):
            before.update({key: value for key, value in after.items() if key != "params"})
        for i in stepped:
            shard = self.shards[i]
            shard.grad = None
            if shard in self.optimizer.state:
                self.owner.state[self.engine.params[i]] = self.optimizer.state[shard]
        core.publish(indices(stepped))

    def state_of(self, i: int) -> "dict[str, Any]":
        return self.owner.state.get(self.engine.params[i], {})

    def bytes(self) -> int:
        return sum(
            value.nbytes
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )


def piece_of(value: torch.Tensor, i: int, engine: Engine) -> torch.Tensor:
    """This rank's piece, flat, of a state tensor of parameter i that is whole or that :class:`FlatShard` of it."""
    cut = engine.cut(i)
    if isinstance(value, FlatShard):
        if value.cut != cut:
            raise UsageError(
                f"optimizer state of parameter {engine.names[i]!r} is {value!r}, cut for other ranks; this rank holds "
                f"[{cut.begin}, {cut.begin + cut.numel}). Across world sizes save and load with shardstep.checkpoint or "
                "torch.distributed.checkpoint"
            )
        return value.local
    if value.shape != cut.shape:
        raise UsageError(
            f"optimizer state of parameter {engine.names[i]!r} has shape {tuple(value.shape)}; expected the parameter's shape "
            f"{tuple(cut.shape)}"
        )
    return cut.of(value)


class State(defaultdict):
    """Always true: torch's ``get_state_dict`` steps an optimizer whose state is not, to fill it."""

    def __bool__(self) -> bool:
        return True


class ShardedOptimizer(Optimizer):
    """Shards ``optimizer`` over the ranks of the wrapped ``model``.

    Args:
        optimizer: a ``torch.optim.Optimizer`` over parameters of ``model``; its groups, options and warm state are taken
            over. Use the object returned here from then on; schedulers built on either see the same groups.
        model: a module that went through :func:`shardstep.wrap`, or a :class:`shardstep.DistributedDataParallel`, which
            thereby turns from replicated to sharded.
        elementwise: say that an optimizer class of your own updates each element from that element's own values alone.

    ``param_groups`` hold the model's own parameters and ``state`` is keyed by them; state tensors are this rank's flat
    pieces. Raises :class:`shardstep.UsageError` for optimizers that need whole matrices or all parameters.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, *, elementwise: bool = False):
        from shardstep._module import sharded_engine_of

        if isinstance(optimizer, ShardedOptimizer):
            raise UsageError("this optimizer is sharded already")
        _refuse(optimizer, elementwise)
        self.engine = sharded_engine_of(model)
        self.wrapped = optimizer
        self._rule: FusedRule | TorchRule | None = None
        self._members: tuple[array.array, list[torch.Tensor]] | None = None  # placed parameters, and others
        warm = dict(optimizer.state)
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = State(dict)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = hooks
        self._rule = FusedRule(self) if _is_fused(optimizer, self.engine) else TorchRule(self)
        with collector_paused():
            for index, group in enumerate(self.param_groups):
                for parameter in group["params"]:
                    self._take(parameter, index, warm.get(parameter, {}))
        self.engine.add_optimizer(self)

    # -- membership ---------------------------------------------------------------------------------------------------

    def _take(self, parameter: torch.Tensor, group_index: int, warm: "dict[str, Any]") -> None:
        i = self.engine.index.get(id(parameter))
        if i is None:
            if parameter.requires_grad and id(parameter) not in self.engine.ignored:
                raise UsageError(
                    f"param group {group_index} has a parameter of shape {tuple(parameter.shape)} that is not a parameter "
                    "of the wrapped model; give each model its own optimizer"
                )
            return
        if self.engine.slots[i] is not None:
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
                self._rule.add(i, index, self.state.pop(self.engine.params[i], {}))

    def add_param_group(self, param_group: "dict[str, Any]") -> None:
        super().add_param_group(param_group)
        self._members = None
        if self._rule is not None:
            index = len(self.param_groups) - 1
            if self.param_groups is not self.wrapped.param_groups:
                self.wrapped.param_groups.append(self.param_groups[-1])
            for parameter in self.param_groups[-1]["params"]:
                self._take(parameter, index, {})

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
        engine.close(AT_STEP)
        engine.stepping = True
        try:
            self._rule.step()
        finally:
            engine.stepping = False
        engine.core.gather()
        engine.note_step()
        self.wrapped._opt_called = True  # for schedulers that were built on it
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's: gradients become None, or zero. Local; drops what has not been stepped with."""
        self._attached()
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        if self._members is None:
            everyone = [p for group in self.param_groups for p in group["params"]]
            placed = [i for p in everyone if (i := self.engine.index.get(id(p))) is not None and self.engine.slots[i]]
            inside = {id(self.engine.params[i]) for i in placed}
            self._members = indices(placed), [p for p in everyone if id(p) not in inside]
        owned, others = self._members
        self.engine.core.drop(owned)
        for parameter in others:
            parameter.grad = None

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> "dict[str, Any]":
        """torch's format. State tensors are :class:`FlatShard`: this rank's part under the whole tensor's shape, for
        torch.distributed.checkpoint at any world size, and for ``torch.save`` to be loaded at the same one. Parameters of low
        precision carry their FP32 master as ``master_param``."""
        extend_torch()
        saved = super().state_dict()
        everyone = [parameter for group in self.param_groups for parameter in group["params"]]
        for position, parameter in enumerate(everyone):
            i = self.engine.index.get(id(parameter))
            if i is None or self.engine.slots[i] is None:
                continue
            cut = self.engine.cut(i)
            state = {
                key: FlatShard(value, cut) if isinstance(value, torch.Tensor) and value.dim() == 1 else value
                for key, value in self._rule.state_of(i).items()
            }
            if parameter.dtype in LOW:
                state[MASTER] = FlatShard(self.engine.slots[i]["piece_master"], cut)
            if state:
                saved["state"][position] = state
        return saved

    def load_state_dict(self, state_dict: "dict[str, Any]") -> None:
        """Loads what :meth:`state_dict` gave, at the same world size, or a state_dict of the unsharded optimizer. Local."""
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups, saved_groups = self.param_groups, state_dict["param_groups"]
        if len(groups) != len(saved_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        if any(len(g["params"]) != len(s["params"]) for g, s in zip(groups, saved_groups)):
            raise ValueError("loaded state dict contains a parameter group that doesn't match the size of optimizer's group")
        for group, saved in zip(groups, saved_groups):
            group.update(copy.deepcopy({key: value for key, value in saved.items() if key != "params"}))
            for parameter, position in zip(group["params"], saved["params"]):
                i = self.engine.index.get(id(parameter))
                slot = self.engine.slots[i] if i is not None else None
                state = state_dict["state"].get(position, {})
                if slot is None:
                    if i is not None and state:
                        self.state[parameter] = copy.deepcopy(state)
                    continue
                master = state.get(MASTER)
                if master is not None and slot["piece_master"] is not None:
                    slot["piece_master"].copy_(piece_of(master, i, self.engine))
                    self.engine.masters_loaded = True
                self._rule.load(i, state)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank."""
        return self._rule.bytes()


def _refuse(optimizer: Optimizer, elementwise: bool) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r}")
    for refused, reason in REFUSED.items():
        base = getattr(torch.optim, refused, None)
        if base is not None and isinstance(optimizer, base):
            raise UsageError(f"torch.optim.{refused} cannot be sharded: {reason}")
    if type(optimizer) not in ELEMENTWISE and not elementwise:
        raise UsageError(
            f"{type(optimizer).__module__}.{name} is not known to shardstep. If its update of each element depends on that "
            "element's own weight, gradient and state alone, pass elementwise=True; otherwise it cannot be sharded"
        )
    for group in optimizer.param_groups:
        for flag in ("differentiable", "capturable"):
            if group.get(flag):
                raise UsageError(f"{name}({flag}=True) is not supported by a sharded update; leave {flag} False")


def _is_fused(optimizer: Optimizer, engine: Engine) -> bool:
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return False
    members = [p for group in optimizer.param_groups for p in group["params"] if id(p) in engine.index]
    return all(p.dtype != torch.float64 for p in members)


def refuse_unattached(optimizer: Optimizer, args: tuple, kwargs: "dict[str, Any]") -> None:
    """A global pre-step hook: an optimizer that is not sharded must not step a sharded parameter."""
    if isinstance(optimizer, ShardedOptimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            engine = owner_of(parameter)
            if engine is not None and engine.sharded and not engine.stepping:
                raise UsageError(
                    f"{type(optimizer).__name__}.step() was called on parameter {engine.names[engine.index_of(parameter)]!r} "
                    "of a sharded model; step the optimizer that shardstep.wrap() returned, or make this one a "
                    "shardstep.ShardedOptimizer(optimizer, model)"
                )
