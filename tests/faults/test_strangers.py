"""Strangers that connect to every port do not disturb a job, get in, or learn anything."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic.journals import check_core_job, read_journals
from elastic.plans import Fault, Plan
from faults.arrays import ones, reduce_array, total_of_ones
from faults.flood import HELLO, crowded, flooded, flooded_by_another_user
from faults.jobs import (
    Address,
    listening_tcp,
    listening_unix,
    socket_inodes,
    stepping_job,
)
from harness import World
from hvdlite import basics
from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.address import address_of, dial
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.store import Store, StoreClient
from launcher import end_launcher, start_launcher
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


@pytest.mark.parametrize("hosts", [1, 2])
def test_garbage_to_every_port_of_a_running_job(hosts: int, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    with stepping_job(tmp_path, hosts=hosts) as job:
        wait_until(lambda: job.steps() > 50, "the job does steps")
        before = {process.pid: resident(process.pid) for process in job.processes()}
        steps = job.steps()
        with flooded(job.listening(), CONNECTIONS, IDLE, trap):
            wait_until(lambda: job.steps() > steps + 50, "the job goes on")
            for pid, size in before.items():
                assert resident(pid) - size < GROWTH
        assert job.stop() == 0
    assert not trap.exists()


WITH_FEW_FILES = """
import resource, sys
from hvdlite.launch.command.cli import main
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
sys.exit(main())
"""


def test_dead_worker_is_replaced_amid_more_strangers_than_the_launcher_may_open_files(
    tmp_path: Path,
) -> None:
    """Worker 1 dies; the others wait for the second epoch after that, which has a new worker."""
    steps = 12
    plan = Plan(str(tmp_path), steps, (Fault(1, "before step", 4),), hold_at=8, hold_until=2)
    worker = Path(__file__).parents[1] / "elastic" / "core_worker.py"
    flags = ("-np", "2", "--min-np", "1", "--max-np", "2")
    command = (sys.executable, str(worker), plan.as_json())
    job = start_launcher(*flags, *command, program=("-c", WITH_FEW_FILES))
    try:
        doors: set[Address] = set()

        def listens() -> bool:
            doors.update(listening_unix(socket_inodes(job.pid)))
            return bool(doors)

        wait_until(listens, "the launcher listens")
        with crowded(doors, 400):
            stderr = job.communicate(timeout=4 * HANG)[1].decode()
    finally:
        end_launcher(job)
    assert job.returncode == 0, stderr
    assert "Too many open files" not in stderr
    check_core_job(read_journals(tmp_path), steps)


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


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(lambda job: Job(bytes(32), job.job_id, job.epoch), id="without-the-token"),
        pytest.param(lambda job: Job(job.token, bytes(16), job.epoch), id="of-another-job"),
        pytest.param(lambda job: Job(job.token, job.job_id, 1), id="of-another-epoch"),
    ],
)
def test_stranger_is_refused(meeting: Any, forge: Callable[[Job], Job]) -> None:
    store, job = meeting
    watch = Stopwatch()
    with pytest.raises(BootstrapError, match="rank 1"):
        StoreClient(store.address, forge(job), 1, deadline=Deadline(HANG))
    assert watch.seconds() <= REFUSED_WITHIN
    assert both_ranks_meet(store, job)


def test_silent_stranger_is_shown_out(meeting: Any) -> None:
    store, job = meeting
    watch = Stopwatch()
    with dial(store.address, Deadline(HANG)) as silent:
        silent.settimeout(HANG)
        assert silent.recv(1) == b""
    assert watch.seconds() <= REFUSED_WITHIN + 0.5
    assert both_ranks_meet(store, job)


def test_replay_of_what_a_rank_said_gets_nothing(meeting: Any) -> None:
    """A stranger repeats everything that a real client has sent."""
    store, job = meeting
    said = record_client(store, job)
    assert len(said) > HELLO.size + 32
    with dial(store.address, Deadline(HANG)) as stranger:
        stranger.settimeout(HANG)
        stranger.sendall(said)
        answer = receive_all(stranger)
    assert len(answer) <= 64, "more than the reply to a hello"
    assert b"secret" not in answer
    assert both_ranks_meet(store, job)


def record_client(store: Store, job: Job) -> bytes:
    """Let rank 0 talk to the store through a proxy; return the bytes that it sent."""
    said = bytearray()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind("\0hvdlite-test-" + secrets.token_hex(8))
        door.listen()
        proxy = threading.Thread(target=pass_on, args=(door, store.address, said))
        proxy.start()
        deadline = Deadline(HANG)
        with (
            StoreClient(address_of(door), job, 0, deadline=deadline) as client,
            pytest.raises(BootstrapError, match="rank 1"),
        ):
            deadline.at = time.monotonic() + 2.0  # for the exchange alone
            client.exchange("a key", "secret of rank 0")
        proxy.join()
    return bytes(said)


def pass_on(door: socket.socket, address: str, said: bytearray) -> None:
    client, _ = door.accept()
    with client, dial(address, Deadline(HANG)) as server:
        server.settimeout(None)
        back = threading.Thread(target=copy, args=(server, client, bytearray()))
        back.start()
        copy(client, server, said)
        server.shutdown(socket.SHUT_RDWR)
        back.join()


def copy(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            seen += data
            target.sendall(data)


def receive_all(connection: socket.socket) -> bytes:
    answer = bytearray()
    connection.settimeout(HANG)
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(4096):
            answer += data
    return bytes(answer)
