"""Buckets with gradients that travel as thin factors, which `low_rank` makes (PowerSGD).

Such a bucket has two operations in a step. The first has the left factors of the gradients that are
compressed, and the second, which `advance` submits, all else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.errors import HvdliteError
from hvdlite.torch.collectives.submit import Reduction, Submission, start_allreduce
from hvdlite.torch.collectives.tensors import spec
from hvdlite.torch.exchange.bucket import Bucket
from hvdlite.torch.exchange.in_flight import InFlight, Sent
from hvdlite.torch.exchange.layout import layout_spec
from hvdlite.torch.exchange.low_rank import LowRank


class LowRankBucket(Bucket):
    """A bucket whose gradients all ranks get, some of them as the product of two factors."""

    def __init__(
        self, low_rank: LowRank, name: str, params: Sequence[torch.Tensor], *arguments: Any
    ) -> None:
        """Make it; `low_rank` compresses, and the other arguments are those of `Bucket`."""
        super().__init__(name, params, *arguments)
        self.low_rank = low_rank
        self._leading: Submission | None = None  # It sends the left factors.
        self._compressed: set[int] = set()  # Gradients at these positions travel as factors.

    @property
    def submitted(self) -> bool:
        """Whether the gradients are in flight."""
        return self._leading is not None or super().submitted

    @property
    def leads(self) -> bool:
        """Whether left factors are in flight, so that `advance` has to come."""
        return self._leading is not None

    @property
    def arrived(self) -> bool:
        """Whether `advance` would not wait."""
        return self._leading is None or self._leading.done()

    @property
    def operations(self) -> list[str]:
        """The names of the operations that are in flight."""
        return super().operations if self._leading is None else [self._name]

    def begin_anew(self) -> None:
        """Let all gradients travel as they are next."""
        super().begin_anew()
        self.low_rank.begin_anew()

    def submit(self, reduction: Reduction, blocking: bool, step: int) -> None:
        """Submit the gradients; see `GradientBucket.submit`."""
        self._compressed = self.low_rank.begin(step)
        super().submit(reduction, blocking, step)

    def _read_plain(self, sent: Sent) -> Any:
        """Read no gradients in one call, because each may be compressed."""
        return None

    def _leave(self, sent: Sent, position: int) -> InFlight:
        if position in self._ways.by_rows or position not in self._compressed:
            return super()._leave(sent, position)
        flight = self._own(position, as_dense=True)
        self.low_rank.take(position, flight.wire)
        return flight

    def _start(self, sent: Sent, blocking: bool) -> None:
        """Submit the left factors if there are some."""
        if not self._compressed:
            super()._start(sent, blocking)
            return
        # They are handed out at once, also in an elastic job: should a rank die before the right
        # ones arrive, then these factors suit the gradients of the others as well.
        lefts = self.low_rank.lefts()
        specs = [spec(self._labels[i], left, left) for i, left in lefts.items()]
        if self._layout is not None:
            first = next(iter(lefts.values()))
            specs.insert(0, layout_spec(f"{self._name}.layout", self._layout, first))
        reduction, keep = sent.reduction._replace(transaction=""), list(lefts.values())
        self._leading = start_allreduce(self._name, specs, reduction, keep, blocking)

    def advance(self) -> None:
        """Wait for the left factors, and submit all else; if it raises, nothing is in flight."""
        leading, self._leading, sent = self._leading, None, self._sent
        if leading is None:
            return
        assert sent is not None
        leading.wait()
        with torch.no_grad():
            for position, (wire, target) in self.low_rank.turn().items():
                flight = sent.flights[position]
                flight.wire, flight.target = wire, target
        self._send(sent, f"{self._name}.right", None, blocking=False)

    def abandon(self) -> None:
        """Wait for the left factors, without using them."""
        leading, self._leading = self._leading, None
        if leading is not None:
            with contextlib.suppress(HvdliteError):
                leading.wait()

    def _flags_of_rank(self) -> list[float]:
        """Return whether this rank has ever compressed."""
        return [float(self.low_rank.schedule.begun)]

    def _read_flags_of_ranks(self, means: list[float]) -> None:
        self.low_rank.schedule.agree(means[0])

    def _arrive(
        self, sent: Sent, position: int, flight: InFlight, mask: torch.Tensor | None
    ) -> None:
        """Make a compressed gradient of its two factors, in the memory that `grad` has."""
        if position not in self._compressed:
            super()._arrive(sent, position, flight, mask)
            self.low_rank.saw(position, dense=mask is None)
            return
        target = flight.gradient if flight.place is None else flight.place.view
        self.low_rank.write(position, target)
        flight.param.grad = target

    def reset(self) -> None:
        """Forget what was submitted."""
        super().reset()
        self._leading = None
