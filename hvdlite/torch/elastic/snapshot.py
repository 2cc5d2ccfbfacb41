"""A copy of a state_dict, in buffers that are used again for the next copy."""

from __future__ import annotations

import copy
from typing import Any

import torch


class Snapshot:
    """Copies nested dicts, lists and tuples of tensors and other values."""

    # Tensors are copied into the buffers of the copy before, on the same device: new memory for
    # each copy costs several times the time.

    def __init__(self) -> None:
        self._copied: Any = None

    def take(self, value: Any) -> None:
        """Copy a value, in place of the copy before."""
        with torch.no_grad():
            self._copied = self._copy_into(self._copied, value)

    def copy(self) -> Any:
        """Return a copy of the copy, which callers may change."""
        with torch.no_grad():
            return _clone(self._copied)

    def _copy_into(self, old: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _copy_tensor(old, value)
        if isinstance(value, dict):
            before = old if isinstance(old, dict) else {}
            copied = copy.copy(value)  # This keeps the metadata of a module's state_dict.
            for key, item in value.items():
                copied[key] = self._copy_into(before.get(key), item)
            return copied
        if type(value) in (list, tuple):
            same = type(old) is type(value) and len(old) == len(value)
            return type(value)(map(self._copy_into, old if same else [None] * len(value), value))
        return copy.deepcopy(value)


def _copy_tensor(old: Any, tensor: torch.Tensor) -> torch.Tensor:
    reusable = (
        isinstance(old, torch.Tensor)
        and (old.shape, old.dtype, old.device) == (tensor.shape, tensor.dtype, tensor.device)
        and old.layout == tensor.layout == torch.strided
    )
    return old.copy_(tensor) if reusable else tensor.detach().clone()


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        cloned = copy.copy(value)
        for key, item in value.items():
            cloned[key] = _clone(item)
        return cloned
    if type(value) in (list, tuple):
        return type(value)(map(_clone, value))
    return copy.deepcopy(value)
