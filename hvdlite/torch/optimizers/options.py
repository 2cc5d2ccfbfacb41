"""An optimizer's class and options as numbers, which ranks compare with their first gradients.

Averaged gradients keep equal parameters equal only if every rank updates them in the same way.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any

COUNT = 4  # All optimizers have as many numbers, so that ranks with different ones can compare.
_OF_A_DEVICE = {"params", "foreach", "fused", "capturable", "differentiable", "param_names"}


def numbers_of(title: str, groups: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return numbers for the class, the options without rates, the first rate, and all rates."""
    options = [
        sorted((key, _plain(value)) for key, value in group.items() if key not in _OF_A_DEVICE)
        for group in groups
    ]
    rates = [value for group in options for key, value in group if key == "lr"]
    rates = [float(one) if isinstance(one, int | float) else one for one in rates]
    others = [[pair for pair in group if pair[0] not in ("lr", "initial_lr")] for group in options]
    first = rates[0] if rates and isinstance(rates[0], float) else 0.0
    (bits,) = struct.unpack("<q", struct.pack("<d", first))
    return [_number(title), _number(others), bits, _number(rates)]


def difference(numbers: Mapping[int, list[int]]) -> str | None:
    """Say in what the optimizers of ranks differ, by `numbers_of` each rank; None if in nothing."""
    (first, own), *others = numbers.items()
    for rank, theirs in others:
        what = next((i for i in range(COUNT) if theirs[i] != own[i]), None)
        if what is None:
            continue
        texts = (
            "the optimizers are of other classes",
            "options of the optimizer differ",
            f"the learning rate is {_rate(own)} on rank {first} and {_rate(theirs)}",
            "learning rates of later param_groups differ",
        )
        between = f" on rank {rank}" if what == 2 else f" on rank {first} and rank {rank}"
        return texts[what] + between
    return None


def _rate(numbers: list[int]) -> str:
    (rate,) = struct.unpack("<d", struct.pack("<q", numbers[2]))
    return f"{rate:g}"


def _plain(value: Any) -> Any:
    """Return a value whose text is the same on all ranks where the option is the same."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(_plain(one) for one in value)
    return type(value).__name__  # A tensor, for example, may be on a device.


def _number(value: Any) -> int:
    digest = hashlib.sha256(repr(value).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
