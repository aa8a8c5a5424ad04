"""``optimizer.state`` of a sharded optimizer: torch's mapping, with entries that are made when they are looked at, and with
note taken of what the user changes."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import torch

State = dict[str, Any]


class LazyState(collections.defaultdict):
    """By parameter, a dict of its state. Those announced are there, also to ``in``, ``len`` and iteration, and ``make`` gives
    them their value; a copy or a pickle is a plain defaultdict."""

    def __init__(self, make: "Callable[[torch.Tensor], State]", live: bool = False, complete: bool = True):
        super().__init__(dict)
        self._make = make
        self._complete = complete  # all that there will be is there before the first step
        self._live = live  # entries are what is stepped with, so that a value put into one needs no notice
        self._shown: dict[torch.Tensor, State] = {}  # what entries were when they were made
        self._edited: set[torch.Tensor] = set()

    def announce(self, parameter: torch.Tensor) -> None:
        """This parameter has state; what was shown of it before is out of date."""
        super().__setitem__(parameter, None)
        self._shown.pop(parameter, None)

    def take(self, parameter: torch.Tensor) -> State:
        """Takes an entry out, or {}; this is no edit."""
        entry = super().pop(parameter, None)
        self._edited.discard(parameter)
        return entry or {}

    def edits(self) -> "set[torch.Tensor]":
        """The parameters whose entries the user has set, removed, or given other values since the last call."""
        edited = self._edited
        for parameter, shown in self._shown.items():
            entry = super().get(parameter, shown)
            if entry.keys() != shown.keys() or any(entry[key] is not shown[key] for key in shown):
                edited.add(parameter)
        self._edited = set()
        return edited

    def __getitem__(self, parameter: torch.Tensor) -> State:
        entry = super().__getitem__(parameter)
        if entry is None:
            entry = self._make(parameter)
            super().__setitem__(parameter, entry)
            if not self._live:
                self._shown[parameter] = dict(entry)
        return entry

    def __setitem__(self, parameter: torch.Tensor, entry: State) -> None:
        super().__setitem__(parameter, entry)
        self._edited.add(parameter)
        self._shown.pop(parameter, None)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        super().__delitem__(parameter)
        self._edited.add(parameter)
        self._shown.pop(parameter, None)

    def __missing__(self, parameter: torch.Tensor) -> State:
        self[parameter] = entry = {}
        return entry

    def clear(self) -> None:
        for parameter in list(self):
            del self[parameter]

    def update(self, *others: Any, **_: Any) -> None:
        for parameter, entry in dict(*others).items():
            self[parameter] = entry

    def __ior__(self, other: Any) -> "LazyState":
        self.update(other)
        return self

    def __bool__(self) -> bool:
        return self._complete or len(self) > 0  # torch's get_state_dict steps an optimizer whose state is not, to fill it

    def __iter__(self) -> "Iterator[torch.Tensor]":
        return super().__iter__()  # that there is one keeps dict(state) and {**state} from copying entries unmade

    def _all(self) -> "LazyState":
        for parameter in self:
            self[parameter]
        return self

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        return self[parameter] if parameter in self else default

    def setdefault(self, parameter: torch.Tensor, default: Any = None) -> Any:
        if parameter not in self:
            self[parameter] = default
        return self[parameter]

    def items(self) -> Any:
        return super(LazyState, self._all()).items()

    def values(self) -> Any:
        return super(LazyState, self._all()).values()

    def pop(self, parameter: torch.Tensor, *default: Any) -> Any:
        if parameter not in self:
            return super().pop(parameter, *default)
        entry = self[parameter]
        del self[parameter]
        return entry

    def popitem(self) -> "tuple[torch.Tensor, State]":
        parameter = next(reversed(self))
        return parameter, self.pop(parameter)

    def __eq__(self, other: object) -> bool:
        return dict(self.items()) == other

    __hash__ = None

    def copy(self) -> Any:
        return collections.defaultdict(dict, self.items())

    __copy__ = copy

    def __reduce__(self) -> Any:
        return collections.defaultdict, (dict,), None, None, iter(self.items())

    def __repr__(self) -> str:
        return repr(self.copy())
