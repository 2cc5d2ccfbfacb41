"""The global random generators that scripts of every framework use."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Generator:
    """One library's global generator."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    seed: Callable[[int], Any]


def generators() -> dict[str, Generator]:
    """List the generators of Python, and of NumPy if the script uses it."""
    found = {"python": Generator(random.getstate, random.setstate, random.seed)}
    if "numpy.random" in sys.modules:
        from numpy.random import get_state, seed, set_state

        found["numpy"] = Generator(get_state, set_state, lambda number: seed(number % 2**32))
    return found


def seed_of(*parts: object) -> int:
    """Return a seed for what the parts name, such as a rank and a step."""
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "little")
