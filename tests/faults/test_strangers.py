"""Strangers that connect to every port do not disturb a job, get in, or learn anything."""

from __future__ import annotations

import os
import secrets
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from faults.arrays import ones, reduce_array, total_of_ones
from faults.flood import flooded, flooded_by_another_user
from faults.jobs import (
    Address,
    listening_tcp,
    listening_unix,
    socket_inodes,
    stepping_job,
)
from harness import World
from hvdlite import basics
from hvdlite.rendezvous.address import dial
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.store import Store, StoreClient
from patience import HANG, Stopwatch, wait_until

CONNECTIONS = 10_000
IDLE = 300
GROWTH = 10 << 20
REFUSED_WITHIN = 2.0


def resident(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def addresses_of(pid: int) -> set[Address]:
    return listening_unix(socket_inodes(pid)) | listening_tcp(psutil.Process(pid))


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
            doors.update(found, listening_unix(socket_inodes(psutil.Process().pid)))
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
        wait_until(lambda: len(listening_unix(socket_inodes(first))) >= 1, "rank 0 listens")
        doors = listening_unix(socket_inodes(first))
        doors |= listening_unix(socket_inodes(psutil.Process().pid))
        with flooded_by_another_user(doors, processes=2):
            (tmp_path / "go").touch()
            results = world.wait()
    assert [result.value["wrong"] for result in results] == [0, 0]


def test_garbage_to_every_port_of_a_running_job(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    with stepping_job(tmp_path, hosts=2) as job:
        wait_until(lambda: job.steps() > 50, "the job does steps")
        before = {process.pid: resident(process.pid) for process in job.processes()}
        steps = job.steps()
        with flooded(job.listening(), CONNECTIONS, IDLE, trap):
            wait_until(lambda: job.steps() > steps + 50, "the job goes on")
            for pid, size in before.items():
                assert resident(pid) - size < GROWTH
        assert job.stop() == 0
    assert not trap.exists()


@pytest.fixture
def meeting() -> Any:
    job = Job(secrets.token_bytes(32), secrets.token_bytes(16), 0)
    with Store.start(2, job) as store:
        yield store, job


def both_ranks_meet(store: Store, job: Job) -> bool:
    """Exchange a value between the two real ranks."""
    answers: list[list[str]] = []

    def come(rank: int) -> None:
        with StoreClient(store.address, job, rank, deadline=Deadline(HANG)) as client:
            answers.append(client.exchange("a key", f"secret of rank {rank}"))

    ranks = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return answers == [["secret of rank 0", "secret of rank 1"]] * 2


def test_silent_stranger_is_shown_out(meeting: Any) -> None:
    store, job = meeting
    watch = Stopwatch()
    with dial(store.address, Deadline(HANG)) as silent:
        silent.settimeout(HANG)
        assert silent.recv(1) == b""
    assert watch.seconds() <= REFUSED_WITHIN + 0.5
    assert both_ranks_meet(store, job)
