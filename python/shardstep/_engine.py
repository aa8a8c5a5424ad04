"""One wrapped model on one rank: its parameters in flat buckets, its gradients, and the calls that close a window.

The work is done in C (``_C.Engine``); this file puts parameters in, hands guarded gradients out, and speaks in names.
"""

import array
import contextlib
import gc
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardstep import _C, _device, _dynamo
from shardstep._buffers import CHUNK, Buffers
from shardstep._edits import Edits, refuse_unknown
from shardstep._errors import MismatchError, UsageError
from shardstep._flat_shard import Cut, FlatShard, memory_order
from shardstep._gradient import HELD, LOCAL, PENDING, ShardedGradient, piece_grad
from shardstep._groups import TRANSPORTS, Group, open_transport, seconds
from shardstep._late import Late
from shardstep._plan import Plan, kinds_of
from shardstep._precision import LOW, Precision, tensors_in
from shardstep._registry import DTYPES, Registry

AT_READ, AT_STEP, AT_ABORT, AT_SYNC, AT_JOINED = range(5)
WANT_NOTHING, WANT_NORM, WANT_FULL = range(3)

DOUBLE = (torch.float64, torch.complex128)
DEFAULT_BUCKET_MB = 25.0
FUNCTIONAL_CALL = torch.nn.utils.stateless._functional_call.__code__
NO_PLAN = Plan()
ALIGN = 16  # elements: parameters begin at multiples of it in their bucket (csrc/core/layout.h)

#: All engines: a parameter can be in one wrap only, and optimizers are checked against it.
ENGINES: "weakref.WeakSet[Engine]" = weakref.WeakSet()


@contextlib.contextmanager
def collector_paused() -> "Iterator[None]":
    """Many small objects that all stay are made at once: the cyclic collector would look through them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def engines() -> "list[Engine]":
    """All that are in use. Each keeps its parameters alive, so that ``id(parameter) in engine.index`` tells whose it is."""
    return [engine for engine in ENGINES if not engine.closed]


def indices(values: Iterable[int]) -> array.array:
    return array.array("i", values)


class Slots:
    """By parameter: where it lives, and what of it is this rank's, as ``_C.Engine.slot`` says; None for one that is in no
    bucket, as frozen ones are. Made when first asked for: most never are."""

    def __init__(self, core: _C.Engine, count: int):
        self._core: _C.Engine | None = core
        self._made: list[dict[str, Any] | None] = [None] * count

    def __getitem__(self, i: int) -> "dict[str, Any] | None":
        made = self._made[i]
        if made is None and self._core is not None:
            made = self._made[i] = self._core.slot(i)
        return made

    def __iter__(self) -> "Iterator[dict[str, Any] | None]":
        return (self[i] for i in range(len(self._made)))

    def piece(self, i: int) -> "tuple[int, int, int, int] | None":
        """(bucket, begin, in_segment, numel), or None."""
        slot = self._made[i]
        if slot is None:
            return self._core.piece(i) if self._core is not None else None
        return slot["bucket"], slot["begin"], slot["in_segment"], slot["numel"]

    def outlive(self) -> None:
        """Makes them all: the extension's engine is about to end."""
        for _ in self:
            pass
        self._core = None


class Engine:
    """See the module's docstring. All arguments are those of :func:`shardstep.wrap`."""

    skipped_steps = Late(int)

    @collector_paused()
    def __init__(
        self,
        module: nn.Module,
        *,
        sharded: bool,
        process_group: "dist.ProcessGroup | None" = None,
        transport: str = "auto",
        param_dtype: "torch.dtype | None" = None,
        mp_policy: Any = None,
        bucket_cap_mb: "float | None" = None,
        accumulate: int = 1,
        timeout: "float | timedelta" = 600.0,
        init_sync: bool = True,
        ignored_params: "Iterable[torch.Tensor] | None" = None,
        debug: bool = False,
        broadcast_buffers: bool = True,
        init_buffers: "bool | None" = None,
        ignored_buffers: "Collection[str]" = (),
        bucket_caps_mb: "Sequence[float]" = (),
        plan: Plan = NO_PLAN,
        place_all: bool = True,
    ):
        """``plan``: the optimizers to come. Without ``place_all`` parameters that none of them has are not placed until an
        optimizer of theirs comes, or until the first close."""
        self.closed = True
        self.pid = os.getpid()
        self.edits = Edits()
        self.uneven: Any = None  # inside join(), see _join.py
        self._comm_hook: Any = None  # replicated: what makes the averages, see _comm_hooks.py
        self.masters_loaded = False  # by an optimizer's load_state_dict, since the last step
        self.sharded = sharded
        self.debug = debug
        self.precision = Precision()
        self.group = Group(process_group)
        self.buffers = Buffers(module, self.group, broadcast_buffers, ignored_buffers)
        self._init_buffers = broadcast_buffers if init_buffers is None else init_buffers
        try:
            ignored_params = list(ignored_params or ())
        except TypeError:
            raise UsageError(f"ignored_params must be parameters of the model, not {ignored_params!r}") from None
        self.settings = dict(
            process_group=process_group, transport=transport, param_dtype=param_dtype, mp_policy=mp_policy,
            bucket_cap_mb=bucket_cap_mb, accumulate=accumulate, timeout=timeout, ignored_params=ignored_params, debug=debug,
            broadcast_buffers=broadcast_buffers, init_buffers=init_buffers, ignored_buffers=ignored_buffers,
            bucket_caps_mb=bucket_caps_mb,
        )
        def describe() -> "list[tuple[str, Any]]":
            self._bucket_bytes = self._check_sizes(bucket_cap_mb, bucket_caps_mb)
            self.timeout = seconds(timeout)
            self._check_options()
            self.registry = Registry(module, ignored_params, [engine.index for engine in engines()])
            self.names, self.params, self.index = self.registry.names, self.registry.params, self.registry.index
            self._find_device(transport)
            return self._describe() + plan.describe(self)

        self.group.agree(describe, "models, optimizers or settings")
        if init_sync:
            self.broadcast_parameters()
            if self._init_buffers:
                self.buffers.broadcast()
        self.core = _C.Engine(
            params=self.params,
            names=self.names,
            param_dtypes=bytes(DTYPES[self._stored_dtype(p)] for p in self.params),
            grad_dtypes=bytes(DTYPES[_grad_dtype(p)] for p in self.params),
            transport=open_transport(transport, self.group, self.timeout, self.device),
            bucket_bytes=self._bucket_bytes,
            sharded=sharded,
            accumulate=accumulate,
            device=self.device.capsule if self.device is not None else None,
        )
        self._release_group = weakref.finalize(self, self.group.release)
        self._release_group.atexit = False
        self.closed = False
        self.n_buckets = 0
        self.slots = Slots(self.core, len(self.params))
        self._unplaced = list(range(len(self.params)))
        self.joining: dict[int, Any] = {}  # parameters unfrozen since, not placed yet: handles of the hooks that guard them
        self._unchecked = True
        self._begun_at = -1  # replicated: closes, when the last window began
        self._optimizers: list[weakref.ref] = []
        self.skipped_steps = 0  # by skip_nonfinite
        self._last_totals: dict[str, Any] = {}
        self._last_step: dict[str, Any] = {}
        ENGINES.add(self)
        claimed = {id(p) for optimizer in plan.optimizers for group in optimizer.param_groups for p in group["params"]}
        self._place(
            [i for i, p in enumerate(self.params) if p.requires_grad and (place_all or id(p) in claimed)], plan.users()
        )
        for i in self._unplaced:
            self.params[i].data = self.params[i].data.to(self._stored_dtype(self.params[i]))
        #: Has it parameters whose gradients are of another dtype?
        self.low = any(parameter.dtype in LOW for parameter in self.params)
        if any(parameter.dtype == torch.float64 for parameter in self.params):
            self.precision = self.precision.keeping_double()
        _dynamo.skip_this_package()
        self._last_totals = self.core.stats()

    # -- parameters ---------------------------------------------------------------------------------------------------

    def _check_sizes(self, mb: "float | None", list_of_mb: "Sequence[float]") -> int:
        """Bytes of a bucket."""
        self._bucket_mb = _positive("bucket_cap_mb", DEFAULT_BUCKET_MB if mb is None else mb)
        self._bucket_caps = [int(_positive("bucket_cap_mb_list", mb) * 2**20) for mb in list_of_mb]
        return max(self._bucket_caps, default=int(self._bucket_mb * 2**20))

    def _check_options(self) -> None:
        transport, accumulate = self.settings["transport"], self.settings["accumulate"]
        if transport not in TRANSPORTS:
            raise UsageError(f"transport={transport!r}: choose one of {', '.join(TRANSPORTS)}")
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise UsageError(f"accumulate must be an integer of at least 1, not {accumulate!r}")
        self.precision = Precision.of(self.settings["param_dtype"], self.settings["mp_policy"])
        if not all(isinstance(p, torch.Tensor) for p in self.settings["ignored_params"]):
            raise UsageError("ignored_params must be parameters of the model")

    def _find_device(self, transport: str) -> None:
        self.device = _device.device_of(self.names, self.params)
        self.where = self.params[0].device if self.params else torch.device("cpu")
        if transport == "nccl" and self.device is None:
            raise UsageError(
                "transport='nccl' moves tensors between GPUs, and this model is on the CPU; move the model to a GPU first, or "
                "use transport='auto' ('shm' and 'c10d' are for the CPU)"
            )
        if transport in ("shm", "c10d") and self.device is not None:
            raise UsageError(f"transport={transport!r} is for models on the CPU; for one on a GPU use 'nccl' or 'auto'")

    def _describe(self) -> "list[tuple[str, Any]]":
        items: list[tuple[str, Any]] = [
            (name, ("shape", tuple(p.shape), p.dtype, "strides", p.stride(), "requires_grad", p.requires_grad))
            for name, p in zip(self.names, self.params)
        ]
        if self._init_buffers:
            items += [(name, ("buffer of shape", tuple(b.shape), b.dtype)) for name, b in self.buffers.named()]
        settings = (self.sharded, str(self.precision), self._bucket_mb, self.settings["accumulate"], self.settings["transport"],
                    self.buffers.follow, self._bucket_caps)
        items.append(("(sharded, precision, bucket_cap_mb, accumulate, transport, broadcast_buffers, bucket_cap_mb_list)",
                      str(settings)))
        items.append(("torch and shardstep versions", f"{torch.__version__}, {_C.torch_version}"))
        return items

    def _stored_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        if self.precision.param_dtype is None or parameter.dtype == torch.float64 or parameter.is_complex():
            return parameter.dtype
        return self.precision.param_dtype

    def _place(self, wanted: "list[int]", users: "list[tuple[Any, bool]]") -> None:
        """Moves parameters into the flat buckets and hooks their gradients; ``users`` are the optimizers, and whether they need
        parameters whole. Collective."""
        if not wanted:
            return
        reference = weakref.ref(self)
        guard = (lambda slot, i: ShardedGradient.over(slot, reference, i)) if self.sharded else None
        for part in self._by_bucket(wanted) if self._bucket_caps else [wanted]:
            self.core.place(indices(part), kinds_of([self.params[i] for i in part], users), guard)
        self.n_buckets = len(self.core.buckets())
        for i in wanted:
            if i in self.joining:
                self.joining.pop(i).remove()
        self._unplaced = [i for i in self._unplaced if not self.placed(i)]

    def users(self) -> "list[tuple[Any, bool]]":
        return [(optimizer, optimizer.whole) for optimizer in self.optimizers()]

    def place_for(self, optimizer: Any, whole: bool) -> None:
        """Places what an optimizer that comes now has, and no other had before. Collective."""
        its = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        self._place([i for i in self._unplaced if id(self.params[i]) in its], [(optimizer, whole)])

    def _by_bucket(self, wanted: "list[int]") -> "list[list[int]]":
        """``bucket_cap_mb_list``: bucket k of each dtype takes gradients of up to the k-th size, later ones of the last."""
        parts: list[list[int]] = []
        filling: dict[torch.dtype, tuple[list[int], int, int]] = {}  # the open bucket, its number, bytes left in it
        for i in reversed(wanted):
            parameter = self.params[i]
            size = -(-parameter.numel() // ALIGN) * ALIGN * _grad_dtype(parameter).itemsize << parameter.is_complex()
            part, number, left = filling.get(parameter.dtype, ([], -1, 0))
            if size > left:
                number = min(number + 1, len(self._bucket_caps) - 1)
                part, left = [], self._bucket_caps[number]
                parts.append(part)
            part.append(i)
            filling[parameter.dtype] = part, number, left - size
        return [part[::-1] for part in parts]

    def broadcast_parameters(self, source: int = 0) -> None:
        """Rank ``source``'s parameters become everyone's, in coalesced chunks. Collective."""
        tensors = [p for p in self.registry.module().parameters() if id(p) not in self.registry.ignored and p.numel() > 0]
        if tensors and self.group.world > 1:
            with torch.no_grad():
                dist._broadcast_coalesced(self.group.process_group, tensors, CHUNK, source)

    def check(self) -> None:
        """Raises when a parameter was replaced, added or cast since the wrap. One whose ``.data`` was set to another tensor of
        its dtype and shape is brought back into its bucket with the new values."""
        self.registry.check()
        i = self.core.moved(self.sharded)
        if i >= 0:
            parameter = self.params[i]
            raise UsageError(
                f"parameter {self.names[i]!r} was cast or moved after wrapping (it is {parameter.dtype} on "
                f"{parameter.device} now) and has left its bucket; cast and move the model before wrapping it"
            )

    def check_apply(self, function: Any) -> None:
        """Raises when ``module._apply(function)``, as ``.to()`` and ``.double()`` call it, would cast or move parameters."""
        for i, parameter in enumerate(self.params):
            if not self.placed(i):
                continue
            probe = parameter.detach().flatten()[:0].clone()
            after = function(probe)
            if after.dtype != probe.dtype or after.device != probe.device:
                raise UsageError(
                    f"the model is wrapped: it cannot be cast or moved from {probe.dtype} on {probe.device} to "
                    f"{after.dtype} on {after.device}; do that before wrapping (or pass param_dtype to wrap)"
                )
            return

    def placed(self, i: int) -> bool:
        """Is parameter i in a bucket? Not so while it is frozen."""
        return self.slots.piece(i) is not None

    def cut(self, i: int) -> Cut:
        """What this rank owns of parameter i, which is in the layout."""
        slot, parameter = self.slots[i], self.params[i].detach()
        numbers = 2 if parameter.is_complex() else 1  # for each element; no segment ends between the two
        begin, numel = slot["begin"] // numbers, slot["numel"] // numbers
        return Cut(parameter.shape, begin, numel, memory_order(parameter), self.group.process_group)

    def shard(self, i: int, piece: torch.Tensor) -> FlatShard:
        """This rank's piece of a tensor of parameter i's shape, flat and real as updates have it, under that shape."""
        if self.params[i].is_complex():
            piece = torch.view_as_complex(piece.view(piece.numel() // 2, 2))
        return FlatShard(piece, self.cut(i))

    def follow_weights(self) -> None:
        """The model's state was loaded: masters become the loaded weights. Masters that an optimizer has loaded since the last
        step belong to the same state, and say more; only where the weights are others do they change."""
        self.check()
        if self.masters_loaded:
            self.core.adopt(indices(i for i in range(len(self.params)) if self.placed(i)))
        else:
            self.core.reset_masters()

    def index_of(self, parameter: torch.Tensor) -> int:
        i = self.index.get(id(parameter))
        if i is None:
            raise UsageError("this tensor is not a parameter of the wrapped model")
        return i

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, call: "Callable[..., Any]", args: tuple, kwargs: "dict[str, Any]") -> Any:
        """``call(*args, **kwargs)`` as the root's forward: with inputs and outputs in the dtypes that were asked for, and with
        its backward watched."""
        if not self.sharded and torch.is_grad_enabled():
            self._begin_replicated()
        if self._unchecked and not self._called_functionally():
            self.check()
            self._unchecked = False
        if self._unplaced and torch.is_grad_enabled():
            if self.sharded:
                self._guard_unfrozen()
            else:  # every gradient is whole at the end of the backward, so there is no later time to join the layout
                self._place([i for i in self._unplaced if self.params[i].requires_grad], [])
        if self.low:
            _dynamo.hide_gradients_from_compilation()
        running = _dynamo.running()
        running.append(self)
        try:
            output = call(*self.precision.cast_inputs(args), **self.precision.cast_inputs(kwargs))
        finally:
            running.pop()
        output = self.precision.cast_output(output)
        if torch.is_grad_enabled():
            self._watch(output)
        return output

    def _called_functionally(self) -> bool:
        """Has ``torch.func.functional_call`` put tensors in the place of parameters, for this forward only?"""
        if self.registry.unchanged():
            return False
        frame = sys._getframe()
        while frame is not None and frame.f_code is not FUNCTIONAL_CALL:
            frame = frame.f_back
        return frame is not None

    def _guard_unfrozen(self) -> None:
        """A parameter unfrozen since it was wrapped joins the layout at the next close. Until then its gradient is this
        rank's alone, so it is guarded too: a norm or a clip of it closes the window first."""
        reference = weakref.ref(self)
        for i in self._unplaced:
            parameter = self.params[i]
            if i in self.joining or not parameter.requires_grad:
                continue

            def guard(p: torch.Tensor, i: int = i) -> None:
                if p.grad is not None and not isinstance(p.grad, ShardedGradient):
                    p.grad = ShardedGradient.over(p.grad.detach(), reference, i)

            self.joining[i] = parameter.register_post_accumulate_grad_hook(guard)

    def _watch(self, output: Any) -> None:
        """A backward from these outputs ends a round even when it reaches none of our parameters directly."""
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                self.core.watch(tensor)

    def _begin_replicated(self) -> None:
        """At the first forward of all, and at the first after a backward that synchronised: rank 0's buffers become everyone's
        (collective), and parameters are to be checked again."""
        if self.uneven is not None and not self.uneven.enabled:
            self.set_uneven(None)
        closes = self.core.stats()["closes"]
        begins = closes != self._begun_at
        if begins:
            self._begun_at = closes
            self._unchecked = True
        if begins and self.buffers.follow and self.uneven is not None and self.buffers.any:
            self.uneven.broadcast_buffers(self)
        elif begins and self.buffers.follow:
            self.buffers.broadcast()

    # -- closing ------------------------------------------------------------------------------------------------------

    def close(self, at: int, want: int = WANT_NOTHING, order: float = 2.0, param: int = -1) -> "torch.Tensor | None":
        """Closes the round. Communicates; see ``csrc/core/close.c``. With ``WANT_FULL`` the gradient of ``param``; at a step
        that is the optimizer's number."""
        settled = False
        while not settled:
            if self.uneven is not None:
                self.uneven.before_close(self)
            settled = self.close_once(at, want, order, param)
        full = self.core.grad(param).clone() if want == WANT_FULL and self.core.gradient(param) == HELD else None
        if self.debug and self.sharded:
            self._poison()
        return full

    def close_once(self, at: int, want: int = WANT_NOTHING, order: float = 2.0, param: int = -1) -> bool:
        """One exchange of a close. False when another has to follow: :meth:`close`."""
        todo = self.core.close(at, want, order, param)
        if todo is None:
            return True
        if isinstance(todo, int):
            self._repeat_edits(todo)
        elif todo:
            self._place(todo, self.users())
            for optimizer in self.optimizers():
                optimizer.take_placed(todo)
        return False

    def _repeat_edits(self, rank: int) -> None:
        """A rank that came into its step without any gradient does to its pieces what rank ``rank`` did. Collective."""
        logs = self.group.gather(self.edits.first(self.core.edits()))
        refuse_unknown(logs[rank], rank)
        for edit in logs[rank][self.core.edits() :]:
            i, scale, method, args, kwargs = edit
            self.core.set_scale(i, scale)
            self.core.materialise(i)
            getattr(torch.Tensor, method)(piece_grad(self, i), *args, **kwargs)
            self.edits.note(self.core.edited(i), edit)

    def _poison(self) -> None:
        """What other ranks own is not this rank's to read: with debug=True it is NaN."""
        for i, slot in enumerate(self.slots):
            if slot is not None and self.core.gradient(i) == HELD:
                flat = _flat_view(self.core.grad(i))
                flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
                flat[: slot["begin"]] = torch.nan
                flat[slot["begin"] + slot["numel"] :] = torch.nan

    def norm(self, i: int, order: float) -> float:
        """The global norm of parameter i's gradient. Communicates when the window is not closed yet."""
        value = self.core.norm(order, i)
        if value is None and self.core.gradient(i) == LOCAL:
            return float(torch.linalg.vector_norm(self.local_gradient(i), order))
        if value is None:
            self.close(AT_READ, WANT_NORM, order)
            value = self.core.norm(order, i)
        return value

    def settled(self, i: int) -> int:
        """What parameter i's gradient is for someone who changes it: ``NONE`` (no rank has one), ``HELD`` (reduced; for that
        the window is closed) or ``LOCAL`` (a hook of the user's runs while this rank's gradient is accumulated)."""
        state = self.core.gradient(i)
        if state != PENDING:
            return state
        self.close(AT_READ)
        return self.core.gradient(i)

    def local_gradient(self, i: int) -> torch.Tensor:
        """This rank's own gradient of parameter i, as a plain tensor over its memory."""
        return self.core.grad(i)

    def full_grad(self, parameter: torch.Tensor) -> "torch.Tensor | None":
        i = self.index_of(parameter)
        if not self.sharded:
            return parameter.grad
        if not self.placed(i) and not parameter.requires_grad:
            return None
        return self.close(AT_READ, WANT_FULL, 2.0, i)

    def abort_window(self) -> None:
        self.close(AT_ABORT)
        for parameter in self.params:
            if parameter.grad is not None:
                parameter.grad = None

    # -- the end of a backward of a replicated model, where it is more than a close in C --------------------------------

    def set_comm_hook(self, hook: Any) -> None:
        self._comm_hook = hook
        self._set_synchronise()

    def set_uneven(self, uneven: Any) -> None:
        """Enters or leaves (None) a join context."""
        self.uneven = uneven
        if not self.sharded:
            self._set_synchronise()

    def _set_synchronise(self) -> None:
        reference = weakref.ref(self)

        def synchronise() -> None:
            alive = reference()
            if alive is not None:
                alive._average()

        needed = self._comm_hook is not None or self.uneven is not None
        self.core.synchronise_with(synchronise if needed else None, self._comm_hook is not None)

    def _average(self) -> None:
        """Gradients become averages over the ranks. Collective."""
        self.close(AT_SYNC)
        if self._comm_hook is not None:
            self._comm_hook.average()

    def average_without_mine(self) -> None:
        """Takes part in the averages of others with zeros, as in torch DDP: this rank's gradients stay its own. Collective."""
        placed = indices(i for i in range(len(self.params)) if self.placed(i))
        gradients = [(p, p.grad) for p in self.params if p.grad is not None]
        self.core.drop(placed)
        try:
            self.close_once(AT_SYNC)
            if self._comm_hook is not None:
                self._comm_hook.average()
        finally:
            self.core.drop(placed)
            for parameter, gradient in gradients:
                parameter.grad = gradient

    # -- reports ------------------------------------------------------------------------------------------------------

    def optimizers(self) -> "list[Any]":
        """The sharded optimizers over this model that are still in use."""
        return [o for reference in self._optimizers if (o := reference()) is not None]

    def add_optimizer(self, optimizer: Any) -> int:
        """Returns its number, by which ranks tell whether they step the same one."""
        self._optimizers.append(weakref.ref(optimizer))
        return len(self._optimizers) - 1

    def send_weights(self) -> None:
        """This rank's pieces, which have changed otherwise than by a step, go to the others. Collective."""
        before = self.core.stats()
        self.core.publish(indices(i for i in range(len(self.params)) if self.placed(i)))
        self.core.gather()
        self.masters_loaded = False
        after = self.core.stats()
        self._last_totals = {key: value + after[key] - before[key] for key, value in self._last_totals.items()}

    def note_step(self) -> None:
        self.core.end_step()
        self._unchecked = True
        self.masters_loaded = False
        if self.buffers.follow:  # here, where all ranks are: a rank that skips a forward must not make the others wait
            self.buffers.broadcast(self.uneven.source if self.uneven is not None else 0)
        now = self.core.stats()
        self._last_step = {key: now[key] - self._last_totals[key] for key in now}
        self._last_totals = now

    def stats(self, optimizer_bytes: int = 0) -> "dict[str, Any]":
        totals = self.core.stats()
        return {
            "step": _with_wire(self._last_step),
            "total": _with_wire(totals),
            "skipped_steps": self.skipped_steps,
            "memory": {**self.core.memory(), "optimizer": optimizer_bytes},
            "buckets": self.n_buckets,
            "transport": self.core.transport,
            "rank": self.group.rank,
            "world": self.group.world,
        }

    # -- end ----------------------------------------------------------------------------------------------------------

    def close_down(self) -> None:
        """Removes the hooks and lets the transport go. Parameters keep their values and their memory."""
        if self.closed:
            return
        self.closed = True
        if self.optimizers():  # whose state stays readable
            self.slots.outlive()
        self.core.close_down()
        self._release_group()
        for hook in self.joining.values():
            hook.remove()
        self.joining.clear()


def _with_wire(counters: "dict[str, Any]") -> "dict[str, Any]":
    if not counters:
        return {}
    wire = counters["reduce_scatter_bytes"] + counters["all_gather_bytes"]
    return {**counters, "wire_bytes": wire}


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**40:
        raise UsageError(f"{name} must be a positive number, not {value!r}")
    return float(value)


def _grad_dtype(parameter: torch.Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype in DOUBLE else torch.float32


def _flat_view(dense: torch.Tensor) -> torch.Tensor:
    return dense.as_strided((dense.numel(),), (1,))


__all__ = ["Engine", "MismatchError"]
