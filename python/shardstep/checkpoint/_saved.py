"""What is in a checkpoint, by name, in either of its forms: torch.distributed.checkpoint's, or whole files of torch.save."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardstep._errors import CheckpointError
from shardstep._flat_shard import FlatShard
from shardstep.checkpoint._storage import read, read_metadata

MODEL = "model"
OPTIMIZER = "optimizer"
OPTIMIZER_NAMES = (OPTIMIZER, "optim")  # as others call it
MODEL_FILE = "model.pt"


def optimizer_file(k: int) -> str:
    """The name of the k-th optimizer's file."""
    return f"optimizer-{k}.pt" if k > 0 else "optimizer.pt"


class Saved:
    """A checkpoint's table of contents. ``entries``: size and type of each tensor, None for what is no tensor; under keys such
    as ``model.fc.weight`` and ``optimizer.state.fc.weight.exp_avg``. ``paths``: those keys taken apart. ``read``: loads into
    the tensors of a dict, by key, in place, and replaces what is no tensor."""

    def __init__(
        self,
        entries: "dict[str, tuple[torch.Size, torch.dtype] | None]",
        paths: "dict[str, tuple]",
        read: "Callable[[dict[str, Any]], None]",
    ):
        self.entries, self._paths, self.read = entries, paths, read
        first_two = {tuple(key.split(".", 2)[:2]) for key in entries}
        self._section = next((s for s in OPTIMIZER_NAMES if first_two & {(s, "state"), (s, "param_groups")}), None)
        if not any(key.startswith(f"{MODEL}.") for key in entries):
            there = ", ".join(sorted({key.split(".")[0] for key in entries})[:5])
            raise CheckpointError(f"it has no {MODEL!r}, but {there or 'nothing'}")
        self._states: dict[str, dict[str, str]] = {}
        prefix = f"{self._section}.state."
        for where in entries:
            if where.startswith(prefix):
                name, _, key = where[len(prefix) :].rpartition(".")
                self._states.setdefault(name, {})[key] = where

    def model_keys(self) -> list[str]:
        return [key for key in self.entries if key.startswith(f"{MODEL}.")]

    def object_keys(self, name: str) -> list[str]:
        """Where the parts of an object in the model's state are: DCP takes dicts apart. An empty one leaves no trace."""
        key = f"{MODEL}.{name}"
        return [where for where in self.entries if where == key or where.startswith(f"{key}.")]

    def rebuilt(self, parts: "dict[str, Any]") -> Any:
        """The object of these parts."""
        root: dict[str, Any] = {}
        for where, value in parts.items():
            set_element(root, ("object", *self._paths[where][2:]), value)
        return root["object"]

    def states(self, name: str) -> "dict[str, str]":
        """The keys of a parameter's optimizer state, and where each is."""
        return self._states.get(name, {})

    def size(self, key: str) -> "torch.Size | None":
        """None for what is not there, or is no tensor."""
        entry = self.entries.get(key)
        return entry[0] if entry is not None else None

    def dtype(self, key: str) -> torch.dtype:
        """Of a tensor that is there."""
        return self.entries[key][1]

    def target(self, key: str) -> "torch.Tensor | None":
        """A new tensor to load what is there into; None for what is no tensor."""
        entry = self.entries[key]
        return torch.empty(entry[0], dtype=entry[1]) if entry is not None else None

    def options(self) -> "dict[str, dict[str, Any]]":
        """Each parameter's options in its param group, from either of torch's two forms: groups with a list of names, or
        options by name (``flatten_optimizer_state_dict=True``)."""
        if self._section is None:
            raise CheckpointError("it has no optimizer state; load the model alone, without an optimizer")
        prefix = f"{self._section}.param_groups."
        tree = {key: self.target(key) for key in self.entries if key.startswith(prefix)}
        self.read(tree)
        groups: dict[str, dict[str, Any]] = {}
        for key, value in tree.items():
            owner, _, option = key[len(prefix) :].rpartition(".")
            groups.setdefault(owner, {})[option] = value
        options = {}
        for owner, group in groups.items():
            names = group.pop("params", None)
            for name in [owner] if names is None else names:
                options[name] = group
        return options


def open_distributed(folder: Path) -> Saved:
    metadata = read_metadata(folder)
    entries = {
        key: (entry.size, entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.state_dict_metadata.items()
    }
    return Saved(entries, metadata.planner_data or {}, partial(read, folder, metadata))


def open_whole(folder: Path) -> Saved:
    """The files are mapped, not read: a rank reads what it asks for."""
    values: dict[tuple, Any] = {(MODEL, name): value for name, value in _mapped(folder / MODEL_FILE).items()}
    files = [path for k in range(1000) if (path := folder / optimizer_file(k)).exists()]
    groups: list[dict[str, Any]] = []
    for path in files:
        saved = _mapped(path)
        names = {k: n for group in saved["param_groups"] for k, n in zip(group["params"], group["param_names"])}
        for position, state in saved["state"].items():
            values.update({(OPTIMIZER, "state", names[position], key): value for key, value in state.items()})
        groups += [{**group, "params": group.pop("param_names")} for group in saved["param_groups"]]
    for k, group in enumerate(groups):
        values.update({(OPTIMIZER, "param_groups", k, option): value for option, value in group.items()})
    paths = {".".join(map(str, path)): path for path in values}
    by_key = {key: values[path] for key, path in paths.items()}
    entries = {key: (v.shape, v.dtype) if isinstance(v, torch.Tensor) else None for key, v in by_key.items()}

    def copy(tree: "dict[str, Any]") -> None:
        for key, target in tree.items():
            if isinstance(target, FlatShard):
                target.local.copy_(target.cut.of(by_key[key]))
            elif isinstance(target, torch.Tensor):
                target.copy_(by_key[key])
            else:
                tree[key] = by_key[key]

    return Saved(entries, paths, copy)


def _mapped(path: Path) -> "dict[str, Any]":
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} is refused: {type(error).__name__}: {str(error).splitlines()[0]}") from error
