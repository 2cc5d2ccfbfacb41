"""Strangers that connect to every port do not disturb a job, get in, or learn anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from faults.arrays import ones, reduce_array, total_of_ones
from faults.flood import (
    Address,
    flooded,
    flooded_by_another_user,
    listening_tcp,
    listening_unix,
)
from harness import World
from hvdlite import basics
from launch.marked import sockets_of
from patience import Stopwatch, wait_until

CONNECTIONS = 10_000
IDLE = 300
GROWTH = 10 << 20


def resident(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def addresses_of(pid: int) -> set[Address]:
    return listening_unix(sockets_of([pid])) | listening_tcp(psutil.Process(pid))


def start_when_told(folder: str) -> dict[str, Any]:
    if os.environ["HVDLITE_RANK"] == "1":
        wait_until((Path(folder) / "go").exists, "the flood has begun")
    watch = Stopwatch()
    basics.init()
    seconds = watch.seconds()
    wrong = 0
    for _ in range(100):
        wrong += int((reduce_array(ones(), "gradient") != total_of_ones()).any())
    return {"seconds": seconds, "wrong": wrong}


def test_world_starts_amid_garbage_at_every_port(tmp_path: Path) -> None:
    """Rank 0 listens while it waits for rank 1, and so does the store, in this process."""
    trap = tmp_path / "trap"
    with World(2, start_when_told, str(tmp_path), hosts=[0, 1]) as world:
        first = world.pids[0]
        doors: set[Address] = set()

        def all_listen() -> bool:
            # The kernel's list may lack a socket while others come and go.
            found = addresses_of(first)
            doors.update(found, listening_unix(sockets_of([psutil.Process().pid])))
            return len(found) >= 2 and len(doors) >= 3

        wait_until(all_listen, "rank 0 and the store listen")
        before = resident(first)
        least = CONNECTIONS // 10 + 1
        with flooded(doors, CONNECTIONS, IDLE, trap, least) as accepted:
            assert accepted > CONNECTIONS / 10
            assert resident(first) - before < GROWTH
            (tmp_path / "go").touch()
            results = world.wait()
    assert [result.value["wrong"] for result in results] == [0, 0]
    assert results[1].value["seconds"] <= 10
    assert not trap.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_world_starts_amid_a_flood_of_another_user(tmp_path: Path) -> None:
    """Every user can read the names of abstract sockets in /proc/net/unix, and connect."""
    with World(2, start_when_told, str(tmp_path)) as world:
        first = world.pids[0]
        wait_until(lambda: len(listening_unix(sockets_of([first]))) >= 1, "rank 0 listens")
        doors = listening_unix(sockets_of([first]))
        doors |= listening_unix(sockets_of([psutil.Process().pid]))
        with flooded_by_another_user(doors, processes=2):
            (tmp_path / "go").touch()
            results = world.wait()
    assert [result.value["wrong"] for result in results] == [0, 0]
