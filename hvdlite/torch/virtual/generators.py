"""The global random generators of the libraries that a script uses."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Generator:
    """One library's global generator."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    seed: Callable[[int], Any]


def generators() -> dict[str, Generator]:
    """List the generators of the libraries that the script uses."""
    found = {"python": Generator(random.getstate, random.setstate, random.seed)}
    if "numpy.random" in sys.modules:
        from numpy.random import get_state, seed, set_state

        found["numpy"] = Generator(get_state, set_state, lambda number: seed(number % 2**32))
    found["torch"] = Generator(
        torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed
    )
    if torch.cuda.is_initialized():
        found["cuda"] = Generator(
            torch.cuda.get_rng_state, torch.cuda.set_rng_state, torch.cuda.manual_seed
        )
    return found


def seed_of(*parts: object) -> int:
    """Return a seed for what the parts name, such as a rank and a step."""
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "little")


def seed_all(*parts: object) -> None:
    """Seed all generators of this process for what the parts name."""
    number = seed_of(*parts)
    for generator in generators().values():
        generator.seed(number)
