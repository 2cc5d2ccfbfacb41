"""Ranks die and boundaries come between two backward passes of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import run_launcher
from pythons import python_with

pytestmark = pytest.mark.long

WORKER = Path(__file__).with_name("accumulation_worker.py")


@pytest.mark.parametrize("op", ["sum", "adasum"])
def test_samples_of_unfinished_steps_are_used_once(op: str) -> None:
    result = run_launcher(
        *("-np", "3", "--min-np", "1", "--max-np", "3"),
        *(python_with("torch._dynamo"), str(WORKER), op),
        env={"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    lines = [line for line in result.stdout.splitlines() if line.startswith("[0] ")]
    # Three ranks have done one step of six samples each when the others come to a boundary.
    assert lines[:2] == [f"[0] {text} samples for each" for text in ("3 ranks, 20", "2 ranks, 21")]
    assert lines[-1].split()[2:] == ["1"] * 60
