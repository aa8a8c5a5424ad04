"""``DistributedDataParallel``: torch DDP's class form over the same engine."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from shardstep import _comm_hooks
from shardstep._engine import DEFAULT_BUCKET_MB, Engine
from shardstep._errors import UsageError
from shardstep._module import ENGINE, Synchronised
from shardstep._plan import Plan
from shardstep._precision import Precision, compute_dtype
from shardstep._registry import refuse_fused_in_backward

#: torch's logging data speak of dtypes by their C++ names.
NAMES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "c10::BFloat16", torch.float16: "c10::Half"}
#: What of an instance belongs to this process: not pickled.
LOCAL = (ENGINE, "process_group", "device_mesh", "reducer", "logger", "_comm_hooks")


class Reducer:
    """What torch's pipelining, trainers and inherited methods ask of ``ddp.reducer``. Nothing of it has anything to do here:
    whether a backward synchronises is decided while it runs, and buckets are laid out once."""

    def prepare_for_forward(self) -> None: ...

    def prepare_for_backward(self, outputs: Any) -> None: ...

    def _rebuild_buckets(self) -> bool:
        return False

    def _set_static_graph(self) -> None: ...

    def _check_reducer_finalized(self) -> None: ...

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None: ...


class Logger:
    """``ddp.logger``: what ``_get_ddp_logging_data`` reports, in torch's terms."""

    def __init__(self, ddp: "DistributedDataParallel"):
        self._ddp = ddp
        self._comm_hook: str | None = None
        self._error: str | None = None
        self._joins = False

    def set_error_and_log(self, message: str) -> None:
        self._error = message

    def _set_comm_hook_name(self, name: str) -> None:
        self._comm_hook = name

    def _set_uneven_input_join(self) -> None:
        self._joins = True

    def _set_static_graph(self) -> None: ...

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        ddp, engine = self._ddp, self._ddp._engine
        placed = [p for p, slot in zip(engine.params, engine.slots) if slot is not None]
        sizes = [0] * engine.n_buckets
        for p, slot in zip(engine.params, engine.slots):
            if slot is not None:
                sizes[slot["bucket"]] += p.numel() * p.element_size()
        total = engine.core.stats()
        group = engine.group.process_group
        strings = {
            "module_name": type(ddp.module).__name__,
            "backend_name": dist.get_backend(group) if group is not None else "none",
            "transport": engine.core.transport,
            "bucket_sizes": ", ".join(map(str, sizes)),
            "device_ids": "",
            "dtypes": ", ".join(sorted({NAMES.get(p.dtype, str(p.dtype)) for p in placed})),
            "master_addr": os.environ.get("MASTER_ADDR", "N/A"),
            "master_port": os.environ.get("MASTER_PORT", "N/A"),
            "torch_distributed_debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A"),
        }
        if self._comm_hook is not None:
            strings["comm_hook"] = self._comm_hook
        if self._error is not None:
            strings["error"] = self._error
        numbers = {
            "rank": engine.group.rank,
            "world_size": engine.group.world,
            "iteration": total["backwards"],
            "num_parameter_tensors": len(placed),
            "total_parameter_size_bytes": sum(sizes),
            "num_buckets_reduced": total["reduce_scatters"],
            "bucket_cap_bytes": ddp.bucket_bytes_cap,
            "broadcast_buffers": int(ddp.forward_sync_buffers),
            "find_unused_parameters": int(ddp.find_unused_parameters),
            "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
            "static_graph": int(ddp.static_graph),
            "can_set_static_graph": 1,
            "has_sync_bn": 0,
            "has_rebuilt_buckets": 0,
            "has_error": int(self._error is not None),
            "is_multi_device_module": 0,
            "join_uneven_inputs": int(self._joins),
            "output_device": -1,
            "unused_parameter_size": 0,
            "backward_comm_time": int(total["exposed_seconds"] * 1e9),
            "backward_compute_comm_overlap_time": int(total["overlapped_seconds"] * 1e9),
        }
        return SimpleNamespace(strs_map=strings, ints_map=numbers)


class DistributedDataParallel(Synchronised, TorchDDP):
    """Drop-in for ``torch.nn.parallel.DistributedDataParallel``.

    As constructed it is *replicated*: after a synchronising backward every ``.grad`` holds the average over ranks, and any
    optimizer may be used; unused parameters need no flag. ``ShardedOptimizer(optimizer, ddp)`` makes it *sharded*.

    Args: torch's, in torch's order, with torch's exceptions.

        - ``broadcast_buffers`` or ``forward_sync_buffers`` (default True): rank 0's buffers become everyone's at the first
          forward after a backward that synchronised (sharded: at the end of a step). ``broadcast_buffers=False`` leaves them
          to each rank at construction too.
        - ``init_sync``: rank 0's parameters and buffers become everyone's at construction. Models are compared in any case.
        - ``process_group`` or a one-dimensional ``device_mesh``: the ranks that train this model.
        - ``bucket_cap_mb``, ``bucket_cap_mb_list``: sizes of the gradient buckets, in MiB of FP32.
        - ``gradient_as_bucket_view``: gradients are views of the buckets either way, and a reference to one that outlives
          ``zero_grad`` keeps its values either way.
        - ``find_unused_parameters``, ``static_graph``, ``check_reduction``, ``dim``, ``batched_grad_copy`` and
          ``skip_all_reduce_unused_params`` are accepted and not needed.
        - ``mixed_precision``, torch's ``_MixedPrecision``: a forward computes with copies of the parameters and inputs in its
          ``param_dtype``; floating-point buffers become of its ``buffer_dtype``. Parameters, gradients and state dicts stay in
          their own dtype, and gradients are summed in it, whatever ``reduce_dtype`` says. Activation checkpointing computes
          again outside of the forward, with parameters in their own dtype: torch raises there or, where an operation takes
          both dtypes, that part is computed in the higher precision.
        - ``delay_all_reduce_named_params`` is refused.
        - ``transport`` and ``timeout``: those of :func:`shardstep.wrap`.
    """

    # What torch's class has and others read, where it cannot differ here.
    _use_python_reducer = False
    _delay_all_reduce_all_params = False
    _has_rebuilt_buckets = True
    _lazy_init_ran = False
    _ddp_sink_clone = False
    is_multi_device_module = False
    require_forward_param_sync = True
    use_side_stream_for_tensor_copies = False
    broadcast_bucket_size = 250 * 2**20
    device_ids = output_device = None

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: "bool | None" = None,
        init_sync: bool = True,
        process_group: "dist.ProcessGroup | None" = None,
        bucket_cap_mb: "float | None" = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: "Iterable[tuple[str, nn.Parameter]] | None" = None,
        param_to_hook_all_reduce: "nn.Parameter | None" = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: "list[float] | None" = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: "bool | None" = None,
        *,
        transport: str = "auto",
        timeout: "float | timedelta" = 600.0,
    ):
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self._computes_in = compute_dtype(mixed_precision)
        _refuse_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        if device_mesh is not None:
            process_group = _group_of(device_mesh, process_group)
            self.device_mesh = device_mesh
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = dict(module.named_parameters(remove_duplicate=False))
        members = [p for name, p in named.items() if name not in ignored]
        _check_module(module, members, device_ids, output_device)
        if broadcast_buffers is not None and forward_sync_buffers is not None:
            warnings.warn("`broadcast_buffers` is ignored where `forward_sync_buffers` is given.", FutureWarning, stacklevel=2)
        follow = next((bool(value) for value in (forward_sync_buffers, broadcast_buffers) if value is not None), True)

        self.module = module
        self.parameters_to_ignore = ignored
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self.device = members[0].device
        self.device_type = self.device.type
        caps = list(bucket_cap_mb_list or ())
        self.bucket_bytes_cap = int(max(caps, default=bucket_cap_mb or DEFAULT_BUCKET_MB) * 2**20)
        self.bucket_bytes_cap_list = [int(mb * 2**20) for mb in caps]
        self._comm_hooks: list[tuple[Any, Any]] = []
        self._attach(
            Engine(
                module, sharded=False, process_group=process_group, transport=transport, bucket_cap_mb=bucket_cap_mb,
                timeout=timeout, init_sync=init_sync, ignored_params=[p for n, p in named.items() if n in ignored],
                broadcast_buffers=follow, init_buffers=follow or forward_sync_buffers is not None, ignored_buffers=ignored,
                bucket_caps_mb=caps,
            )
        )
        if mixed_precision is not None and mixed_precision.buffer_dtype is not None:
            for buffer in self.modules_buffers:
                if buffer.is_floating_point():
                    buffer.data = buffer.to(mixed_precision.buffer_dtype)

    def _attach(self, engine: Engine) -> None:
        self.__dict__[ENGINE] = engine
        self.process_group = engine.group.process_group
        self.reducer = Reducer()
        self.logger = Logger(self)

    # -- attributes of torch's class ----------------------------------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        return self._engine.core.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._engine.core.sync = bool(value)

    @property
    def forward_sync_buffers(self) -> bool:
        return self._engine.buffers.follow

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._engine.buffers.follow = bool(value)

    broadcast_buffers = forward_sync_buffers

    @property
    def named_module_buffers(self) -> "dict[str, torch.Tensor]":
        return dict(self._engine.buffers.named())

    @property
    def modules_buffers(self) -> "list[torch.Tensor]":
        return list(self.named_module_buffers.values())

    @property
    def _module_parameters(self) -> "list[nn.Parameter]":
        return [p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore]

    # -- forward and backward -----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            engine = self._engine
            if not self._lazy_init_ran:
                self._lazy_init()
            call = self.module if self._computes_in is None else self._compute_in_low_precision
            return engine.forward(call, args, kwargs)

    def _compute_in_low_precision(self, *args: Any, **kwargs: Any) -> Any:
        """The casts are part of the graph, so that gradients come back in the parameters' own dtype."""
        dtype = self._computes_in
        low = {
            name: parameter.to(dtype) for name, parameter in self.module.named_parameters()
            if parameter.is_floating_point() and name not in self.parameters_to_ignore
        }
        inputs = Precision(input_dtype=dtype)
        return functional_call(self.module, low, inputs.cast_inputs(args), inputs.cast_inputs(kwargs))

    def _lazy_init(self) -> None:
        """Before the first forward, as in torch: an optimizer may have been fused into the backward since construction."""
        for name, parameter in zip(self._engine.names, self._engine.params):
            refuse_fused_in_backward(name, parameter)
        self._lazy_init_ran = True

    def register_comm_hook(self, state: object, hook: "Callable[..., Any]") -> None:
        """As torch DDP's: ``hook(state, bucket)`` makes the averages, once per bucket and window, and returns a future.

        Local, but to be done alike on all ranks. Sharded models run no hook: they take torch's ``allreduce_hook``,
        ``fp16_compress_hook`` and ``bf16_compress_hook`` (also their ``_wrapper`` forms of one of these), which ask for the
        average that is made anyway; it is made in FP32, more exact than what they send, and as many bytes travel. Others are
        refused by name."""
        _comm_hooks.check(hook)
        engine = self._engine
        if engine.sharded:
            _comm_hooks.refuse_sharded(hook)
        if self._comm_hooks:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._comm_hooks.append((hook, state))
        self.logger._set_comm_hook_name(_comm_hooks.name_of(hook))
        if not engine.sharded:
            engine.set_comm_hook(_comm_hooks.CommHook(engine, state, hook))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.register_comm_hook(self.process_group, _comm_hooks.BUILTIN[comm_hook_type.name])

    def no_sync(self) -> "contextlib.AbstractContextManager[None]":
        """As torch DDP's."""
        return Synchronised.no_sync(self)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.logger._set_uneven_input_join()
        return Synchronised.join_hook(self, **kwargs)

    def _become_sharded(self, plan: Plan) -> Engine:
        old = self._engine
        for hook, _ in self._comm_hooks:
            _comm_hooks.refuse_sharded(hook)
        settings = {**old.settings, "broadcast_buffers": old.buffers.follow}
        gradients = [(p, p.grad) for p in old.params if p.grad is not None]
        old.close_down()
        # More optimizers may come, and need other layouts. Not so for low precision: masters are taken before the cast.
        place_all = old.precision.param_dtype is not None
        engine = Engine(self.module, sharded=True, init_sync=False, plan=plan, place_all=place_all, **settings)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        if engine.buffers.follow:
            engine.buffers.broadcast()
        self._attach(engine)
        for hook, _ in self._comm_hooks:
            self.logger._set_comm_hook_name(_comm_hooks.name_of(hook))
        return engine

    # -- what torch's class can do and this one cannot ----------------------------------------------------------------

    def _register_fused_optim(self, optim: type, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            f"{optim.__name__} cannot be fused into the backward: gradients are averaged at its end or later. Step it after "
            "the backward, or shard it with shardstep.ShardedOptimizer"
        )

    def _update_process_group(self, new_process_group: Any) -> None:
        raise UsageError(
            "the process group of a wrapped model cannot be changed; unwrap() it and make a DistributedDataParallel over the "
            "new group"
        )

    # -- life -----------------------------------------------------------------------------------------------------------

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = nn.Module.load_state_dict(self, *args, **kwargs)
        self._engine.follow_weights()
        return result

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self._engine.check_apply(fn)
        return nn.Module._apply(self, fn, *args, **kwargs)

    def unwrap(self) -> nn.Module:
        """Ends the synchronisation and returns the inner module. Local."""
        self._engine.close_down()
        return self.module

    def __getstate__(self) -> dict:
        if self.process_group is not None:
            self._check_default_group()  # torch's: only what is over the default group can be made again
        state = {key: value for key, value in self.__dict__.items() if key not in LOCAL}
        state["broadcast_buffers"] = self.forward_sync_buffers
        return state

    def __setstate__(self, state: dict) -> None:
        """A pickled wrapper is synchronised anew, replicated, over the default process group. Collective, as in torch DDP."""
        follow = state.pop("broadcast_buffers")
        self.__dict__.update(state, _comm_hooks=[])
        named = self.module.named_parameters(remove_duplicate=False)
        self._attach(
            Engine(
                self.module, sharded=False, bucket_cap_mb=self.bucket_bytes_cap / 2**20, broadcast_buffers=follow,
                ignored_params=[p for name, p in named if name in self.parameters_to_ignore],
                ignored_buffers=self.parameters_to_ignore,
            )
        )

    def __deepcopy__(self, memo: dict) -> nn.Module:
        """A plain, detached copy of the inner module: copies are for averaging and evaluation and must not communicate."""
        import copy

        return copy.deepcopy(self.module, memo)


def _refuse_delayed(named_params: Any, param_to_hook: Any) -> None:
    if (named_params is None) != (param_to_hook is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.")
    if named_params is not None:
        names = ", ".join(name for name, _ in named_params)
        raise UsageError(
            f"delay_all_reduce_named_params ({names}) is not supported: it averages some gradients at another time than the "
            "rest. Leave it out; gradients that come late are sent at the end of the backward by themselves"
        )


def _group_of(device_mesh: Any, process_group: Any) -> "dist.ProcessGroup":
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    return device_mesh.get_group(mesh_dim=0)


def _check_module(module: nn.Module, members: "list[nn.Parameter]", device_ids: Any, output_device: Any) -> None:
    """torch's own checks, with its exceptions."""
    if not any(p.requires_grad for p in members):
        raise RuntimeError("DistributedDataParallel is not needed when a module doesn't have any parameter that requires "
                           "a gradient.")
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    types = {p.device.type for p in members}
    if len(types) != 1:
        raise ValueError("DistributedDataParallel's input module must be on the same type of devices, but input module "
                         f"parameters locate in {types}.")
    if types == {"cpu"} and (device_ids or output_device is not None):
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with GPU modules; this is on the CPU, "
            f"so leave them out (got device_ids {device_ids}, output_device {output_device})"
        )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in members):
        raise RuntimeError("Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a dummy "
                           "forward pass to correctly initialize the modules")
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        raise ValueError("SyncBatchNorm layers only work with GPU modules")
