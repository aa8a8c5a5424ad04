"""``optimizer.state`` of a sharded optimizer: torch's mapping, with entries that are made when they are looked at."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import torch

State = dict[str, Any]


class LazyState(collections.defaultdict):
    """By parameter, a dict of its state. Those announced are there, also to ``in``, ``len`` and iteration, and ``make`` gives
    them their value; a copy or a pickle is a plain defaultdict."""

    def __init__(self, make: "Callable[[torch.Tensor], State]"):
        super().__init__(dict)
        self._make = make

    def announce(self, parameter: torch.Tensor) -> None:
        """This parameter has state; what was shown of it before is out of date."""
        super().__setitem__(parameter, None)

    def __getitem__(self, parameter: torch.Tensor) -> State:
        entry = super().__getitem__(parameter)
        if entry is None:
            entry = self._make(parameter)
            super().__setitem__(parameter, entry)
        return entry

    def __bool__(self) -> bool:
        return True  # torch's get_state_dict steps an optimizer whose state is not, to fill it

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
        if parameter in self:
            self[parameter]
        return super().pop(parameter, *default)

    def popitem(self) -> "tuple[torch.Tensor, State]":
        return super(LazyState, self._all()).popitem()

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
