"""What a wrapped model and its optimizers have to save, and where what is loaded goes: by the names of the plain model.

The tree is that of torch's ``get_state_dict``, so that any program with DCP can read it; but a parameter with an FP32 master
is saved as that, and every large tensor as the part of it that this rank writes.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import _get_fqns, get_model_state_dict
from torch.optim import Optimizer

from shardstep._engine import Engine
from shardstep._errors import CheckpointError, UsageError
from shardstep._flat_shard import Cut, FlatShard, is_dense, memory_order
from shardstep._module import Synchronised
from shardstep._optim import ShardedOptimizer
from shardstep._rules import MASTER, SCALAR_STATE
from shardstep.checkpoint._saved import MODEL, MODEL_FILE, OPTIMIZER, Saved, optimizer_file

EXTRA_STATE = "_extra_state"


class Pair:
    """A wrapped model and its optimizers, with names. Raises UsageError where they are not."""

    def __init__(self, model: Any, optimizers: "Optimizer | Iterable[Optimizer] | None"):
        if not isinstance(model, Synchronised):
            raise UsageError(f"the model, a {type(model).__name__}, is not wrapped: pass what shardstep.wrap() returned")
        self.model = model
        self.engine: Engine = model._engine
        if optimizers is None:
            optimizers = ()
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        for optimizer in self.optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                if optimizer._attached() is not self.engine:
                    raise UsageError("this optimizer belongs to another model")
            elif self.engine.sharded or not isinstance(optimizer, Optimizer):
                raise UsageError(
                    f"the optimizer, a {type(optimizer).__name__}, is not the model's: pass what shardstep.wrap() returned"
                )
        self.names = self._names()
        self.name_of = {id(parameter): name for name, parameter in reversed(self.names.items())}

    def _names(self) -> "dict[str, torch.nn.Parameter]":
        """Every name of every parameter, as in the plain model; of tied ones the first is what optimizers know."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {fqn: parameter for name, parameter in named for fqn in _get_fqns(self.model, name)}

    def placed(self, parameter: torch.Tensor) -> "int | None":
        """Its index when this rank owns a part of its master and state."""
        i = self.engine.index.get(id(parameter)) if self.engine.sharded else None
        return i if i is not None and self.engine.placed(i) else None

    # -- saving -------------------------------------------------------------------------------------------------------

    def to_save(self) -> "dict[str, Any]":
        """What this rank writes for torch.distributed.checkpoint. The tensors are those of the training, not copies. What is
        alike on all ranks and small is rank 0's to write."""
        first = self.engine.group.rank == 0
        tree: dict[str, Any] = {MODEL: self.model_to_save()}
        if self.optimizers:
            tree[OPTIMIZER] = {"state": {}, **({"param_groups": []} if first else {})}  # an empty list is saved as one
        for optimizer in self.optimizers:
            state, groups = self.optimizer_to_save(optimizer)
            names = [name for name, _ in self._parameters(optimizer)]
            tree[OPTIMIZER]["state"].update({names[position]: values for position, values in state.items()})
            if first:
                groups = [{**group, "params": [names[k] for k in group["params"]]} for group in groups]
                tree[OPTIMIZER]["param_groups"] += groups
        return tree

    def model_to_save(self) -> "dict[str, Any]":
        """By name. What of a tied parameter is one object under all its names."""
        first = self.engine.group.rank == 0
        shards: dict[int, FlatShard] = {}
        model: dict[str, Any] = {}
        for name, value in get_model_state_dict(self.model).items():
            parameter = self.names.get(name)
            if parameter is not None and id(parameter) in shards:
                model[name] = shards[id(parameter)]
            elif parameter is not None and self.placed(parameter) is not None:
                model[name] = shards[id(parameter)] = self._master(self.placed(parameter))
            elif parameter is not None and parameter.numel() > 0 and is_dense(value):
                model[name] = shards[id(parameter)] = self._even_part(value)
            elif first:
                model[name] = value
        return model

    def optimizer_to_save(self, optimizer: Optimizer) -> "tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]":
        """torch's state, by position, and param groups; masters are the model's."""
        first = self.engine.group.rank == 0
        saved = optimizer.state_to_save() if isinstance(optimizer, ShardedOptimizer) else optimizer.state_dict()
        state = {
            position: {
                key: value for key, value in values.items() if key != MASTER and (first or isinstance(value, FlatShard))
            }
            for position, values in saved["state"].items()
        }
        return state, saved["param_groups"]

    def whole_to_save(self) -> "dict[str, Any]":
        """What this rank has of files that hold everything, as torch.save writes them: by the file's name."""
        files: dict[str, Any] = {MODEL_FILE: self.model_to_save()}
        for k, optimizer in enumerate(self.optimizers):
            state, groups = self.optimizer_to_save(optimizer)
            names = [name for name, _ in self._parameters(optimizer)]
            groups = [{**group, "param_names": [names[k] for k in group["params"]]} for group in groups]
            files[optimizer_file(k)] = {"state": state, "param_groups": groups}
        return files

    def buffers(self) -> "dict[str, torch.Tensor]":
        """What is saved of the model and is no parameter."""
        state = get_model_state_dict(self.model)
        return {name: value for name, value in state.items() if name not in self.names and isinstance(value, torch.Tensor)}

    def _master(self, i: int) -> FlatShard:
        slot = self.engine.slots[i]
        piece = slot["piece_master"] if slot["piece_master"] is not None else slot["piece_param"]
        return self.engine.shard(i, piece)

    def _even_part(self, tensor: torch.Tensor) -> FlatShard:
        """A parameter that all ranks have whole: each writes an equal part."""
        rank, world = self.engine.group.rank, self.engine.group.world
        begin, end = (tensor.numel() * r // world for r in (rank, rank + 1))
        cut = Cut(tensor.shape, begin, end - begin, memory_order(tensor))
        return FlatShard(cut.of(tensor), cut)

    # -- loading ------------------------------------------------------------------------------------------------------

    def prepare(self, saved: Saved) -> "Callable[[], None]":
        """What loads everything that the checkpoint has of this pair. Local; :meth:`gather` comes after it. Raises
        CheckpointError, naming the parameter, when something is missing or of another shape; nothing is changed until then."""
        extra_states = self._extra_states()
        tree = self._model_targets(saved, extra_states)
        states = [self._state_targets(optimizer, saved, tree) for optimizer in self.optimizers]
        options = saved.options() if self.optimizers else {}
        groups = [self._groups(optimizer, options) for optimizer in self.optimizers]

        def load() -> None:
            saved.read(tree)
            for name, module in extra_states.items():
                keys = saved.object_keys(name)
                if keys:
                    module.set_extra_state(saved.rebuilt({key: tree[key] for key in keys}))
            for optimizer, state, group in zip(self.optimizers, states, groups):
                loaded = {position: {key: tree[where] for key, where in keys.items()} for position, keys in state.items()}
                optimizer.load_state_dict({"state": loaded, "param_groups": group})

        return load

    def gather(self) -> None:
        """Sends what each rank has loaded of the parameters to the others. Collective."""
        if self.engine.sharded:
            self.engine.send_weights()

    def _extra_states(self) -> "dict[str, torch.nn.Module]":
        """The modules that override ``get_extra_state``, by what it is saved as."""
        theirs = {}
        for prefix, module in self.model.named_modules():
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                for fqn in _get_fqns(self.model, f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE):
                    theirs[fqn] = module
        return theirs

    def _model_targets(self, saved: Saved, extra_states: "dict[str, torch.nn.Module]") -> "dict[str, Any]":
        tree: dict[str, Any] = {}
        wrong = []
        state = get_model_state_dict(self.model)
        for name, value in state.items():
            key = f"{MODEL}.{name}"
            if name in extra_states:
                tree.update({part: saved.target(part) for part in saved.object_keys(name)})
                continue
            size = saved.size(key)
            if size is None:
                wrong.append(f"it has no {name!r}")
            elif size != value.shape:
                wrong.append(f"{name!r} is of shape {tuple(size)} there and of {tuple(value.shape)} here")
            elif saved.dtype(key).is_complex != value.is_complex():
                wrong.append(f"{name!r} is {saved.dtype(key)} there and {value.dtype} here")
            i = self.placed(self.names[name]) if name in self.names else None
            if i is None:
                tree[key] = value
            else:
                # get_state_dict has masters beside weights of low precision, under the first of a tied parameter's names.
                master = saved.states(self.name_of[id(self.names[name])]).get(MASTER)
                tree[master or key] = self._master(i)
        known = {f"{MODEL}.{name}" for name in state}.union(tree)
        wrong += [f"the model has no {key.removeprefix(MODEL)[1:]!r}" for key in saved.model_keys() if key not in known]
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise CheckpointError(f"the checkpoint is of another model: {'; '.join(wrong[:5])}{more}")
        return tree

    def _parameters(self, optimizer: Optimizer) -> "list[tuple[str, torch.Tensor]]":
        everyone = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in everyone:
            if id(parameter) not in self.name_of:
                raise UsageError(f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's")
        return [(self.name_of[id(parameter)], parameter) for parameter in everyone]

    def load_buffers(self, buffers: "dict[str, torch.Tensor]") -> None:
        for name, value in self.buffers().items():
            if name in buffers:
                value.copy_(buffers[name])

    def _state_targets(self, optimizer: Optimizer, saved: Saved, tree: "dict[str, Any]") -> "dict[int, dict[str, str]]":
        """Where in ``tree`` each parameter's state will be, by position. What the optimizer has already is loaded in place."""
        states: dict[int, dict[str, str]] = {}
        for position, (name, parameter) in enumerate(self._parameters(optimizer)):
            keys = states[position] = {key: where for key, where in saved.states(name).items() if key != MASTER}
            i = self.placed(parameter)
            for key, where in keys.items():
                scalar = parameter.dim() == 0 and key in SCALAR_STATE
                if i is None or scalar or saved.size(where) != parameter.shape:
                    tree[where] = saved.target(where)
                    continue
                held = optimizer._rule.to_save(i).get(key)
                if isinstance(held, torch.Tensor) and held.shape == (self.engine.slots[i]["numel"],):
                    tree[where] = self.engine.shard(i, held)
                else:
                    cut = self.engine.cut(i)
                    tree[where] = FlatShard(torch.empty(cut.numel, dtype=saved.dtype(where)), cut)
        return states

    def _groups(self, optimizer: Optimizer, options: "dict[str, dict[str, Any]]") -> "list[dict[str, Any]]":
        """The optimizer's groups with the options that their parameters were saved with. A group of which nothing was saved
        keeps its own."""
        groups, position = [], 0
        for group in optimizer.param_groups:
            names = [self.name_of[id(parameter)] for parameter in group["params"]]
            known = [name for name in names if name in options]
            for name in known[1:]:
                for option, value in options[known[0]].items():
                    if option not in options[name] or not _equal(value, options[name][option]):
                        raise CheckpointError(
                            f"parameters {known[0]!r} and {name!r} are in one param group here, but were saved with different "
                            f"values of {option!r}: {value!r} and {options[name].get(option)!r}"
                        )
            own = {key: value for key, value in group.items() if key != "params"}
            members = list(range(position, position + len(names)))
            groups.append({**own, **(options[known[0]] if known else {}), "params": members})
            position += len(names)
        return groups


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b)))
    return bool(a == b)
