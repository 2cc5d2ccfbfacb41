"""The shares of a sharded optimizer's state in an elastic job, where workers die and join.

A worker *holds* a parameter if it has the parameter's state, and so updates it. When workers have
died or joined, those that are left divide the parameters anew: they tell each other what they hold,
and the first that holds a parameter sends its state to those that will.

All of them must decide alike, also while another one dies. So nothing is decided by the workers
that there are now, which each may see at another time, but by the epoch in which a collective was
completed, which all have alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from hvdlite import basics
from hvdlite.elastic import epochs, steps
from hvdlite.errors import HvdliteError
from hvdlite.gather_bytes import gather_in_epoch
from hvdlite.process_sets import global_process_set
from hvdlite.torch.collectives.submit import start_allgather, take_received
from hvdlite.torch.collectives.tensors import spec
from hvdlite.torch.exchange.ownership import Ownership
from hvdlite.torch.optimizers.state_bytes import deserialized, serialized

State = dict[Any, Any]  # The keys are the parameters' indices.


def workers_of(epoch: int) -> tuple[int, ...]:
    """Return the workers of an epoch, in the order of their ranks."""
    return tuple(epochs.find(epoch).workers)


def own_place(workers: Sequence[int]) -> int:
    """Return the position of this worker."""
    now = epochs.current()
    assert now is not None
    return workers.index(now.worker)


def workers_of_step() -> tuple[int, ...]:
    """Return the workers whose gradients the step under way has."""
    epoch = steps.progress().epoch
    now = epochs.current()
    assert now is not None
    return workers_of(now.number if epoch is None else epoch)


class Shares:
    """What this worker holds. Used by the training thread."""

    def __init__(self, name: str) -> None:
        """Begin without a division; `name` begins the names of its collectives."""
        # The state is divided among these; if there are none, it has to be.
        self.workers: tuple[int, ...] = ()
        self.version = 0  # The state has made so many steps.
        # After a restore, and in a worker that joins, these are the indices of the parameters that
        # this worker holds though they were not distributed to it. None: what was distributed
        # counts.
        self.held: list[int] | None = None
        self._name = name

    @property
    def place(self) -> int:
        """The position of this worker among those."""
        return own_place(self.workers)

    def meet(
        self, held: Collection[int], count: int, part: Callable[[list[int]], State]
    ) -> tuple[tuple[int, ...], State]:
        """Exchange parts; return the workers that took part, and the parts not held here."""
        # A worker that dies meanwhile makes the others begin again. It is an error if no worker is
        # left that holds some parameter, or if workers have gone back to different commits.
        while True:
            said = json.dumps([self.version, sorted(held)]).encode()
            blocks, workers = self._gather("held", said)
            told = dict(zip(workers, (json.loads(bytes(b)) for b in blocks), strict=True))
            holders = self._holders(told, count)
            own = workers[own_place(workers)]
            first = [i for i, those in holders.items() if those[0] == own]
            wanted = [i for i in first if len(holders[i]) < len(workers)]
            parts, after = self._gather("parts", serialized(part(wanted)))
            if after == workers:
                break
        self.version = max(version for version, _ in told.values())
        received: State = {}
        for block in parts:
            received.update(deserialized(bytes(block)))
        return workers, {i: one for i, one in received.items() if i not in set(held)}

    def _gather(self, what: str, data: bytes) -> tuple[list[memoryview], tuple[int, ...]]:
        blocks, epoch = gather_in_epoch(basics.engine(), data, f"#{self._name}.{what}")
        return blocks, workers_of(epoch)

    def _holders(
        self, told: Mapping[int, tuple[int, list[int]]], count: int
    ) -> dict[int, list[int]]:
        """Return, by parameter, the workers that hold it."""
        versions = {version for version, held in told.values() if held}
        if len(versions) > 1:
            raise HvdliteError(
                f"'{self._name}': workers have gone back to the commits of different steps, "
                f"{sorted(versions)}, and each has a share of the optimizer's state; start the job "
                "again from a checkpoint"
            )
        holders = {i: [w for w, (_, held) in told.items() if i in set(held)] for i in range(count)}
        lost = [i for i, those in holders.items() if not those]
        if lost:
            raise HvdliteError(
                f"'{self._name}': the workers that had the optimizer's state of {len(lost)} of "
                f"{count} parameters have died at the same time; start the job again from a "
                "checkpoint, or give ShardedOptimizer more copies"
            )
        return holders


class GatheredParameters:
    """Gives every worker the parameters that others have updated, by allgathers."""

    # Unlike a broadcast, an allgather is made again by those that are left if a worker dies.

    def __init__(
        self,
        name: str,
        params: Sequence[torch.Tensor],
        ownership: Ownership,
        workers: tuple[int, ...],
    ) -> None:
        """Plan it; `workers` own the parameters, and all have these in the same order."""
        self.params = list(params)
        self._name = name
        self._workers = workers
        kinds: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
        for param in params:
            empty: list[list[torch.Tensor]] = [[] for _ in workers]
            kind = kinds.setdefault((param.dtype, param.device), empty)
            kind[ownership.owner(param)].append(param)
        self._kinds = list(kinds.values())

    def run(self) -> bool:
        """Send own parameters, and take all others; False, and nothing, if a worker has died."""
        own = own_place(self._workers)
        flats = [self._pack(kind, own) for kind in self._kinds]
        specs = [spec(f"{self._name}.{i}", flat, None) for i, flat in enumerate(flats)]
        if not specs:
            return True
        handle = start_allgather(self._name, specs, global_process_set, flats, blocking=True)
        handle.wait()
        received = take_received(handle, flats)
        if workers_of(handle.epoch) != self._workers:
            return False
        with torch.no_grad():
            for kind, one in zip(self._kinds, received, strict=True):
                _unpack(kind, one.tensor, own)
        return True

    def _pack(self, kind: Sequence[Sequence[torch.Tensor]], own: int) -> torch.Tensor:
        like = next(param for params in kind for param in params)
        mine = [param.detach().reshape(-1) for param in kind[own]]
        return torch.cat(mine) if mine else like.detach().reshape(-1).new_empty(0)


def _unpack(kind: Sequence[Sequence[torch.Tensor]], gathered: torch.Tensor, own: int) -> None:
    begin = 0
    for place, params in enumerate(kind):
        for param in params:
            if place != own:
                param.copy_(gathered[begin : begin + param.numel()].view(param.shape))
            begin += param.numel()
