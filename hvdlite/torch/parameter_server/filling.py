"""The first values of a table that only servers hold."""

from __future__ import annotations

import hashlib

import torch

from hvdlite.parameter_server.placement import Part

# So many rows come from one generator, so that values do not depend on the placement.
_BLOCK = 4096


def fill(part: Part, values: torch.Tensor) -> None:
    """Fill a part's zeroed rows with normally distributed values if its tensor is to be filled."""
    filling = part.spec.filling
    if filling is None or filling.std == 0:
        # For a deviation of 0 memory that nobody has touched is zero, and costs nothing.
        return
    end = part.first + part.rows
    for block in range(part.first // _BLOCK, -(-end // _BLOCK)):
        generator = torch.Generator().manual_seed(_mixed(filling.seed, block))
        drawn = torch.empty(_BLOCK, *part.shape[1:], dtype=values.dtype, device="cpu")
        drawn.normal_(0.0, filling.std, generator=generator)
        first, last = max(part.first, block * _BLOCK), min(end, (block + 1) * _BLOCK)
        mine = drawn[first - block * _BLOCK : last - block * _BLOCK]
        values[first - part.first : last - part.first].copy_(mine)


def _mixed(seed: int, block: int) -> int:
    """Make a seed of two numbers; a generator of torch looks at 32 bits only."""
    return int.from_bytes(hashlib.sha256(f"{seed}.{block}".encode()).digest()[:4], "little")
