"""A rank is stopped (SIGSTOP, a debugger): the others say so, and do not wait for ever."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from faults.arrays import reduce_until_error, works
from harness import World
from hvdlite import basics
from patience import wait_until

PRELOAD = ("numpy",)

LIMIT = 3.0
ENVIRONMENT = {
    "HVDLITE_STALL_WARNING": "0.5",
    "HVDLITE_STALL_SHUTDOWN": str(LIMIT),
    "HVDLITE_COLLECTIVE_TIMEOUT": str(LIMIT),
}


def train(inside: bool, folder: str) -> dict[str, Any]:
    basics.init()
    assert works("before")
    print("trains", flush=True)
    if not inside:
        wait_until((Path(folder) / "stopped").exists, "a rank is stopped")
    error = reduce_until_error("layer.weight")
    print("gives up", flush=True)
    return error


@pytest.mark.long
@pytest.mark.parametrize("inside", [True, False], ids=["in-collectives", "between-them"])
@pytest.mark.parametrize("victim", [0, 1])
def test_stopped_rank_is_named_and_given_up(victim: int, inside: bool, tmp_path: Path) -> None:
    with World(3, train, inside, str(tmp_path), env=ENVIRONMENT) as world:
        for rank in range(3):
            world.wait_for(rank, "trains")
        world.signal(victim, signal.SIGSTOP)
        (tmp_path / "stopped").touch()
        others = [rank for rank in range(3) if rank != victim]
        wait_until(
            lambda: any(f"rank {victim}" in world.stderr(rank) for rank in others), "a warning"
        )
        for rank in others:
            world.wait_for(rank, "gives up")
        world.signal(victim, signal.SIGCONT)
        results = world.wait()
    for rank in others:
        assert results[rank].value["rank"] == victim, results[rank].value
        assert results[rank].value["kind"] in ("CollectiveTimeoutError", "StalledError")
