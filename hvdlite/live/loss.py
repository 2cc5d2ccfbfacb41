"""Where the speed-up is that a job does not have: its figures beside those of fewer ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdlite.live.run import Figures


@dataclass(frozen=True)
class Loss:
    """A job beside a baseline. Numbers are multiples of the baseline's samples per second."""

    ranks: int
    baseline_ranks: int
    counted: bool  # Both counted their samples; otherwise samples are steps x ranks.
    speed_up: float
    # These three lower the speed-up: waiting for other ranks, exchanging gradients, and slower
    # computing, which is below 0 where computing is faster.
    waiting: float
    communicating: float
    computing: float
    compute_ratio: float  # It compares the time of computing per sample of a rank.

    @property
    def ideal(self) -> float:
        """The speed-up if each rank did as much as one of the baseline."""
        return self.ranks / self.baseline_ranks

    def sentence(self) -> str:
        """Say it, in hundredths that sum exactly."""
        speed_up = round(100 * self.speed_up)
        missing = round(100 * self.ideal) - speed_up
        ranks = "1 rank is" if self.ranks == 1 else f"{self.ranks} ranks are"
        text = f"{ranks} {speed_up / 100:.2f} times as fast as {self.baseline_ranks}"
        if missing <= 0:
            return f"{text}: more than {self.ideal:g} times" if missing else text
        parts = (self.waiting, self.communicating, self.computing)
        waiting, communicating, computing = round_to_sum([100 * part for part in parts], missing)
        words = [
            f"{communicating / 100:.2f} exchanging gradients",
            f"{waiting / 100:.2f} waiting",
            f"{computing / 100:.2f} slower compute",
        ]
        if computing < 0:
            words[2] = f"less {-computing / 100:.2f} by faster compute"
        return f"{text}; {self.ideal:g} is ideal. Lost: {', '.join(words)}"

    def note(self) -> str:
        """Say how samples were counted, where that is not known from `hvd.observe`."""
        if self.counted:
            return ""
        return (
            "Samples are taken as steps x ranks, as if the batch of a rank had the same size in "
            "both runs; hvd.observe(samples=) counts them."
        )


def loss(figures: Figures, baseline: Figures) -> Loss | None:
    """Compare a job with a baseline; None where one of them has no steps or ranks."""
    # The times of waiting, communicating and computing of a rank sum to its step. So what each of
    # them takes longer per sample than in the baseline sums to what a sample takes longer.
    if not (figures.step and baseline.step and figures.ranks and baseline.ranks):
        return None
    counted = bool(figures.samples_per_step and baseline.samples_per_step)
    here, there = _per_sample(figures, counted), _per_sample(baseline, counted)
    ideal = figures.size / baseline.size
    total, before = sum(here), sum(there)
    waiting, communicating, computing = (
        ideal * (a - b) / total for a, b in zip(here, there, strict=True)
    )
    return Loss(
        ranks=figures.size,
        baseline_ranks=baseline.size,
        counted=counted,
        speed_up=ideal * before / total,
        waiting=waiting,
        communicating=communicating,
        computing=computing,
        compute_ratio=here[2] / there[2] if there[2] else 1.0,
    )


def alone(figures: Figures) -> Figures | None:
    """Return a baseline of one rank, if a rank has said how fast it trained alone."""
    # A rank says so by `hvd.observe(alone=...)`, in samples per second. Such a rank only computes.
    rate = max((rank.values.get("alone", 0.0) for rank in figures.ranks), default=0.0)
    if not (math.isfinite(rate) and rate > 0 and figures.samples_per_step):
        return None
    first = figures.ranks[0]
    one = replace(first, between=1 / rate, waiting=0.0, communicating=0.0, backward=0.0)
    return replace(figures, size=1, step=1 / rate, samples_per_step=1.0, ranks=(one,))


def _per_sample(figures: Figures, counted: bool) -> tuple[float, float, float]:
    """Return how long a rank waits, communicates and computes for one of its samples."""
    samples = figures.samples_per_step / figures.size if counted else 1.0
    count = len(figures.ranks)
    waiting = sum(rank.waiting for rank in figures.ranks) / count
    communicating = sum(rank.communicating for rank in figures.ranks) / count
    computing = sum(rank.backward + rank.between for rank in figures.ranks) / count
    return waiting / samples, communicating / samples, computing / samples


def round_to_sum(parts: Sequence[float], total: int) -> list[int]:
    """Round numbers to integers that sum to `total`, each by less than 1 if that is possible."""
    whole = [int(part // 1) for part in parts]
    order = sorted(range(len(parts)), key=lambda n: whole[n] - parts[n])
    for n in range(abs(total - sum(whole))):
        whole[order[n % len(order)]] += 1 if total > sum(whole) else -1
    return whole
