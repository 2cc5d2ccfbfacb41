"""examples/speed.py measures the speed of the examples, and explains it."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def speed() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "examples" / "speed.py"
    spec = importlib.util.spec_from_file_location("speed", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_epoch_does_not_count(speed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([2.4, 3.4, 4.4, 9.0, 9.5])  # The first rank to train spends 2.4 s on imports.
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    watch = speed.Stopwatch()
    watch.end(1000)
    assert math.isnan(watch.rate())
    watch.end(1000)
    watch.end(1000)
    assert watch.rate() == pytest.approx(1000)
    watch.begin()  # A pause from 4.4 to 9.0 does not count.
    watch.end(500)
    assert watch.rate() == pytest.approx(1000)


@pytest.mark.parametrize(
    ("rate", "ranks", "meaning"),
    [
        (7000.0, 2, "1.40 times as fast. 2 times is the limit;"),
        (4000.0, 2, "0.80 times as fast. Each rank has the fixed costs of a step,"),
        (6000.0, 4, "1.20 times as fast. 4 ranks share 2 core(s) here;"),
    ],
)
def test_two_rates_are_explained(
    speed: ModuleType, rate: float, ranks: int, meaning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    text = speed.report(rate, ranks, ranks, 5000.0)
    assert text.startswith(f"{rate:,.0f} samples/s on {ranks} rank(s), 5,000 alone: {meaning}")


def test_one_rate_stands_alone(speed: ModuleType) -> None:
    assert speed.report(5000.0, 2, 2) == "5,000 samples/s on 2 rank(s)"
    assert speed.report(5000.0, 1, 1, 5000.0) == "5,000 samples/s on 1 rank(s)"
    assert speed.report(math.nan, 2, 2) == "One epoch is too short to measure the speed."
