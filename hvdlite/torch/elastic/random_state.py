"""The random generators of Python, NumPy and torch, as part of an elastic state.

Each rank saves and restores its own. When ranks join, they must neither change the streams of the
others nor repeat one of them: two ranks with equal streams would drop the same units. So a rank
that joins copies a generator of rank 0 only if all ranks have that one equal already (then the
script wants it so); otherwise it seeds one of its own.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import torch

from hvdlite import basics
from hvdlite.elastic.epochs import current
from hvdlite.objects import allgather_object, broadcast_object
from hvdlite.torch.collectives.memory import bytes_of
from hvdlite.torch.elastic.handlers import StateHandler
from hvdlite.torch.virtual.generators import generators, seed_of


class RandomStateHandler(StateHandler):
    """Handles all generators; `TorchState(..., rng=True)` has one."""

    def __init__(self) -> None:
        super().__init__(None)
        self._is_member = False  # The first synchronization of a rank ends its joining.
        self.save()

    def save(self) -> None:
        """Copy this rank's generators."""
        self._saved = {name: one.read() for name, one in generators().items()}

    def restore(self) -> None:
        """Set this rank's generators to the copies."""
        self._write(self._saved)

    def sync(self) -> None:
        """Give ranks that join generators; the other ranks keep theirs."""
        states = {name: one.read() for name, one in generators().items()}
        digests = {name: _digest(state) for name, state in states.items()}
        everyone = allgather_object((self._is_member, digests, torch.initial_seed()))
        members = [digests for is_member, digests, _ in everyone if is_member]
        if members and len(members) < len(everyone):
            equal = {name for name in members[0] if len({one.get(name) for one in members}) == 1}
            common = broadcast_object({name: states[name] for name in equal}, root_rank=0)
            if not self._is_member:
                self._write(common)
                self._seed_others(equal, everyone[0][2])
        self._is_member = True

    def _write(self, states: dict[str, Any]) -> None:
        for name, generator in generators().items():
            if name in states:
                generator.write(states[name])

    def _seed_others(self, copied: set[str], seed: int) -> None:
        epoch = current()
        worker = basics.rank() if epoch is None else epoch.worker
        number = seed_of(seed, worker)
        for name, generator in generators().items():
            if name not in copied:
                generator.seed(number)


def _digest(state: Any) -> bytes:
    value = bytes_of(state) if isinstance(state, torch.Tensor) else pickle.dumps(state)
    return hashlib.sha256(value).digest()
