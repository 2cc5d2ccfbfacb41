"""An optimizer's class, options and rate as numbers, which ranks compare in the first batch.

Averaged gradients keep equal variables equal only if every rank updates them in the same way. The
words are those of `hvdlite.torch.optimizers.options`, which compares optimizers of PyTorch.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from hvdlite.keras.distribution import with_inner

COUNT = 3  # All optimizers have as many numbers, so that ranks with different ones can compare.
_OF_ONE_RANK = {"name", "jit_compile", "is_legacy_optimizer", "inner_optimizer", "optimizers"}


def numbers_of(optimizer: Any) -> list[int]:
    """Return numbers for the class, the options without the rate, and the rate."""
    parts = with_inner(optimizer)
    options = [
        {key: value for key, value in _configuration(part).items() if key not in _OF_ONE_RANK}
        for part in parts
    ]
    for one in options:
        if not isinstance(one.get("learning_rate"), dict):
            one.pop("learning_rate", None)  # It is a number; a schedule is an option.
    titles = [type(part).__name__ for part in parts]
    return [_number(titles), _number(options), rate_bits(optimizer)]


def difference(numbers: Mapping[int, list[int]]) -> str | None:
    """Say in what optimizers differ, from the `numbers_of` each rank; None if in nothing."""
    (first, own), *others = numbers.items()
    for rank, theirs in others:
        if theirs[0] != own[0]:
            return f"the optimizers are of other classes on rank {first} and rank {rank}"
        if theirs[1] != own[1]:
            return f"options of the optimizer differ on rank {first} and rank {rank}"
    return rates_difference({rank: every[2] for rank, every in numbers.items()})


def rates_difference(rates: Mapping[int, int]) -> str | None:
    """Say which learning rates ranks have, from their `rate_bits`; None if all have the same."""
    ranks_of: dict[int, list[str]] = {}
    for rank, bits in rates.items():
        ranks_of.setdefault(bits, []).append(str(rank))
    if len(ranks_of) < 2:
        return None
    parts = [
        f"{_rate(bits):g} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
        for bits, ranks in ranks_of.items()
    ]
    return f"the learning rate is {' and '.join(parts)}"


def rate_bits(optimizer: Any) -> int:
    """Return the bits of the learning rate, rounded to float32; those of zero without a number."""
    rate = getattr(optimizer, "learning_rate", None)
    try:
        value = float(np.float32(keras.ops.convert_to_numpy(rate)))
    except (TypeError, ValueError):  # There is none, or a schedule of Keras 2.
        value = 0.0
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return int(bits)


def _rate(bits: int) -> float:
    (rate,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(rate)


def _configuration(optimizer: Any) -> dict[str, Any]:
    try:
        return dict(optimizer.get_config())
    except NotImplementedError:  # The user has written the optimizer.
        return {}


def _number(value: Any) -> int:
    text = json.dumps(value, sort_keys=True, default=_plain)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _plain(value: Any) -> Any:
    """Return a value whose text is the same on all ranks where the option is the same."""
    return value.item() if isinstance(value, np.generic) else type(value).__name__
