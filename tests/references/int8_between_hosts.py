"""An allreduce with Compression.int8 in one process, which gives the bits of the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from references.sum_tree import reduce_by_tree

BLOCK = 256
_LEAST = np.float32(2.0**-119)  # A block of smaller magnitudes is zeros.


def unpacked(numbers: Any) -> Any:
    """Pack a flat float32 array, and return what a rank unpacks."""
    blocks = [_block(numbers[i : i + BLOCK]) for i in range(0, len(numbers), BLOCK)]
    return np.concatenate([np.zeros(0, np.float32), *blocks])


def _block(numbers: Any) -> Any:
    if not np.isfinite(numbers).all():
        return np.full_like(numbers, np.nan)
    most = np.abs(numbers).max()
    if most < _LEAST:
        return np.zeros_like(numbers)
    inverse, scale = np.float32(127) / most, most / np.float32(127)
    return np.rint(numbers * inverse) * scale


def allreduce(
    tensors: Sequence[Any],
    hosts: Sequence[int],
    average: bool = True,
    postscale: float = 1.0,
    shares: Sequence[float] | None = None,
) -> Any:
    """Reduce the ranks' float32 arrays, which have the same shape."""
    # `hosts` has, by rank, the number of its host; the first rank of each is on a host of its own.
    # In a weighted average the ranks have `shares`, and `average` is False.
    members: dict[int, list[Any]] = {}
    for rank, (tensor, host) in enumerate(zip(tensors, hosts, strict=True)):
        flat = tensor.reshape(-1) * np.float32(1 if shares is None else shares[rank])
        members.setdefault(host, []).append(flat)
    parts = [reduce_by_tree(flats, np.add) for flats in members.values()]
    total = np.zeros(tensors[0].size, np.float32)
    for part in parts if len(parts) > 1 else ():
        total += unpacked(part)
    if len(parts) == 1:
        total = parts[0]
    if average:
        total = total / np.float32(len(tensors))
    total = total * np.float32(postscale)
    return (unpacked(total) if len(parts) > 1 else total).reshape(tensors[0].shape)
