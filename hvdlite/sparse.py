"""The rule by which sparse gradients travel as dense tensors, for all adapters.

A sparse gradient can be sent as its rows, by an allgather, or as a dense tensor, by an allreduce.
Every rank receives the rows of all ranks, so the rows grow with the world, and the dense tensor
does not. Ranks first agree on how many rows they have together; this number decides.
"""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger(__name__)
_INDEX_BYTES = 8


def dense_from(row_bytes: Any, dense_bytes: Any) -> Any:
    """Return the number of rows, of all ranks together, from which a dense tensor is cheaper."""
    # `row_bytes` counts the values of one row, without its index of 8 bytes, and `dense_bytes` the
    # whole gradient as a dense tensor. Both are ints or tensors.
    return -(-dense_bytes // (row_bytes + _INDEX_BYTES))


def hears_dense() -> bool:
    """Return whether the log shows what `say_dense` writes."""
    return _log.isEnabledFor(logging.INFO)


def say_dense(name: str, rows: int) -> None:
    """Write to the log that a gradient travels dense; callers do so once for each gradient."""
    _log.info(
        "the sparse gradients of %s have so many rows (%d on all ranks) that sending them dense is "
        "cheaper, which is done while that is so",
        name,
        rows,
    )
