"""Many scenarios in one world: starting ranks and importing torch costs more than most of them.

A test file has functions `scenario_x()` that run on every rank and assert; `run_all(globals())`
runs them in order, and `check(results, name)` fails with what went wrong in one of them.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from harness import RankResult

PREFIX = "scenario_"


def names_in(namespace: dict[str, Any]) -> list[str]:
    """List the scenarios of a test file, in the order in which they stand there."""
    return [name for name in namespace if name.startswith(PREFIX)]


def run_all(namespace: dict[str, Any]) -> dict[str, str]:
    """Run the scenarios on this rank; give each one's traceback, "" where it passed.

    After a failure the ranks may be out of step, so the others are not run.
    """
    import hvdlite.torch as hvd

    hvd.init()
    warnings.simplefilter("error")
    outcomes = {}
    for name in names_in(namespace):
        outcomes[name] = ""
        try:
            namespace[name]()
            hvd.barrier()
        except Exception:
            outcomes[name] = traceback.format_exc()
            break
    hvd.shutdown()
    return outcomes


def check(results: Sequence[RankResult], name: str) -> None:
    """Fail with every rank's traceback unless a scenario passed on all of them."""
    failures = [
        f"rank {result.rank}: {(result.value or {}).get(name, 'not reached')}"
        for result in results
        if (result.value or {}).get(name, "not reached")
    ]
    assert not failures, "\n".join(failures)
