"""Which virtual ranks each rank carries, and the random generators that are seeded for each."""

from __future__ import annotations

import contextlib
import hashlib
import operator
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hvdlite import _core, basics
from hvdlite.errors import ArgumentError


class Block(NamedTuple):
    """The virtual ranks of this rank in one world: `size` of them, from `first` on.

    The core adds the ranks' tensors up in a balanced binary tree. A rank at depth d of it carries
    virtual_size / 2^d virtual ranks and adds these up as a subtree, so that both together are the
    tree over all virtual ranks.
    """

    first: int
    size: int
    epoch: int  # It is the number of the world in an elastic job.


def check_virtual_size(size: Any) -> int:
    try:
        number = operator.index(size)
    except TypeError:
        number = 0
    if number < 1 or number & (number - 1):
        raise ArgumentError(f"virtual_size={size!r}: give a power of two, such as 8")
    return number


def block_in_world(virtual_size: int) -> Block:
    """Return this rank's block in the present world; raise ArgumentError for too many ranks."""
    world = basics.current_world()  # The membership thread may replace it at any time.
    for enough in (virtual_size << doublings for doublings in range(20)):
        with contextlib.suppress(ArgumentError):
            blocks = _core.virtual_blocks(world.host_of, enough)
            break
    if enough > virtual_size:
        raise ArgumentError(
            f"virtual_size={virtual_size} is too small for {world.size} ranks as they lie on "
            f"their hosts: give virtual_size={enough} or more, or start fewer ranks"
            + (" (--max-np)" if basics.in_elastic_job() else "")
        )
    return Block(*blocks[world.rank], world.epoch)


@dataclass(frozen=True)
class Generator:
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    seed: Callable[[int], Any]


def generators() -> dict[str, Generator]:
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
    number = seed_of(*parts)
    for generator in generators().values():
        generator.seed(number)
