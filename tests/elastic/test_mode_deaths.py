"""Jobs in each of the modes survive dead ranks, and ranks that join in their place."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from launcher import run_launcher
from pythons import python_with

FOLDER = Path(__file__).parent


@pytest.mark.long
def test_each_mode_goes_on_when_ranks_die_and_join() -> None:
    result = run_launcher(
        *("-np", "3", "--min-np", "1", "--max-np", "3"),
        *(python_with("torch._dynamo"), str(FOLDER / "modes_worker.py")),
        env={"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    lines = [line for line in result.stdout.splitlines() if "worlds" in line]
    assert len(lines) == 3, result.stdout
    survivor = next(line for line in lines if line.startswith("[0]"))
    worlds = re.findall(r"\d+", survivor.split("worlds [")[1].split("]")[0])
    assert sum(int(after) < int(before) for before, after in pairwise(worlds)) == 2, survivor
