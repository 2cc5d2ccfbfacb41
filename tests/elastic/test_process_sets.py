"""Process sets of `init` in the worlds of an elastic job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher import run_launcher
from pythons import python_with

FOLDER = Path(__file__).parent


def test_sets_keep_their_ids_as_far_as_their_ranks_exist() -> None:
    result = run_launcher(
        *("-np", "3", "--min-np", "1", "--max-np", "3"),
        *(sys.executable, str(FOLDER / "sets_worker.py"), "2:13", "1:22"),
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    lines = [line.partition("] ")[2] for line in result.stdout.splitlines()]
    assert lines[:3] == ["sets 3: 1 2"] * 3
    assert lines[3:5] == ["sets 2: 1 None"] * 2
    assert lines[-3:] == ["sets 3: 1 2"] * 3


@pytest.mark.long
def test_optimizer_of_a_process_set_follows_its_members() -> None:
    result = run_launcher(
        *("-np", "3", "--min-np", "2", "--max-np", "3"),
        *(python_with("torch._dynamo"), str(FOLDER / "new_member_worker.py")),
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    lines = {line for line in result.stdout.splitlines() if "member" in line}
    assert "[2] 3 ranks, member: False" in lines
    assert "[1] 2 ranks, member: True" in lines
