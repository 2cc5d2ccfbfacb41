"""Whether gradients are sent during backward: chosen from the times of the first steps."""

from __future__ import annotations

import pytest
import torch

from hvdlite.torch.optimizers import overlap
from hvdlite.torch.optimizers.overlap import PAIRS, WARMUP, Overlap

GROUPS = [{"params": [torch.zeros(1)]}]


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap.basics, "size", lambda: 2)


def run(
    monkeypatch: pytest.MonkeyPatch, choice: Overlap, with_overlap: float, without: float
) -> tuple[list[bool], list[str]]:
    """Take steps of these seconds; return how each was taken, and what was said."""
    now, ways, said = 0.0, [], []
    monkeypatch.setattr(overlap.time, "perf_counter", lambda: now)
    for step in range(WARMUP + 2 * PAIRS + 3):
        ways.append(choice.now)
        choice.begin()
        now += with_overlap if ways[-1] else without
        now += 50.0 * (step == WARMUP + 3)  # one disturbed step
        text = choice.end()
        said += [] if text is None else [text]
        now += 7.0  # outside of backward
    return ways, said


@pytest.mark.parametrize(
    ("without", "expected", "words"),
    [(0.9, False, "at the end of"), (0.99, True, "during"), (1.2, True, "during")],
)
def test_the_faster_way_is_kept(
    monkeypatch: pytest.MonkeyPatch, without: float, expected: bool, words: str
) -> None:
    ways, said = run(monkeypatch, Overlap(None, GROUPS), 1.0, without)
    assert ways[:WARMUP] == [True] * WARMUP
    assert ways[WARMUP : WARMUP + 2 * PAIRS] == [True, False] * PAIRS
    assert ways[-3:] == [expected] * 3
    (text,) = said
    assert f"sent {words} backward()" in text
    assert f"1000.0 ms with overlap, {1e3 * without:.1f} ms without" in text


def test_a_choice_of_the_user_and_a_lone_rank_measure_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for given in (True, False):
        ways, said = run(monkeypatch, Overlap(given, GROUPS), 1.0, 2.0)
        assert set(ways) == {given} and said == []
    monkeypatch.setattr(overlap.basics, "size", lambda: 1)
    ways, said = run(monkeypatch, Overlap(None, GROUPS), 1.0, 0.5)
    assert set(ways) == {True} and said == []
