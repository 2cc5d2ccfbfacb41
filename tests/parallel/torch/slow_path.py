"""Calls of the collectives of PyTorch's adapter without the fast path, to compare both ways."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hvdlite import _core


@contextlib.contextmanager
def slow_path() -> Iterator[None]:
    """Switch the fast path off for all threads of this process."""
    was_on = _core.fast_path.switch(on=False)
    try:
        yield
    finally:
        _core.fast_path.switch(on=was_on)
