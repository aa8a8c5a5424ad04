"""Mixed precision: what ``param_dtype`` and FSDP2's ``MixedPrecisionPolicy`` ask of a forward."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from shardstep._errors import UsageError

LOW = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Precision:
    """``param_dtype``: of the parameters in the model; None leaves each as it is. ``input_dtype``, ``output_dtype``: what
    floating-point tensors are cast to at the root's forward; None leaves them. FP64 parameters stay as they are, and
    with ``keep_double``, in a model that has some, so do FP64 inputs. Gradients are summed in FP32 in any case."""

    param_dtype: "torch.dtype | None" = None
    input_dtype: "torch.dtype | None" = None
    output_dtype: "torch.dtype | None" = None
    keep_double: bool = False

    @staticmethod
    def of(param_dtype: "torch.dtype | None", policy: Any) -> "Precision":
        """From the options of :func:`shardstep.wrap`. Raises UsageError when they contradict each other."""
        if policy is None:
            _check("param_dtype", param_dtype, (*LOW, torch.float32))
            return Precision(param_dtype, param_dtype, None)
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if not isinstance(policy, MixedPrecisionPolicy):
            raise UsageError(
                f"mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy, not {type(policy).__name__}"
            )
        if param_dtype is not None and param_dtype != policy.param_dtype:
            raise UsageError(
                f"param_dtype={param_dtype} contradicts mp_policy, whose param_dtype is {policy.param_dtype}; pass one of them"
            )
        _check("mp_policy's param_dtype", policy.param_dtype, (*LOW, torch.float32))
        _check("mp_policy's reduce_dtype", policy.reduce_dtype, (*LOW, torch.float32))
        _check("mp_policy's output_dtype", policy.output_dtype, (*LOW, torch.float32, torch.float64))
        return Precision(
            policy.param_dtype, policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype
        )

    def keeping_double(self) -> "Precision":
        return dataclasses.replace(self, keep_double=True)

    def cast_inputs(self, tree: Any) -> Any:
        if self.input_dtype is None:
            return tree
        kept = torch.float64 if self.keep_double else None
        return map_tensors(lambda t: t.to(self.input_dtype) if t.is_floating_point() and t.dtype != kept else t, tree)

    def cast_output(self, tree: Any) -> Any:
        if self.output_dtype is None:
            return tree
        return map_tensors(lambda t: t.to(self.output_dtype) if t.is_floating_point() else t, tree)


def compute_dtype(config: Any) -> "torch.dtype | None":
    """What torch DDP's ``mixed_precision=`` computes in; None as it is. Raises UsageError when it is none of its kind."""
    if config is None:
        return None
    from torch.nn.parallel.distributed import _MixedPrecision

    if not isinstance(config, _MixedPrecision):
        raise UsageError(
            f"mixed_precision must be a torch.nn.parallel.distributed._MixedPrecision, not {type(config).__name__}"
        )
    for field in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        _check(f"mixed_precision's {field}", getattr(config, field), (*LOW, torch.float32))
    return config.param_dtype


def _check(name: str, dtype: Any, allowed: "tuple[torch.dtype, ...]") -> None:
    if dtype is not None and dtype not in allowed:
        raise UsageError(f"{name} must be one of {', '.join(map(str, allowed))}, not {dtype}")


def map_tensors(function: "Callable[[torch.Tensor], Any]", tree: Any) -> Any:
    """``tree`` with its tensors replaced, through dicts, sequences, sets, named tuples, dataclasses and packed sequences.
    Containers in which nothing changes come back as they are, so that their identity and class hold."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, PackedSequence):
        data = function(tree.data)
        return tree if data is tree.data else PackedSequence(data, *tree[1:])
    if isinstance(tree, dict):
        changed = {key: new for key, old in tree.items() if (new := map_tensors(function, old)) is not old}
        if not changed:
            return tree
        if type(tree) is dict:
            return {**tree, **changed}
        result = dataclasses.replace(tree) if dataclasses.is_dataclass(tree) else tree.copy()
        for key, value in changed.items():
            result[key] = value
        return result
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        values = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.init}
        changed = {name: new for name, old in values.items() if (new := map_tensors(function, old)) is not old}
        return dataclasses.replace(tree, **changed) if changed else tree
    if isinstance(tree, (list, tuple, set)):
        values = [map_tensors(function, value) for value in tree]
        if all(new is old for new, old in zip(values, tree)):
            return tree
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def tensors_in(value: Any, depth: int = 8) -> "Iterator[torch.Tensor]":
    """The tensors in what a forward returned: containers, mappings, dataclasses and plain objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 0 and not isinstance(value, (str, bytes, nn.Module, type)):
        if isinstance(value, Mapping):
            parts: Iterable[Any] = value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts = value
        else:
            slots = getattr(value, "__dataclass_fields__", ())
            parts = [getattr(value, name, None) for name in slots] or getattr(value, "__dict__", {}).values()
        for part in list(parts):
            yield from tensors_in(part, depth - 1)
