"""A host loses its power or its network while ranks only wait, and all ranks notice it in time.

No data is on its way then, so only the kernel's probes can notice it. The kernel answers the probes
even for a stopped process, so a stopped process is not taken for lost.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from faults.arrays import describe, note_time, ones, reduce_array, seconds_between
from faults.links import ENTER, cut, linked_hosts, needs_namespaces, served_store
from harness import World
from hvdlite import basics
from hvdlite.errors import HvdliteError
from patience import Stopwatch, wait_until

PRELOAD = ("numpy",)

PATIENCE = 2.0
BOUND = 20.0  # seconds; without probes, the ranks would wait for ever


def wait_for_each_other(lost: int, folder: str) -> dict[str, Any]:
    """Ranks 0 and 1 wait for tensors that the others never submit; rank 2 is idle, then submits."""
    basics.init()
    print("paused", flush=True)
    reduce_array(ones(), "all.of.us")
    print("waiting", flush=True)
    rank = basics.rank()
    if rank == 2:
        wait_until((Path(folder) / f"{1 - lost}").exists, "the other rank that is left has failed")
    try:
        reduce_array(ones(), f"only.rank.{rank}")
    except HvdliteError as error:
        note_time(str(Path(folder) / str(rank)))
        return describe(error)
    raise AssertionError("nothing failed")


def pause(world: World, rank: int) -> None:
    """Stop a rank for longer than the peer timeout, while the others wait for it."""
    world.wait_for(rank, "paused")
    world.signal(rank, signal.SIGSTOP)
    time.sleep(2 * PATIENCE)
    world.signal(rank, signal.SIGCONT)


@needs_namespaces
@pytest.mark.parametrize("lost", [0, 1])
def test_host_that_vanishes_while_all_wait_is_noticed(lost: int, tmp_path: Path) -> None:
    with linked_hosts(3), served_store(3) as variables:
        # Ranks that wait for each other would be a deadlock.
        environment = {
            **variables,
            "HVDLITE_PEER_TIMEOUT": str(PATIENCE),
            "HVDLITE_DEADLOCK_GRACE": "0",
        }
        body = wait_for_each_other
        with World(3, body, lost, str(tmp_path), env=environment, command=ENTER) as world:
            if lost == 1:
                pause(world, 0)
            for rank in range(3):
                world.wait_for(rank, "waiting")
            time.sleep(0.5)  # By now the kernels have confirmed all data.
            since = Stopwatch()
            cut(lost)
            results = world.wait()
    for result in results:
        error = result.value
        assert error["kind"] == "RankFailedError"
        assert seconds_between(since, error["seen"]) <= BOUND
        if result.rank != lost:
            assert error["rank"] == lost
            assert f"rank {lost} has not answered for 2 s (" in error["message"]
        assert "killed, crashed" not in error["message"]
