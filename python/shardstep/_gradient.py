"""The gradient that a sharded parameter shows as ``.grad``.

After a close only this rank's piece of it holds the reduced gradient; the rest of the memory is whatever the reduction
left there. So the tensor is guarded: a subclass with ``__torch_function__`` only, over the same storage. Autograd adds into
it in C++ without coming here; everything that user code, ``clip_grad_norm_`` or ``GradScaler`` does arrives here and is
answered globally, done to this rank's piece, or refused with the call to use instead. Dispatch is one dict lookup.

Not seen here, because they bypass ``__torch_function__``: TorchScript, functorch transforms, copies by ``torch.tensor(g)``,
other tensors over the same memory (``torch.Tensor(g)``, ``x.set_(g)``, ``x.data = g``) and raw pointers. ``wrap(...,
debug=True)`` fills what is not this rank's with NaN.
"""

import math
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardstep._edits import edit_of
from shardstep._errors import UsageError

if TYPE_CHECKING:
    from shardstep._engine import Engine

Tensor = torch.Tensor
Plain = torch._C.DisableTorchFunctionSubclass


class Life:
    """Whether a gradient is still the parameter's, and if not, what a user who holds it has. Shared with its aliases."""

    kept: "int | None" = None  # KEPT_ALL, KEPT_PIECE or KEPT_NOTHING, once it was dropped
    norm = float("nan")  # of KEPT_PIECE: the global L2 norm, where it was known


#: What a gradient is (ss_gradient_state in csrc/core/engine.h), and what of a dropped one is left (ss_kept).
NONE, HELD, PENDING, LOCAL = range(4)
KEPT_ALL, KEPT_PIECE, KEPT_NOTHING = range(3)


class Outlived(Exception):
    """A gradient is asked for something that was dropped from its parameter. Never leaves this file."""


class ShardedGradient(torch.Tensor):
    """A gradient of which this rank holds one piece. See the module's docstring."""

    _engine: "weakref.ref[Engine] | None" = None
    _index: int = -1
    _life: Life

    @staticmethod
    def over(
        slot: torch.Tensor, engine: "weakref.ref[Engine]", index: int, life: "Life | None" = None
    ) -> "ShardedGradient":
        guard = torch.Tensor._make_subclass(ShardedGradient, slot)
        guard._engine = engine
        guard._index = index
        guard._life = life or Life()
        return guard

    def outlives_window(self, kept: int, norm: float) -> None:
        """It was dropped from its parameter (``zero_grad``, ``.grad = None``), somebody holds it, and its memory is its own."""
        self._life.kept = kept
        self._life.norm = norm

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: "dict | None" = None) -> Any:
        try:
            return HANDLERS.get(func, _read)(func, args, kwargs or {})
        except Outlived:
            return _outlived(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(f"{_label(self)} cannot be pickled or copied: it is one rank's view; use model.full_grad(parameter)")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(2)

    # torch does not ask __torch_function__ about these two.

    def set_(self, *_: Any, **__: Any) -> Any:
        raise UsageError(f"set_: {_label(self)} is a part of its bucket and cannot be given other memory; use copy_()")

    def as_subclass(self, cls: type) -> Any:
        raise UsageError(f"as_subclass: {_label(self)} is sharded over the ranks; use model.full_grad(parameter)")

    def __format__(self, specification: str) -> str:
        return format(repr(self), specification)

    def __repr__(self, **_: Any) -> str:
        with Plain():
            return f"ShardedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, parameter={_label(self)})"


def _engine_of(guard: ShardedGradient) -> "Engine":
    if guard._life.kept is not None:
        raise Outlived
    engine = guard._engine() if guard._engine is not None else None
    if engine is None or engine.closed:
        raise UsageError("this gradient belongs to a model that is no longer wrapped")
    if engine.pid != os.getpid():
        raise UsageError(f"{_label(guard)} cannot be used in a forked child: its memory is the parent process's")
    return engine


def _label(guard: ShardedGradient) -> str:
    engine = guard._engine() if guard._engine is not None else None
    return "a gradient" if engine is None else f"the gradient of parameter {engine.names[guard._index]!r}"


# -- reads ------------------------------------------------------------------------------------------------------------


def _metadata(func: Callable, args: tuple, kwargs: dict) -> Any:
    with Plain():
        return func(*args, **kwargs)


def _like(func: Callable, args: tuple, kwargs: dict) -> Any:
    """``x.view_as(g)``: only the shape of the second is asked for."""
    return (_read if isinstance(args[0], ShardedGradient) else _metadata)(func, args, kwargs)


def _type(func: Callable, args: tuple, kwargs: dict) -> Any:
    """``g.type()`` asks, ``g.type(dtype)`` converts."""
    return (_metadata if len(args) == 1 and not kwargs else _read)(func, args, kwargs)


def _alias(func: Callable, args: tuple, kwargs: dict) -> Any:
    """``g.data``, ``g.detach()``: the same gradient again."""
    guard = args[0]
    with Plain():
        return ShardedGradient.over(guard, guard._engine, guard._index, guard._life)


def _outlived(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Gradients that were dropped from their parameters while somebody held them: as in torch they keep their values. Those
    of this rank alone (under no_sync) are ordinary tensors now; of reduced ones there is this rank's piece and the norm."""

    def plain(value: Any) -> Any:
        if not isinstance(value, ShardedGradient) or value._life.kept is None:
            return value
        if value._life.kept == KEPT_ALL:
            with Plain():
                return torch.Tensor._make_subclass(torch.Tensor, value)
        raise UsageError(
            f"{getattr(func, '__name__', func)}: {_label(value)} was kept past zero_grad(set_to_none=True), and of it only "
            "this rank's piece is left; take model.full_grad(parameter) before zero_grad"
        )

    args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs))
    return func(*args, **kwargs)


def _read(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Any other use. Under no_sync this rank's local gradient is the right answer, as in DDP; otherwise there is none."""
    guards = [a for a in _leaves((args, kwargs)) if isinstance(a, ShardedGradient)]
    name = getattr(func, "__name__", str(func))
    out = kwargs.get("out")
    if out is not None and args and out is args[0] and HANDLERS.get(getattr(Tensor, f"{name}_", None)) is _elementwise:
        return _elementwise(getattr(Tensor, f"{name}_"), args, {key: value for key, value in kwargs.items() if key != "out"})
    in_place = name.endswith("_") and not name.endswith("__")
    if not in_place and all(_is_local(g) for g in guards):
        return _on_local(func, args, kwargs)
    what = _label(guards[0]) if guards else "a gradient"
    raise UsageError(
        f"{name}: {what} is sharded over the ranks, and this call needs all of it. Use model.full_grad(parameter) "
        "(a collective call), a norm, a clip or an in-place scale; under no_sync() the local gradient can be read"
    )


def _is_local(guard: ShardedGradient) -> bool:
    core, index = _engine_of(guard).core, guard._index
    return core.gradient(index) == LOCAL or (not core.sync and core.local(index))


def _on_local(func: Callable, args: tuple, kwargs: dict) -> Any:
    """On plain tensors over this rank's own gradients."""

    def plain(value: Any) -> Any:
        if not isinstance(value, ShardedGradient):
            return value
        return _engine_of(value).local_gradient(value._index) if _is_local(value) else _read(func, (value,), {})

    args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs))
    return func(*args, **kwargs)


def _leaves(tree: Any) -> list:
    return torch.utils._pytree.tree_leaves(tree)


def _norm_value(guard: ShardedGradient, order: Any) -> torch.Tensor:
    life = guard._life
    if life.kept == KEPT_PIECE and order == 2.0 and life.norm == life.norm:
        value = life.norm
    else:
        value = _engine_of(guard).norm(guard._index, float(order))
    with Plain():
        return torch.tensor(value, dtype=guard.dtype.to_real(), device=guard.device)


def _vector_norm(func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    """Norms over all elements; those of matrices, along dimensions or in another dtype are reads like any other."""
    guard, rest = args[0], list(args[1:])
    if not isinstance(guard, ShardedGradient):
        return _read(func, args, kwargs)
    order = rest.pop(0) if rest else kwargs.get("ord", kwargs.get("p"))
    others = rest + [value for key, value in kwargs.items() if key not in ("ord", "p")]
    if any(value is not None and value is not False for value in others):
        return _read(func, args, kwargs)
    if order is None or (order == "fro" and (func is not torch.linalg.norm or guard.dim() == 2)):
        order = 2.0
    elif not isinstance(order, (int, float)) or (func is torch.linalg.norm and guard.dim() > 1):
        return _read(func, args, kwargs)  # linalg.norm takes a matrix' own norm when it is given an order
    return _norm_value(guard, order)


def _foreach_norm(func: Callable, args: tuple, kwargs: dict) -> "tuple[torch.Tensor, ...]":
    order, dtype = args[1] if len(args) > 1 else kwargs.get("ord", 2), kwargs.get("dtype")
    norms = [
        _norm_value(g, order) if isinstance(g, ShardedGradient) else torch.linalg.vector_norm(g, order) for g in args[0]
    ]
    return tuple(n if dtype is None else n.to(dtype) for n in norms)


# -- writes -----------------------------------------------------------------------------------------------------------


def _scalar(value: Any) -> "float | None":
    """The value of a Python number or of a 0-dim tensor; None for anything else."""
    if isinstance(value, ShardedGradient):
        return None
    if isinstance(value, torch.Tensor):
        return float(value) if value.dim() == 0 and not value.is_complex() else None
    return float(value) if isinstance(value, (int, float)) else None


def _scale(func: Callable, args: tuple, kwargs: dict) -> Any:
    """``mul_`` and ``div_``. By a scalar they stay pending and are folded into the update."""
    guard = args[0]
    factor = _scalar(args[1]) if len(args) == 2 and not kwargs and isinstance(guard, ShardedGradient) else None
    if factor is None:
        return _elementwise(func, args, kwargs)
    engine = _engine_of(guard)
    state = engine.settled(guard._index)
    if state == LOCAL:
        _on_local(func, args, kwargs)
    elif state == HELD:
        engine.core.scale(guard._index, factor if func in MULTIPLY else _inverse(factor))
    return guard


def _inverse(value: float) -> float:
    return 1.0 / value if value != 0.0 else float("nan") if value != value else float("inf")


def piece_grad(engine: "Engine", index: int) -> torch.Tensor:
    piece = engine.slots[index]["piece_grad"]
    return torch.view_as_complex(piece.view(-1, 2)) if engine.params[index].is_complex() else piece


def _elementwise(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Any other in-place elementwise operation: done to this rank's piece, with tensor arguments cut likewise."""
    guard = args[0]
    if not isinstance(guard, ShardedGradient):
        return _read(func, args, kwargs)
    engine = _engine_of(guard)
    state = engine.settled(guard._index)
    if state == LOCAL:
        return guard if _on_local(func, args, kwargs) is not NotImplemented else NotImplemented
    if state != HELD:
        return guard
    piece = piece_grad(engine, guard._index)
    begin = engine.slots[guard._index]["begin"] // (2 if piece.is_complex() else 1)
    scale = engine.core.materialise(guard._index)

    def cut(value: Any) -> Any:
        if isinstance(value, ShardedGradient):
            if value._index != guard._index:
                return _read(func, (value,), {})
            return piece
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            with Plain():
                whole = torch.empty_strided(guard.shape, guard.stride(), dtype=value.dtype)
                whole.copy_(value.detach())
            return whole.as_strided((whole.numel(),), (1,))[begin : begin + piece.numel()]
        return value

    rest = [cut(a) for a in args[1:]]
    if func(piece, *rest, **{key: cut(value) for key, value in kwargs.items()}) is NotImplemented:
        return NotImplemented
    engine.edits.note(engine.core.edited(guard._index), edit_of(guard._index, scale, func, args[1:], kwargs))
    return guard


def _zero(func: Callable, args: tuple, kwargs: dict) -> Any:
    engine, index = _engine_of(args[0]), args[0]._index
    if not engine.placed(index):  # not in the layout yet: memory of its own
        with Plain():
            func(args[0])
    elif engine.core.gradient(index) == LOCAL:
        _on_local(func, args, kwargs)
    else:
        engine.core.zero(index)
    return args[0]


def _foreach(one: Callable) -> Callable:
    """A ``_foreach_*_`` function as a loop over its single-tensor form ``one``."""

    def handler(func: Callable, args: tuple, kwargs: dict) -> None:
        tensors, rest = args[0], args[1:]
        for k, tensor in enumerate(tensors):
            one(tensor, *[a[k] if isinstance(a, (list, tuple)) else a for a in rest], **kwargs)

    return handler


def _unscale(func: Callable, args: tuple, kwargs: dict) -> None:
    """GradScaler's check-and-unscale: ranks agree on ``found_inf``. An optimizer with such a gradient will not be stepped."""
    tensors, found_inf, inverse_scale = args
    plain = [t for t in tensors if not isinstance(t, ShardedGradient)]
    guards = [(t, _engine_of(t)) for t in tensors if isinstance(t, ShardedGradient)]
    if plain:
        func(plain, found_inf, inverse_scale)
    for engine in dict.fromkeys(engine for _, engine in guards):
        bad = {guard._index for guard, of in guards if of is engine and not math.isfinite(of.norm(guard._index, 2.0))}
        if bad:
            found_inf.fill_(1.0)
            for optimizer in engine.optimizers():
                optimizer.step_was_skipped |= not bad.isdisjoint(optimizer.placed())
    factor = float(inverse_scale)
    for guard, engine in guards:
        if engine.settled(guard._index) == HELD:
            engine.core.scale(guard._index, factor)


# -- the table --------------------------------------------------------------------------------------------------------

HANDLERS: "dict[Any, Callable]" = {}


def _register(handler: Callable, functions: "Sequence[Any]") -> None:
    for function in functions:
        HANDLERS[function] = handler


def _methods(names: str) -> list:
    return [getattr(Tensor, name) for name in names.split() if hasattr(Tensor, name)]


def _getters(names: str) -> list:
    return [getattr(Tensor, name).__get__ for name in names.split() if hasattr(Tensor, name)]


_register(
    _metadata,
    _getters(
        "shape dtype device layout ndim requires_grad grad_fn is_leaf is_sparse is_sparse_csr is_quantized is_nested is_meta "
        "is_cpu is_cuda is_xpu is_xla is_mps is_mkldnn is_vulkan is_ipu is_hpu is_mtia is_maia itemsize nbytes names name "
        "retains_grad output_nr _version _base _backward_hooks grad grad_dtype _post_accumulate_grad_hooks"
    )
    + _methods(
        "size dim numel nelement ndimension stride storage_offset is_contiguous element_size data_ptr untyped_storage "
        "is_floating_point is_complex is_signed get_device is_same_size __len__ is_conj is_neg is_inference "
        "_is_view _is_zerotensor is_set_to requires_grad_ detach_ __hash__"
    )
    + [getattr(Tensor, name).__set__ for name in ("requires_grad", "grad") if hasattr(Tensor, name)]
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size, torch.is_conj],
)
_register(
    _metadata,
    _methods("new_zeros new_ones new_full new_empty")
    + [torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.rand_like, torch.randn_like],
)
_register(_like, _methods("view_as expand_as reshape_as type_as"))
_register(_type, [Tensor.type])
_register(_alias, [Tensor.data.__get__, Tensor.detach, torch.detach])
_register(
    _vector_norm,
    [torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm, torch.functional.norm],
)
_register(_foreach_norm, [torch._foreach_norm])
MULTIPLY = frozenset(_methods("mul_ multiply_ __imul__"))
_register(_scale, [*MULTIPLY, *_methods("div_ divide_ true_divide_ __itruediv__ __idiv__")])
_register(
    _elementwise,
    _methods(
        "add_ sub_ subtract_ __iadd__ __isub__ copy_ clamp_ clip_ clamp_min_ clamp_max_ nan_to_num_ neg_ negative_ abs_ sign_ "
        "sgn_ square_ sqrt_ rsqrt_ pow_ __ipow__ reciprocal_ tanh_ sigmoid_ exp_ log1p_ round_ floor_ ceil_ trunc_ fill_ "
        "masked_fill_ addcmul_ addcdiv_ lerp_ where_ copysign_ floor_divide_ remainder_ hypot_"
    )
    + [torch.clamp_, torch.clip_, torch.clamp_min_, torch.clamp_max_, torch.nan_to_num_, torch.fill_, torch.abs_,
       torch.neg_, torch.square_, torch.sqrt_],
)
_register(_zero, [Tensor.zero_, torch.zero_])
_register(_foreach(torch.zero_), [torch._foreach_zero_])
for _name in ("mul", "div", "add", "sub", "clamp_min", "clamp_max", "neg", "abs", "sqrt", "addcmul", "addcdiv", "lerp"):
    _function = getattr(torch, f"_foreach_{_name}_", None)
    if _function is not None:
        HANDLERS[_function] = _foreach(getattr(Tensor, f"{_name}_"))
_register(_unscale, [torch._amp_foreach_non_finite_check_and_unscale_])
