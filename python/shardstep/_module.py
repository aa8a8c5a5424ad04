"""``wrap``: a module that is synchronised in place, as FSDP2's ``fully_shard`` does it."""

import contextlib
import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.optim import Optimizer

from shardstep import _join
from shardstep._dynamo import running
from shardstep._engine import Engine, collector_paused
from shardstep._errors import UsageError
from shardstep._fsdp import FSDPMethods
from shardstep._plan import Plan

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

ENGINE = "_shardstep_engine"
LOCAL = (ENGINE, "_join_config")  # what of a module's attributes belongs to this process and this wrap


def engine_of(module: nn.Module) -> Engine:
    """The engine of a wrapped module, whatever names the user's class has."""
    engine = module.__dict__.get(ENGINE)
    if engine is None or engine.closed:
        raise UsageError("this module is not wrapped (any more)")
    return engine


class Synchronised:
    """What both forms of a wrapped module can do. The engine is in the instance's ``__dict__``, outside of torch's
    registries, so that it is neither saved nor copied."""

    _join_config = _JoinConfig.construct_disabled_join_config()
    __jit_unused_properties__ = ["_engine", "join_device", "join_process_group"]  # not for torch.jit.script

    @property
    def _engine(self) -> Engine:
        return engine_of(self)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards under this context add into the local gradient and communicate nothing."""
        core = engine_of(self).core
        before = core.sync
        core.sync = False
        try:
            yield
        finally:
            core.sync = before

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """FSDP2's spelling of :meth:`no_sync`: whether a backward that runs from now on synchronises. A hint."""
        engine_of(self).core.sync = bool(requires_gradient_sync)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the window's last: only that one starts to communicate by itself. A hint."""
        engine_of(self).core.set_last_backward(bool(is_last_backward))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Gradients are summed over ranks and divided by ``factor`` (default: the world size). Alike on all ranks."""
        engine_of(self).core.set_divide_factor(float(factor))

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> "contextlib.AbstractContextManager[None]":
        """As torch DDP's: ranks may have different numbers of inputs in here. Collective.

        A rank that has left its loop contributes no gradient to the windows of the others, and takes part in them as far as
        it is needed: sharded, it updates its part with their learning rates. In the end all have the model of a rank that had
        most inputs. Gradients are divided by the world size, or by the number of ranks that still train. With
        ``throw_on_early_termination`` every rank raises RuntimeError when one has run out, the others as soon as they would
        have to communicate with it: at a broadcast of buffers, the end of a backward, a clip or a step.

        With an optimizer, or several models: ``torch.distributed.algorithms.join.Join([model, optimizer])``."""
        if self.join_process_group is None:  # this process alone
            return contextlib.nullcontext()
        join = Join([self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size)
        return _join.joining(engine_of(self), join)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's ``Join``."""
        return _join.join_hook(self, engine_of(self), **kwargs)

    @property
    def join_device(self) -> torch.device:
        return engine_of(self).params[0].device

    @property
    def join_process_group(self) -> "dist.ProcessGroup | None":
        return engine_of(self).group.process_group

    def full_grad(self, parameter: torch.Tensor) -> "torch.Tensor | None":
        """The whole averaged gradient of ``parameter`` as a new tensor, or None when no rank used it.

        Collective: closes the window on every rank, and ranks that are elsewhere meet it in their ``step()``."""
        return engine_of(self).full_grad(parameter)

    def abort_window(self) -> None:
        """Drops the gradients of this window on every rank, and settles what is in flight. Collective: call it on all ranks
        (a rank that waits in its step instead gets an AbortedError, and its window is dropped as well)."""
        engine_of(self).abort_window()

    def stats(self) -> "dict[str, Any]":
        """What this rank has done and holds. Local. A dict of

        - ``step`` (the last one) and ``total``, each with
          ``steps``, ``backwards``, ``closes`` (of a window: by a step, a clip, a read);
          ``reduce_scatters``, ``all_gathers``: buckets reduced and gathered;
          ``reduce_scatter_bytes``, ``all_gather_bytes``, ``control_bytes``: received from peers; ``wire_bytes``: the first two;
          ``launched_early`` (in the backward), ``launched_at_end`` (of it), ``launched_at_close``: reductions by when they
          began; ``late_rounds``: closes that carried gradient which came after its bucket was sent;
          ``exposed_seconds``: in closes and gathers, where the caller waits; ``wait_seconds``: of these, for peers;
          ``overlapped_seconds``: in a backward's hooks; ``update_seconds``: in the fused update;
        - ``memory``, bytes now: ``params``, ``grads``, ``padding`` (of their buckets), ``master``, ``optimizer`` (state),
          ``carry`` (of late gradient, until the close);
        - ``skipped_steps``, by ``skip_nonfinite``; ``buckets``, ``transport``, ``rank``, ``world``.
        """
        engine = engine_of(self)
        return engine.stats(sum(optimizer.state_bytes() for optimizer in engine.optimizers()))


Joinable.register(Synchronised)


class WrappedModule(FSDPMethods, Synchronised):
    """Mixed into the class of a module wrapped in place."""

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Module:
        """A new one is of the user's own class and not wrapped: containers make one of their class when they are sliced."""
        original = _original(cls)
        module = original.__new__(original)
        module.__init__(*args, **kwargs)
        return module

    def _wrapped_call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return engine_of(self).forward(super().__call__, args, kwargs)

    __call__ = _wrapped_call_impl  # under nn.Module's name for it, by which torch.compile looks inside, also with fullgraph

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        # What torch.compile(module) made before the module was wrapped comes here, without a __call__ of ours.
        engine = engine_of(self)
        if engine in running():
            return super()._call_impl(*args, **kwargs)
        return engine.forward(super()._call_impl, args, kwargs)

    def unwrap(self) -> nn.Module:
        """Ends the wrap: the module gets its own class back and its parameters are ordinary again. Local."""
        engine = engine_of(self)
        engine.close_down()
        del self.__dict__[ENGINE]
        object.__setattr__(self, "__class__", _original(type(self)))
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(*args, **kwargs)
        engine_of(self).follow_weights()
        return result

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        engine_of(self).check_apply(fn)
        return super()._apply(fn, *args, **kwargs)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        return _plain_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_plain(self).__reduce_ex__(1)  # later protocols insist on the class of self


def _original(cls: type) -> type:
    return cls._shardstep_original


def _as_plain(module: nn.Module) -> nn.Module:
    """The same module under its own class and without the engine; shares every tensor and submodule."""
    plain = object.__new__(_original(type(module)))
    plain.__dict__.update({key: value for key, value in module.__dict__.items() if key not in LOCAL})
    return plain


def _plain_copy(module: nn.Module, memo: dict) -> nn.Module:
    import copy

    result = copy.deepcopy(_as_plain(module), memo)
    memo[id(module)] = result
    return result


_CLASSES: "dict[tuple[type, frozenset[str]], type]" = {}


def _wrapped_class(module: nn.Module) -> type:
    """The subclass for this module. Where the user has something of a name that :class:`WrappedModule` adds, in the class or as
    a parameter, buffer or submodule, the user's stays."""
    cls = type(module)
    registered = {name for held in (module._parameters, module._buffers, module._modules) for name in held}
    taken = frozenset(name for name in _ADDED if name in registered or name in module.__dict__ or hasattr(cls, name))
    if taken:
        warnings.warn(
            f"{cls.__name__} has {', '.join(sorted(taken))} of its own, which stays and hides what shardstep adds under this "
            "name; shardstep.DistributedDataParallel(module) has both",
            stacklevel=4,
        )
    if (cls, taken) not in _CLASSES:
        # Under the same name: transformers writes it into the configuration of what it saves.
        same = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__")}
        members = {"_shardstep_original": cls, **same}
        for name in taken:
            if name in registered:
                members[name] = property(lambda self, name=name: nn.Module.__getattr__(self, name))
            else:  # the instance's own comes first
                members[name] = inspect.getattr_static(cls, name, None)
        _CLASSES[cls, taken] = type(cls.__name__, (WrappedModule, cls), members)
    return _CLASSES[cls, taken]


#: Names that a module gets by the wrap.
_ADDED = {
    name
    for cls in (WrappedModule, FSDPMethods, Synchronised)
    for name in vars(cls)
    if not (name.startswith("__") or hasattr(nn.Module, name))
}


@collector_paused()
def wrap(
    module: nn.Module,
    optimizer: "Optimizer | Sequence[Optimizer] | None" = None,
    *,
    process_group: "dist.ProcessGroup | None" = None,
    transport: str = "auto",
    param_dtype: "torch.dtype | None" = None,
    mp_policy: "MixedPrecisionPolicy | None" = None,
    bucket_cap_mb: "float | None" = None,
    accumulate: int = 1,
    elementwise: bool = False,
    whole: bool = False,
    clip_grad_norm: "float | None" = None,
    skip_nonfinite: bool = False,
    timeout: "float | timedelta" = 600.0,
    init_sync: bool = True,
    broadcast_buffers: bool = True,
    ignored_params: "Iterable[torch.Tensor] | None" = None,
    debug: bool = False,
) -> Any:
    """Synchronises ``module`` over the ranks, in place, and shards ``optimizer``. Collective.

    The same module object comes back under a generated subclass of its class: ``isinstance`` holds, parameter names do not
    change, and every method that runs a backward is synchronised. Gradients accumulate locally; once per optimizer step they
    are reduce-scattered, each rank updates its 1/W of the FP32 master weights and optimizer state, and the parameters are
    all-gathered.

    Args:
        module: a model on this rank's device, equal on all ranks in structure.
        optimizer: a torch optimizer over its parameters, fresh or warm; or a list of several, each for its own parameters,
            such as ``[muon, adamw]``; or None, and ``ShardedOptimizer(optimizer, module)`` later.
        process_group: the ranks that train this model; the default group, or this process alone where none exists.
        transport: ``"shm"`` (ranks on one host), ``"c10d"`` (the process group), or ``"auto"``.
        param_dtype: ``torch.bfloat16`` or ``torch.float16``: parameters and floating-point inputs are cast to it, master
            weights are taken from the values before the cast and kept in FP32, gradients accumulate in FP32. FP64 parameters
            stay as they are.
        mp_policy: FSDP2's ``MixedPrecisionPolicy``, in place of ``param_dtype``. ``output_dtype`` casts what the forward
            returns, ``cast_forward_inputs=False`` leaves its inputs. Any ``reduce_dtype`` is accepted, and gradients are
            accumulated and summed in FP32, which is at least as exact.
        bucket_cap_mb: size of a gradient bucket in MiB.
        accumulate: with K > 1 only every K-th backward of a window synchronises by itself.
        elementwise, whole, clip_grad_norm, skip_nonfinite: see :class:`shardstep.ShardedOptimizer`. With several optimizers
            the norm is that of all their gradients together, as of ``clip_grad_norm_(model.parameters())`` before the first of
            their steps.
        timeout: seconds (or a timedelta) after which a wait for a peer raises :class:`shardstep.TimeoutError`.
        init_sync: broadcast rank 0's parameters and buffers first. Models are compared in any case.
        broadcast_buffers: rank 0's buffers (BatchNorm's statistics) become everyone's with every step and at the start; with
            False they are each rank's own.
        ignored_params: parameters that are left alone entirely.
        debug: fill what this rank does not own of reduced gradients with NaN.

    Returns:
        ``(module, ShardedOptimizer)``, ``(module, list of ShardedOptimizer)`` for a list, or ``module`` alone when no optimizer
        was given.

    Raises:
        UsageError: a parameter or an option cannot be used, by name.
        MismatchError: ranks have different models or options; on every rank alike.
    """
    from shardstep._optim import ShardedOptimizer

    if not isinstance(module, nn.Module):
        raise UsageError(f"wrap() takes a torch.nn.Module, not {type(module).__name__}")
    if isinstance(module, Synchronised):
        raise UsageError("this module is wrapped already")
    if isinstance(module, torch.jit.ScriptModule):
        raise UsageError(
            "a TorchScript module has no Python class to extend in place; wrap the module it was made from, or use "
            "shardstep.DistributedDataParallel(module)"
        )
    several = isinstance(optimizer, (list, tuple))
    optimizers = tuple(optimizer) if several else () if optimizer is None else (optimizer,)
    plan = Plan(optimizers, elementwise, whole, clip_grad_norm, skip_nonfinite)
    engine = Engine(
        module, sharded=True, process_group=process_group, transport=transport, param_dtype=param_dtype,
        mp_policy=mp_policy, bucket_cap_mb=bucket_cap_mb, accumulate=accumulate, timeout=timeout, init_sync=init_sync,
        broadcast_buffers=broadcast_buffers, ignored_params=ignored_params, debug=debug, plan=plan,
    )
    module.__dict__[ENGINE] = engine
    object.__setattr__(module, "__class__", _wrapped_class(module))
    if optimizer is None:
        return module
    try:
        sharded = ShardedOptimizer.of(plan, engine)
    except BaseException:
        WrappedModule.unwrap(module)
        raise
    return module, sharded if several else sharded[0]


def sharded_engine_of(module: nn.Module, plan: Plan) -> Engine:
    """The engine that shards a wrapped module's gradients, for the optimizers of ``plan``; turns the class form from
    replicated to sharded. Collective."""
    if not isinstance(module, Synchronised):
        raise UsageError(
            f"{type(module).__name__} is not wrapped: ShardedOptimizer takes a module that went through shardstep.wrap() or "
            "a shardstep.DistributedDataParallel"
        )
    engine = engine_of(module)
    engine.group.agree(lambda: plan.describe(engine), "optimizers")
    if not engine.sharded:
        return module._become_sharded(plan)
    for optimizer, whole in plan.users():
        engine.place_for(optimizer, whole)
    return engine
