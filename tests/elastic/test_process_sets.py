"""Process sets of `init` in the worlds of an elastic job."""

from __future__ import annotations

import sys
from pathlib import Path

from launcher import run_launcher

WORKER = Path(__file__).with_name("sets_worker.py")


def test_sets_keep_their_ids_as_far_as_their_ranks_exist() -> None:
    result = run_launcher(
        *("-np", "3", "--min-np", "1", "--max-np", "3"),
        *(sys.executable, str(WORKER), "2:13", "1:22"),
        timeout=60.0,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    lines = [line.partition("] ")[2] for line in result.stdout.splitlines()]
    assert lines[:3] == ["sets 3: 1 2"] * 3
    assert lines[3:5] == ["sets 2: 1 None"] * 2
    assert lines[-3:] == ["sets 3: 1 2"] * 3
