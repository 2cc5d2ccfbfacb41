"""The time budget of a step's micro-batches, chosen from latencies that the ranks have measured.

The rule is that of DropCompute (Giladi et al., "DropCompute: simple and more robust distributed
synchronous training via compute variance reduction", NeurIPS 2023): the budget with the most
micro-batches per second, if it had ended the measured steps.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch

from hvdlite import basics
from hvdlite.gather_bytes import gather_bytes
from hvdlite.process_sets import ProcessSet, member_id

MEASURED = 30  # So many steps are measured at the beginning of every PERIOD steps.
PERIOD = 1000
_CANDIDATES = 200


def choose_budget(latencies: torch.Tensor, communication: torch.Tensor) -> float:
    """Return the budget in seconds that maximises micro-batches per second over measured steps."""
    # A rank does its first micro-batch. It does a later one if there was time for it when the one
    # before began, by the rank's mean latency, and if the budget has not passed. Both arguments are
    # seconds: latencies [steps, ranks, micro-batches], infinite for a micro-batch that a rank did
    # not have, and the reductions [steps]. The budget is infinite if no micro-batch can be dropped.
    ends = latencies.cumsum(-1)
    begins = ends - latencies
    finite = latencies.isfinite()
    counts = finite.sum((0, 2)).clamp(min=1)
    mean = latencies.where(finite, 0).sum((0, 2)) / counts
    needed = torch.maximum(begins[..., 1:], begins[..., :-1] + 2 * mean[:, None])
    needed = needed.where(finite[..., 1:], math.inf)  # A micro-batch is done with this budget.
    choices = needed[needed.isfinite()].unique()
    if choices.numel() == 0:
        return math.inf
    if choices.numel() > _CANDIDATES:
        choices = choices[torch.linspace(0, choices.numel() - 1, _CANDIDATES, device="cpu").long()]
    firsts = ends[..., :1].where(finite[..., :1], 0)
    best, budget = -math.inf, math.inf
    for choice in choices.tolist():
        done = needed <= choice
        longest = torch.cat([firsts, ends[..., 1:].where(done, 0)], -1).amax((1, 2))
        seconds = float((longest + communication).sum())
        rate = (float(finite[..., 0].sum()) + float(done.sum())) / seconds
        if rate >= best:  # The longest of equal ones drops least.
            best, budget = rate, choice
    return budget


class Measurement:
    """The latencies of this rank's micro-batches in the steps that choose the budget."""

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        """Begin a measurement of the process set; `name` identifies the gathering of latencies."""
        self._name = name
        self._process_set = process_set
        self._steps: list[float] = []

    def add(self, latencies: Sequence[float], most: int, reduction: float) -> None:
        """Note one step, with the seconds of its reduction, in which this rank may have waited."""
        missing = [math.inf] * (most - len(latencies))
        self._steps += [*latencies, *missing, reduction]

    def budget(self, most: int) -> float:
        """Gather the latencies of all ranks that have not joined, and choose the budget."""
        # Every rank computes it from the same figures.
        data = array("d", self._steps).tobytes()
        number = member_id(self._process_set)
        blocks = gather_bytes(basics.engine(), data, f"#{self._name}.latencies", number)
        figures = torch.stack(
            [
                torch.frombuffer(bytearray(block), dtype=torch.float64).view(-1, most + 1)
                for block in blocks
                if len(block) > 0  # The rank has not joined.
            ],
            dim=1,
        )
        # The rank that comes last to the reduction does not wait for another one.
        return choose_budget(figures[..., :-1], figures[..., -1].amin(1))
