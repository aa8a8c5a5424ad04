"""In-place edits of reduced gradients (``clamp_``, ``nan_to_num_``, ...), as ranks repeat them that came into
their step without any gradient: the call that the others made found nothing there."""

from collections.abc import Callable
from typing import Any

import torch

from shardstep._errors import MismatchError

#: Parameter, the scale that was pending, method of torch.Tensor, its arguments. None: this cannot be told to another rank.
Edit = tuple[int, float, str, tuple, dict[str, Any]]


def edit_of(i: int, scale: float, function: "Callable[..., Any]", args: tuple, kwargs: "dict[str, Any]") -> "Edit | None":
    plain = [_plain(value) for value in args], {key: _plain(value) for key, value in kwargs.items()}
    if NotImplemented in plain[0] or NotImplemented in plain[1].values():
        return None
    return i, scale, function.__name__, tuple(plain[0]), plain[1]


def _plain(value: Any) -> Any:
    if type(value) is torch.Tensor and value.dim() == 0:
        return value.item()
    return value if value is None or isinstance(value, (bool, int, float, complex, str)) else NotImplemented


class Edits:
    """Those made on this rank since gradients were reduced; the engine counts them and forgets them."""

    def __init__(self):
        self._log: list[Edit | None] = []

    def note(self, count: int, edit: "Edit | None") -> None:
        """The ``count``-th."""
        del self._log[count - 1 :]
        self._log += [None] * (count - 1 - len(self._log))
        self._log.append(edit)

    def first(self, count: int) -> "list[Edit | None]":
        known = self._log[:count]
        return known + [None] * (count - len(known))


def refuse_unknown(log: "list[Edit | None]", rank: int) -> None:
    if None in log:
        raise MismatchError(
            f"rank {rank} changed reduced gradients in place with other tensors, or assigned new ones, and a rank that had no "
            "backward in this window cannot repeat that; edit them by numbers only (clamp_, nan_to_num_, ...), or run a "
            "backward on every rank"
        )
