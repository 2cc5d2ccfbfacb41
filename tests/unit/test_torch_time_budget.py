"""The time budget of DropCompute: most micro-batches per second over the measured steps."""

from __future__ import annotations

import math

import pytest
import torch

from hvdlite.torch.optimizers.time_budget import choose_budget

STEPS, RANKS, MOST = 30, 8, 4


def measured(slow: float = 1.0) -> torch.Tensor:
    latencies = torch.full((STEPS, RANKS, MOST), 0.25, dtype=torch.float64)
    latencies[:, 0] *= slow
    return latencies


def rate(latencies: torch.Tensor, communication: float, budget: float) -> float:
    """Play the steps one micro-batch after the other, by the rule of the loop."""
    done, seconds = 0, 0.0
    means = latencies.mean((0, 2)).tolist()
    for step in latencies.tolist():
        longest = 0.0
        for mean, rank in zip(means, step, strict=True):
            elapsed = 0.0
            for latency in rank:
                last = elapsed + 2 * mean > budget
                elapsed += latency
                done += 1
                if last or elapsed > budget:
                    break
            longest = max(longest, elapsed)
        seconds += longest + communication
    return done / seconds


def test_slow_rank_drops_and_the_others_do_not() -> None:
    budget = choose_budget(measured(slow=4.0), torch.full((STEPS,), 0.05))
    assert 0.9 <= budget < 2.0  # the others have the time for 4 of theirs; 1 of rank 0 takes 1.0


def test_equal_ranks_drop_nothing() -> None:
    budget = choose_budget(measured(), torch.full((STEPS,), 0.05))
    assert rate(measured(), 0.05, budget + 1e-9) == pytest.approx(RANKS * MOST / 1.05)


def test_expensive_communication_drops_nothing() -> None:
    latencies = measured(slow=1.2)
    budget = choose_budget(latencies, torch.full((STEPS,), 60.0))
    assert rate(latencies, 60.0, budget + 1e-9) == pytest.approx(RANKS * MOST / 61.2)


def test_no_other_budget_does_more_per_second() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.empty(STEPS, RANKS, MOST, dtype=torch.float64)
    latencies = 0.2 + noise.exponential_(10.0, generator=generator)
    communication = torch.full((STEPS,), 0.1, dtype=torch.float64)
    best = rate(latencies, 0.1, choose_budget(latencies, communication) + 1e-9)
    others = [rate(latencies, 0.1, budget) for budget in torch.linspace(0.1, 3, 150).tolist()]
    assert best >= 0.99 * max(others)
    assert best > 1.01 * rate(latencies, 0.1, math.inf)


def test_micro_batches_that_a_rank_did_not_have() -> None:
    latencies = measured(slow=4.0)
    latencies[:10, 1] = math.inf
    latencies[:, 2, 2:] = math.inf
    assert 0.9 <= choose_budget(latencies, torch.full((STEPS,), 0.05)) < 2.0
    assert choose_budget(torch.ones(3, 2, 1), torch.ones(3)) == math.inf
