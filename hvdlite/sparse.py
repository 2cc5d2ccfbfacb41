"""When sparse gradients travel dense: one rule and one sentence for all adapters.

Sent as rows a gradient grows with the ranks, since each receives the rows of all; dense it does
not. What decides is how many rows the ranks have together, which they agree on first.
"""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger(__name__)
_INDEX_BYTES = 8


def dense_from(row_bytes: Any, dense_bytes: Any) -> Any:
    """Return from how many rows of all ranks together a gradient is cheaper to send dense.

    Args:
        row_bytes: of the values of one row, which travels with its index; a whole number, or a
            tensor of one.
        dense_bytes: of the whole gradient; likewise.

    Example:
        >>> dense_from(row_bytes=56, dense_bytes=6400)
        100
    """
    return -(-dense_bytes // (row_bytes + _INDEX_BYTES))


def hears_dense() -> bool:
    """Say whether anybody hears what `say_dense` says."""
    return _log.isEnabledFor(logging.INFO)


def say_dense(name: str, rows: int) -> None:
    """Tell the log that a gradient travels dense; callers do so once for each.

    Args:
        name: what messages call the gradient.
        rows: that all ranks have together.
    """
    _log.info(
        "the sparse gradients of %s have so many rows (%d on all ranks) that sending them dense is "
        "cheaper, which is done while that is so",
        name,
        rows,
    )
