"""Links between hosts that are slow, or go down: what ranks notice of them without a launcher.

Rank r runs on host r, and rank 0 serves the store.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults.arrays import Array, describe, note_time, ones, reduce_array, seconds_between
from harness import World
from hvdlite import basics
from hvdlite.errors import HvdliteError
from multihost.bed import Bed
from patience import Stopwatch, wait_until

PRELOAD = ("numpy",)
BYTES = 12 << 20
PATIENCE = 2.0  # far less than the transfer takes
BOUND = 20.0  # seconds; without the kernel's probes, the ranks would wait for ever


@pytest.fixture
def hosts(three_hosts: Bed) -> Iterator[Bed]:
    yield three_hosts
    three_hosts.mend()


def world_on(hosts: Bed, ranks: int, body: Any, *arguments: object, **env: str) -> World:
    """Start a rank on each of the first hosts."""
    by_hand = ("JOB_ID", "LOCAL_RANK", "LOCAL_SIZE", "NODE")
    environment = {
        **{f"HVDLITE_{name}": "" for name in by_hand},
        "HVDLITE_RENDEZVOUS": f"{hosts.addresses[0]}:23456",
        "HVDLITE_PEER_TIMEOUT": str(PATIENCE),
        **env,
    }
    return World(ranks, body, *arguments, env=environment, command=hosts.command_of_ranks())


def reduce_over_the_link(count: int) -> dict[str, Any]:
    basics.init()
    gradient: Array = np.full(count, basics.rank() + 1, dtype="float32")
    begin = time.monotonic()
    reduce_array(gradient, "large.gradient")
    return {
        "seconds": time.monotonic() - begin,
        "right": bool((gradient == 3).all()),
        "hosts": len(set(basics.current_world().host_of)),
    }


def test_slow_link_is_not_taken_for_a_dead_rank(hosts: Bed) -> None:
    for host in range(2):
        hosts.limit_rate(host, "20mbit")
    env = {"HVDLITE_COLLECTIVE_TIMEOUT": str(PATIENCE), "HVDLITE_STALL_WARNING": "1"}
    with world_on(hosts, 2, reduce_over_the_link, BYTES // 4, **env) as world:
        results = world.wait()
    for result in results:
        assert result.value["right"]
        assert result.value["hosts"] == 2
        assert result.value["seconds"] > PATIENCE


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


@pytest.mark.parametrize("lost", [0, 1])
def test_host_that_vanishes_while_all_wait_is_noticed(
    hosts: Bed, lost: int, tmp_path: Path
) -> None:
    """No data is on its way then, so only the kernel's probes can notice it.

    The kernel answers the probes even for a stopped process, which is not taken for lost.
    """
    # Ranks that wait for each other would be a deadlock.
    body, env = wait_for_each_other, {"HVDLITE_DEADLOCK_GRACE": "0"}
    with world_on(hosts, 3, body, lost, str(tmp_path), **env) as world:
        if lost == 1:
            pause(world, 0)
        for rank in range(3):
            world.wait_for(rank, "waiting")
        time.sleep(0.5)  # By now the kernels have confirmed all data.
        since = Stopwatch()
        hosts.set_link(lost, up=False)
        results = world.wait()
    for result in results:
        error = result.value
        assert error["kind"] == "RankFailedError"
        assert seconds_between(since, error["seen"]) <= BOUND
        if result.rank != lost:
            assert error["rank"] == lost
            assert f"rank {lost} has not answered for 2 s (" in error["message"]
        assert "killed, crashed" not in error["message"]
