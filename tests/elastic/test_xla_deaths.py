"""Ranks die while others wait in a function that XLA compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import run_launcher
from pythons import python_with

WORKER = Path(__file__).with_name("xla_worker.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}


@pytest.mark.long
def test_compiled_steps_are_redone_or_go_back_to_the_last_commit() -> None:
    result = run_launcher(
        *("-np", "3", "--min-np", "1", "--max-np", "3"),
        *(python_with("tensorflow", TF_CPP_MIN_LOG_LEVEL="3"), str(WORKER)),
        env=ENVIRONMENT,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    lines = [line for line in result.stdout.splitlines() if line.startswith("[0] ")]
    # Three steps of 3 ranks and two of 2 are committed; then come 5 steps of one rank.
    assert lines[0] == "[0] enters at 0 with 0.0"
    assert lines[-2:] == ["[0] enters at 5 with 13.0", "[0] weight 18.0"]
