"""Run an elastic job of a test's workers, and read what they wrote."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.journals import Journey, read_journals
from elastic.plans import Plan
from launcher import LauncherResult, run_launcher
from patience import HANG
from pythons import python_with

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Job:
    """A job that has ended: what hvdlite-run said, and the workers' journals."""

    result: LauncherResult
    journeys: Mapping[int, Journey]

    def epochs(self) -> list[str]:
        """Return the launcher's lines about epochs."""
        lines = self.result.stderr.splitlines()
        return [line.partition(": ")[2] for line in lines if "run: world " in line]


def run_job(
    script: str,
    ranks: int,
    plan: Plan,
    flags: Sequence[str] = (),
    timeout: float = 2 * HANG,
    status: int = 0,
    preload: Sequence[str] = (),
) -> Job:
    """Run workers of this folder's script under hvdlite-run; they may die down to the last one.

    The replica check compares their replicas, also in steps in which some die.
    With `preload` the workers are forked from a process that has imported these modules.
    """
    python = python_with(*preload) if preload else sys.executable
    result = run_launcher(
        *("-np", str(ranks), "--min-np", "1", "--max-np", str(ranks), *flags),
        *(python, str(_FOLDER / script), plan.as_json()),
        timeout=timeout,
        env={"OMP_NUM_THREADS": "1", "HVDLITE_CHECK_REPLICAS": "2"},
    )
    assert result.returncode == status, f"{result.stdout}\n{result.stderr}"
    assert "AssertionError" not in result.stderr, result.stderr  # Workers check their own steps.
    return Job(result, read_journals(Path(plan.folder)))
