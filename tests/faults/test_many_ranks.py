"""Many ranks on few cores: 64 processes start, do 100 steps and leave within a minute."""

from __future__ import annotations

import os

import pytest

from faults.arrays import ones, reduce_array, total_of_ones
from harness import run_world
from hvdlite import basics
from patience import Stopwatch

PRELOAD = ("numpy",)
BOUND = 60.0


def train(steps: int, cores: list[int]) -> int:
    os.sched_setaffinity(0, cores)
    basics.init()
    wrong = 0
    for step in range(steps):
        gradient = reduce_array(ones(1000) * (step + 1), "gradient")
        wrong += int((gradient != total_of_ones() * (step + 1)).any())
    return wrong


@pytest.mark.long
def test_sixty_four_ranks_on_two_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    watch = Stopwatch()
    results = run_world(64, train, args=(100, cores))
    assert [result.value for result in results] == [0] * 64
    assert watch.seconds() <= BOUND
