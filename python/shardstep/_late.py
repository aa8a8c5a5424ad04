"""Numbers that are made on a device while the host goes on."""

from typing import Any

import torch


class Late:
    """An attribute that may be set to a tensor of one element on a device: whoever reads it first waits for the device and
    gets a number; who does not read it does not wait."""

    def __init__(self, kind: type):
        self.kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self.slot = f"_late_{name}"

    def __get__(self, owner: Any, cls: "type | None" = None) -> Any:
        if owner is None:
            return self
        value = owner.__dict__[self.slot]
        if isinstance(value, torch.Tensor):
            value = owner.__dict__[self.slot] = self.kind(value.item())
        return value

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__[self.slot] = value

    def add(self, owner: Any, value: Any) -> None:
        """As ``owner.attribute += value``, without reading it."""
        owner.__dict__[self.slot] = owner.__dict__[self.slot] + value
