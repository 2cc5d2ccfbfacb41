"""Ranks die in the middle of a step by Adasum, and no step has mixed ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import run_launcher
from pythons import python_with

WORKER = Path(__file__).with_name("adasum_worker.py")


@pytest.mark.long
def test_step_by_adasum_is_of_the_same_ranks_for_all_parameters() -> None:
    result = run_launcher(
        *("-np", "3", "--min-np", "1", "--max-np", "3"),
        *(python_with("torch._dynamo"), str(WORKER)),
        env={"OMP_NUM_THREADS": "1", "HVDLITE_CHECK_REPLICAS": "1"},
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    lines = [line for line in result.stdout.splitlines() if "steps" in line]
    # Worker 2 has died in its fourth step, and worker 0 in its seventh, which did not come to them.
    assert lines == ["[0] steps [6.0, 10.0, 3.0], committed 10"]
