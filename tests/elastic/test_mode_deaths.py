"""Jobs in each of the modes survive dead ranks, and ranks that join in their place."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

from launcher import run_launcher

WORKER = Path(__file__).with_name("modes_worker.py")


def test_each_mode_goes_on_when_ranks_die_and_join() -> None:
    result = run_launcher(
        *("-np", "3", "--min-np", "1", "--max-np", "3"),
        *(sys.executable, str(WORKER)),
        timeout=100.0,
        env={"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    lines = [line for line in result.stdout.splitlines() if "worlds" in line]
    assert len(lines) == 3, result.stdout
    survivor = next(line for line in lines if line.startswith("[0]"))
    worlds = json.loads(survivor[survivor.index("[", 1) : survivor.index(", losses")])
    assert sum(after < before for before, after in pairwise(worlds)) == 2, survivor
