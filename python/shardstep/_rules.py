"""How an update is made: ``SGD``, ``Adam`` and ``AdamW`` by fused kernels (``FusedRule``), every other elementwise optimizer by
torch itself on flat pieces (``TorchRule``), and those that need whole parameters on these (``WholeRule``)."""

import array
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardstep._engine import HELD, Engine, indices
from shardstep._errors import UsageError
from shardstep._flat_shard import Cut, FlatShard
from shardstep._plan import ELEMENTWISE, WHOLE, check_whole

if TYPE_CHECKING:
    from shardstep._optim import ShardedOptimizer

ADAM, SGD = range(2)
STATE_NAMES = (("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ("momentum_buffer",))
#: State of torch's optimizers that is one number per parameter, whatever the parameter's shape.
SCALAR_STATE = ("step", "mu_product", "eta", "mu")
MASTER = "master_param"


class FusedRule:
    """The C kernels. State lives in one flat tensor per bucket and kind; ``optimizer.state`` shows views of it, made when
    they are looked at."""

    def __init__(self, owner: "ShardedOptimizer"):
        self.owner = owner
        self.engine = owner.engine
        self.kind = SGD if type(owner.wrapped) is torch.optim.SGD else ADAM
        #: Updates made so far; for SGD of those with momentum, so that 0 is a buffer that the next one will fill.
        self.steps = torch.zeros(len(self.engine.params), dtype=torch.float32, device=self.engine.where)
        self.flat: dict[str, dict[int, torch.Tensor]] = {name: {} for name in STATE_NAMES[self.kind]}
        self.groups = array.array("i", [-1]) * len(self.engine.params)
        self._made: list[tuple[str, ...]] = []  # by group: the kinds of state that its members have
        self._addresses: list[array.array] | None = None  # by kind, of each bucket's flat tensor; None: out of date
        self._unset: set[int] = set()  # momentum buffers that `state` shows as None

    def add(self, i: int, group_index: int, warm: "dict[str, Any]") -> None:
        self.groups[i] = group_index
        self._addresses = None
        if self._names(self.owner.param_groups[group_index]) or warm:
            self.owner.entries.announce(self.engine.params[i])
        if warm:
            self.load(i, warm)

    def _names(self, group: "dict[str, Any]") -> "tuple[str, ...]":
        names = STATE_NAMES[self.kind]
        if self.kind == SGD:
            return names if group["momentum"] != 0 else ()
        return names if group["amsgrad"] else names[:2]

    def _flat(self, name: str, bucket: int) -> torch.Tensor:
        flat = self.flat[name].get(bucket)
        if flat is None:
            segment = self.engine.core.buckets()[bucket]["segment"]
            flat = self.flat[name][bucket] = torch.zeros(segment, dtype=torch.float32, device=self.engine.where)
            self._addresses = None
        return flat

    def _view(self, name: str, i: int) -> torch.Tensor:
        bucket, _, in_segment, numel = self.engine.slots.piece(i)
        return self._flat(name, bucket).narrow(0, in_segment, numel)

    def entry(self, parameter: torch.Tensor) -> "dict[str, Any]":
        """What ``optimizer.state`` shows of a parameter."""
        i = self.engine.index[id(parameter)]
        bucket, group = self.engine.slots.piece(i)[0], self.groups[i]
        if group >= 0:
            names = self._names(self.owner.param_groups[group])
        else:  # no member any more, but its state is kept, as in torch
            names = tuple(name for name in STATE_NAMES[self.kind] if bucket in self.flat[name])
        if self.kind == ADAM:
            return {"step": self.steps[i], **{name: self._view(name, i) for name in names}}
        if self.steps[i] > 0:
            return {"momentum_buffer": self._view("momentum_buffer", i)}
        self._unset.add(i)
        return dict.fromkeys(names)

    def prepare(self) -> None:
        """Makes the state that members which are new, and options switched on since (momentum, amsgrad), need."""
        groups = self.owner.param_groups
        wanted = [self._names(group) for group in groups]
        buckets = range(self.engine.n_buckets)  # another optimizer's members may have brought new ones
        if wanted == self._made and self._addresses is not None and all(len(a) == len(buckets) for a in self._addresses):
            return
        for bucket, shape in enumerate(self.engine.core.buckets()):
            for index in {self.groups[i] for i in shape["members"]} - {-1}:
                for name in wanted[index]:
                    if bucket not in self.flat[name]:
                        self.flat[name][bucket] = torch.zeros(
                            shape["segment"], dtype=torch.float32, device=self.engine.where
                        )
        for index, names in enumerate(self._made[: len(wanted)]):
            if names != wanted[index]:
                for parameter in groups[index]["params"]:
                    i = self.engine.index.get(id(parameter), -1)
                    if i >= 0 and self.groups[i] == index:
                        self.owner.entries.announce(parameter)
        self._made = wanted
        self._addresses = [
            array.array("q", [flat[b].data_ptr() if b in flat else 0 for b in buckets]) for flat in self.flat.values()
        ]

    def _options(self, group: "dict[str, Any]") -> tuple:
        lr, decay, maximize = float(group["lr"]), float(group["weight_decay"]), group["maximize"]
        if self.kind == SGD:
            return (lr, 0, 0, 0, decay, float(group["momentum"]), float(group["dampening"]), False, False,
                    group["nesterov"], maximize)
        beta1, beta2 = map(float, group["betas"])
        decoupled = type(self.owner.wrapped) is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
        return (lr, beta1, beta2, float(group["eps"]), decay, 0, 0, decoupled, group["amsgrad"], False, maximize)

    def step(self) -> None:
        self.prepare()
        options = [self._options(group) for group in self.owner.param_groups]
        self.engine.core.update(self.kind, self.groups, options, self.steps.data_ptr(), self._addresses)
        for i in [i for i in self._unset if self.steps[i] > 0]:
            self.owner.entries.announce(self.engine.params[i])
            self._unset.discard(i)

    def forget_groups(self) -> None:
        """Nothing is a member until it is added again."""
        self.groups = array.array("i", [-1]) * len(self.engine.params)
        self._addresses = None

    def load(self, i: int, saved: "dict[str, Any]") -> None:
        parameter = self.engine.params[i]
        bucket = self.engine.slots.piece(i)[0]
        pieces = {name: piece_of(saved[name], i, self.engine) for name in STATE_NAMES[self.kind] if saved.get(name) is not None}
        in_place = [name for name, piece in pieces.items() if piece.data_ptr() == self._view(name, i).data_ptr()]
        # Copies of the others, because what is loaded may be views of what is overwritten.
        others = {name: piece.clone() for name, piece in pieces.items() if name not in in_place}
        for name in STATE_NAMES[self.kind]:
            if name in others:
                self._view(name, i).copy_(others[name])
            elif name not in pieces and bucket in self.flat[name]:
                self._view(name, i).zero_()
        if self.kind == ADAM:
            self.steps[i] = float(saved.get("step", 0.0))
        else:
            self.steps[i] = 1.0 if saved.get("momentum_buffer") is not None else 0.0
        if parameter in self.owner.entries or saved:
            self.owner.entries.announce(parameter)

    def reset(self, i: int, group_index: int) -> None:
        """State as before the first step."""
        self.load(i, {})
        self.add(i, group_index, {})

    def to_save(self, i: int) -> "dict[str, Any]":
        """A momentum buffer that the first step will fill is there to be loaded into, as a loaded one."""
        state = self.owner.entries[self.engine.params[i]]
        return {name: self._view(name, i) if value is None else value for name, value in state.items()}

    def bytes(self) -> int:
        return sum(t.nbytes for flat in self.flat.values() for t in flat.values())


class TorchRule:
    """The wrapped optimizer's own ``step`` on flat pieces of the FP32 masters. A piece may be empty: it is stepped like the
    others, so that ranks have the same state under the same names."""

    def __init__(self, owner: "ShardedOptimizer"):
        self.owner = owner
        self.engine = owner.engine
        self.optimizer = owner.wrapped
        self.optimizer.state.clear()
        self.shards: dict[int, nn.Parameter] = {}  # what is stepped here

    def add(self, i: int, group_index: int, warm: "dict[str, Any]") -> None:
        if i in self.shards:  # in another group now
            return
        slot = self.engine.slots[i]
        piece = slot["piece_master"] if slot["piece_master"] is not None else slot["piece_param"]
        self.shards[i] = nn.Parameter(self._shaped(i, piece))
        self._fill(self.shards[i], i, group_index)
        if warm:
            self.load(i, warm)

    def _shaped(self, i: int, piece: torch.Tensor) -> torch.Tensor:
        """This rank's part of something flat as the optimizer is to see it."""
        return piece

    def _fill(self, shard: nn.Parameter, i: int, group_index: int) -> None:
        """Makes the state that torch makes in its first step, so that there is something to load into before it."""
        if type(self.optimizer) not in ELEMENTWISE + WHOLE:
            return
        shard.grad = shard.new_zeros(()).expand_as(shard)
        lists = len(inspect.signature(self.optimizer._init_group).parameters) - 1
        group = self.owner.param_groups[group_index]
        self.optimizer._init_group({**group, "params": [shard]}, *([] for _ in range(lists)))
        shard.grad = None
        if shard in self.optimizer.state:
            self.owner.entries.announce(self.engine.params[i])

    def forget_groups(self) -> None:
        """Nothing: each step looks at the groups."""

    def reset(self, i: int, group_index: int) -> None:
        """State as before the first step."""
        self.optimizer.state.pop(self.shards[i], None)
        self._fill(self.shards[i], i, group_index)

    def prepare(self) -> None:
        """Nothing: state is made as members come."""

    def entry(self, parameter: torch.Tensor) -> "dict[str, Any]":
        return self.optimizer.state[self.shards[self.engine.index[id(parameter)]]]

    def to_save(self, i: int) -> "dict[str, Any]":
        return self.optimizer.state.get(self.shards[i], {})

    def load(self, i: int, saved: "dict[str, Any]") -> None:
        shard, parameter = self.shards[i], self.engine.params[i]
        before = self.optimizer.state.get(shard, {})

        def part(key: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if key in SCALAR_STATE or (value.dim() == 0 and parameter.dim() > 0):
                return value.clone()
            mine, held = self._part(value, i), before.get(key)
            if isinstance(held, torch.Tensor) and (held.data_ptr(), held.dtype) == (mine.data_ptr(), mine.dtype):
                return held  # loaded in place
            return mine.to(shard.dtype if mine.is_floating_point() else mine.dtype, copy=True)

        self.optimizer.state[shard] = {key: part(key, value) for key, value in saved.items() if key != MASTER}
        self.owner.entries.announce(parameter)

    def _part(self, value: torch.Tensor, i: int) -> torch.Tensor:
        return piece_of(value, i, self.engine)

    def step(self) -> None:
        core = self.engine.core
        stepped = [i for i in self.owner.placed() if core.gradient(i) == HELD]
        core.adopt(indices(stepped))
        for i in stepped:
            core.materialise(i)  # also where this rank owns nothing: ranks agree on what is pending
            if i in self.shards:
                self.shards[i].grad = self._shaped(i, self.engine.slots[i]["piece_grad"])
        outer, mine = self.owner.param_groups, self.optimizer.param_groups
        index = self.engine.index
        inner = [
            {**group, "params": [self.shards[i] for p in group["params"] if (i := index.get(id(p), -1)) in self.shards]}
            for group in outer
        ]
        self.optimizer.param_groups = inner
        try:
            _unhooked_step(self.optimizer)
        finally:
            self.optimizer.param_groups = mine
            for shard in self.shards.values():
                shard.grad = None
        for before, after in zip(outer, inner):
            before.update({key: value for key, value in after.items() if key != "params"})
        for i in stepped:
            self._stepped(i)
        core.publish(indices(stepped))

    def _stepped(self, i: int) -> None:
        if self.shards[i] in self.optimizer.state and self.engine.params[i] not in self.owner.entries:
            self.owner.entries.announce(self.engine.params[i])

    def bytes(self) -> int:
        return sum(
            value.nbytes
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )


class WholeRule(TorchRule):
    """As TorchRule for parameters that are placed whole: each is stepped, in its own shape, by the rank that owns it. The
    others show the same state without elements."""

    def __init__(self, owner: "ShardedOptimizer"):
        super().__init__(owner)
        self._elsewhere: dict[int, dict[str, Any]] = {}  # state of what another rank owns; its tensors are on meta

    def _owns(self, i: int) -> bool:
        return self.engine.slots[i]["numel"] == self.engine.params[i].numel()

    def add(self, i: int, group_index: int, warm: "dict[str, Any]") -> None:
        if i in self._elsewhere:  # in another group now
            return
        check_whole(self.engine, self.optimizer, i)
        if self._owns(i):
            super().add(i, group_index, warm)
            return
        self._fill_elsewhere(i, group_index)
        if warm:
            self.load(i, warm)

    def _fill_elsewhere(self, i: int, group_index: int) -> None:
        parameter = self.engine.params[i]
        stand_in = nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32, device="meta"))
        self._fill(stand_in, i, group_index)
        self._elsewhere[i] = self.optimizer.state.pop(stand_in, {})

    def reset(self, i: int, group_index: int) -> None:
        if i in self.shards:
            super().reset(i, group_index)
        else:
            self._fill_elsewhere(i, group_index)

    def _shaped(self, i: int, piece: torch.Tensor) -> torch.Tensor:
        return self.engine.cut(i).whole(piece)

    def entry(self, parameter: torch.Tensor) -> "dict[str, Any]":
        i = self.engine.index[id(parameter)]
        if i in self.shards:
            return super().entry(parameter)
        return {
            key: torch.empty(0, dtype=value.dtype) if _is_meta(value) else value for key, value in self._elsewhere[i].items()
        }

    def to_save(self, i: int) -> "dict[str, Any]":
        state = super().to_save(i) if i in self.shards else self._elsewhere[i]
        cut = self.engine.cut(i)

        def part(key: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or key in SCALAR_STATE or (value.dim() == 0 and len(cut.shape) > 0):
                return value
            alike = value.shape == cut.shape
            held = Cut(value.shape, 0, 0 if value.is_meta else value.numel(), cut.order if alike else None, cut.group)
            flat = torch.empty(0, dtype=value.dtype) if value.is_meta else held.of(value)
            return flat if alike else FlatShard(flat, held)  # what is like the parameter is cut like it

        return {key: part(key, value) for key, value in state.items()}

    def load(self, i: int, saved: "dict[str, Any]") -> None:
        if i in self.shards:
            super().load(i, saved)
            return
        self._elsewhere[i] = {key: self._outline(i, key, value) for key, value in saved.items() if key != MASTER}
        self.owner.entries.announce(self.engine.params[i])

    def _outline(self, i: int, key: str, value: Any) -> Any:
        """What ranks know of state that another one owns: single numbers, and of other tensors all but the elements."""
        if not isinstance(value, torch.Tensor):
            return value
        if key in SCALAR_STATE or (value.dim() == 0 and self.engine.params[i].dim() > 0):
            return value.detach().clone()
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    def step(self) -> None:
        super().step()
        if type(self.optimizer) not in WHOLE:
            self._tell()

    def _tell(self) -> None:
        """What state a class makes that is not torch's only the owners see. Collective."""
        mine = {
            i: {key: self._outline(i, key, value) for key, value in self.optimizer.state[shard].items()}
            for i, shard in self.shards.items()
            if shard in self.optimizer.state
        }
        for told in self.engine.group.gather(mine):
            for i in told.keys() - self.shards.keys():
                self._elsewhere[i] = told[i]
                self.owner.entries.announce(self.engine.params[i])

    def _part(self, value: torch.Tensor, i: int) -> torch.Tensor:
        if not isinstance(value, FlatShard):
            return value.detach()
        if value.cut.numel != value.numel():
            raise UsageError(
                f"optimizer state of parameter {self.engine.names[i]!r} is {value!r}, cut for other ranks; this rank holds all "
                "of it. Across world sizes save and load with shardstep.checkpoint or torch.distributed.checkpoint"
            )
        return value.cut.whole(value.local)

    def _stepped(self, i: int) -> None:
        if i in self.shards:
            super()._stepped(i)
            return
        if type(self.optimizer) in WHOLE and self._elsewhere[i]:
            if "step" in self._elsewhere[i]:
                self._elsewhere[i]["step"] += 1
            self.owner.entries.announce(self.engine.params[i])


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _unhooked_step(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's own step without the hooks, its own and the global ones, that run round ours already."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


def piece_of(value: torch.Tensor, i: int, engine: Engine) -> torch.Tensor:
    """This rank's piece, flat and real, of a state tensor of parameter i that is whole or that :class:`FlatShard` of it."""
    cut, is_complex = engine.cut(i), engine.params[i].is_complex()
    if isinstance(value, FlatShard):
        if value.cut != cut:
            raise UsageError(
                f"optimizer state of parameter {engine.names[i]!r} is {value!r}, cut for other ranks; this rank holds "
                f"[{cut.begin}, {cut.begin + cut.numel}). Across world sizes save and load with shardstep.checkpoint or "
                "torch.distributed.checkpoint"
            )
        return _real(value.local)
    if value.dim() == 1 and value.numel() == engine.slots.piece(i)[3]:
        if value.shape != cut.shape or (is_complex and not value.is_complex()):
            return value  # this rank's piece, as optimizer.state shows it
    if value.shape != cut.shape:
        raise UsageError(
            f"optimizer state of parameter {engine.names[i]!r} has shape {tuple(value.shape)}; expected the parameter's shape "
            f"{tuple(cut.shape)}"
        )
    return _real(cut.of(value))


def _real(flat: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(flat.resolve_conj()).view(-1) if flat.is_complex() else flat
