"""Which parameters of a module are trained, by name; that they can be, and that they are still where they were."""

import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardstep._errors import UsageError

#: What parameters can be, and how the extension stores them: complex ones as pairs of real numbers.
DTYPES = {
    torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.complex64: 0, torch.complex128: 1
}


class Registry:
    """The parameters of a module: ``names``, ``params`` (each once, as registered), ``index`` (by id), and the ids of those
    to be ``ignored``; ``module`` is held weakly. ``taken``: the indices of models that are wrapped already.

    Raises UsageError."""

    def __init__(self, module: nn.Module, ignored: "Iterable[torch.Tensor]", taken: "Sequence[Mapping[int, int]]"):
        self.ignored = {id(p) for p in ignored}
        self.names: list[str] = []
        self.params: list[nn.Parameter] = []
        meta = []
        for name, parameter in module.named_parameters():
            if id(parameter) in self.ignored or parameter.dtype not in DTYPES:
                if parameter.requires_grad and id(parameter) not in self.ignored:
                    raise UsageError(
                        f"parameter {name!r} is {parameter.dtype}, which shardstep cannot train; "
                        f"supported are {', '.join(str(d) for d in DTYPES)}"
                    )
                continue
            if parameter.is_meta:
                meta.append(name)
                continue
            _check_parameter(name, parameter)
            if any(id(parameter) in index for index in taken):
                raise UsageError(
                    f"parameter {name!r} belongs to a model that is wrapped already; wrap a model once, and submodules "
                    "that two models share only with one of them (pass them in ignored_params for the other)"
                )
            refuse_fused_in_backward(name, parameter)
            self.names.append(name)
            self.params.append(parameter)
        if meta:
            raise UsageError(
                f"parameters on the meta device have no values to train: {', '.join(meta[:10])}"
                f"{' and more' if len(meta) > 10 else ''}; materialise the model (to_empty and an initialisation, or "
                "load_state_dict(assign=True)) before wrapping it"
            )
        _refuse_overlaps(self.names, self.params)
        self.index = {id(p): i for i, p in enumerate(self.params)}
        self.module = weakref.ref(module)
        self._find()

    def check(self) -> None:
        """Raises when a parameter was replaced or added since. Cheap when none was."""
        if self._held != sum(map(len, self._holders)) or not self.unchanged():
            self._find()

    def unchanged(self) -> bool:
        """Is every parameter where it was?"""
        owners, keys, members = self._registrations
        return all(map(operator.is_, map(dict.get, owners, keys), members))

    def _find(self) -> None:
        """Notes every place where a module holds one of our parameters, and every submodule on the way there, to notice
        replacements and additions cheaply. Raises when one of them is gone, or when there is another."""
        module = self.module()
        places: list[tuple[dict, str, Any]] = []  # a dict of a module's, a key, and what must be there
        holders: list[dict] = []
        found: set[int] = set()

        def visit(part: nn.Module) -> bool:
            if isinstance(part, torch.jit.ScriptModule):  # its members are C++'s and cannot be replaced
                found.update(id(p) for p in part.parameters())
                return False
            holders.extend((part._parameters, part._modules))
            ours = [(part._parameters, key, p) for key, p in part._parameters.items() if id(p) in self.index]
            found.update(id(p) for _, _, p in ours)
            below = [(part._modules, key, m) for key, m in part._modules.items() if m is not None and visit(m)]
            places.extend(ours + below)
            return bool(ours or below)

        visit(module)
        gone = [name for name, p in zip(self.names, self.params) if id(p) not in found]
        if gone:
            raise UsageError(
                f"parameter {gone[0]!r} was replaced or removed after wrapping, so its gradients are no longer synchronised; "
                "copy into the existing parameter (parameter.data.copy_), or unwrap(), change the model and wrap it again"
            )
        for name, p in module.named_parameters():
            if p.requires_grad and id(p) not in self.index and id(p) not in self.ignored:
                raise UsageError(
                    f"parameter {name!r} was added after wrapping, so its gradients are not synchronised; add it before "
                    "wrapping, or unwrap(), change the model and wrap it again"
                )
        self._registrations = tuple(zip(*places)) or ((), (), ())
        self._holders, self._held = holders, sum(map(len, holders))


def _check_parameter(name: str, parameter: torch.Tensor) -> None:
    if parameter.layout != torch.strided:
        raise UsageError(f"parameter {name!r} has layout {parameter.layout}; only dense parameters can be sharded")
    if not (parameter.is_cpu or parameter.is_cuda):
        raise UsageError(f"parameter {name!r} is on {parameter.device}; shardstep trains on CPUs and CUDA GPUs")
    if not parameter.is_leaf:
        raise UsageError(f"parameter {name!r} is not a leaf of autograd's graph")
    if isinstance(parameter, nn.parameter.UninitializedTensorMixin):
        raise UsageError(f"parameter {name!r} is not initialised (a lazy module): run one forward before wrapping")


def refuse_fused_in_backward(name: str, parameter: torch.Tensor) -> None:
    """torch's ``_apply_optimizer_in_backward`` steps with the gradient of one rank, as soon as it is there."""
    optimizers = getattr(parameter, "_in_backward_optimizers", ())
    if optimizers:
        raise UsageError(
            f"parameter {name!r} has {type(optimizers[0]).__name__} fused into its backward "
            "(_apply_optimizer_in_backward), which would step with the gradient of this rank alone; step the optimizer after "
            "the backward instead"
        )


def _refuse_overlaps(names: "list[str]", params: "list[nn.Parameter]") -> None:
    spans = []
    for name, p in zip(names, params):
        size = p.nbytes
        if not p.is_contiguous():
            extent = 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride()))
            if extent < p.numel():
                raise UsageError(f"the elements of parameter {name!r} overlap in memory (an expanded tensor); clone it first")
            size = extent * p.element_size()
        if size > 0:
            begin = p.data_ptr()
            spans.append((begin, begin + size, name))
    spans.sort()
    for (_, end, first), (begin, _, second) in zip(spans, spans[1:]):
        if begin < end:
            raise UsageError(
                f"parameters {first!r} and {second!r} overlap in memory but are not the same Parameter; tie weights by "
                "assigning one Parameter to both modules"
            )
