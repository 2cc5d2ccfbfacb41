"""Rank 0 serves the store at a name that resolves late, and refuses ranks of another epoch."""

from __future__ import annotations

import secrets
import socket
import time
from typing import Any

import pytest

from faults.ports import free_port
from hvdlite.errors import BootstrapError
from hvdlite.rendezvous import client, store
from hvdlite.rendezvous.address import address_of, listen
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.environment import WorkerEnvironment, detect
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.mesh import Endpoint
from hvdlite.rendezvous.store import Store, StoreClient, serve_store
from patience import HANG

TOKEN = secrets.token_hex(32)
POD = "train-0.train"
ELSEWHERE = "192.0.2.1"  # an address that no host has


def by_hand(rank: int, rendezvous: str, **more: str) -> WorkerEnvironment:
    return detect(
        {
            "HVDLITE_RANK": str(rank),
            "HVDLITE_SIZE": "2",
            "HVDLITE_RENDEZVOUS": rendezvous,
            "HVDLITE_TOKEN": TOKEN,
            "HVDLITE_START_TIMEOUT": str(HANG),
            **more,
        }
    )


def job_of(worker: WorkerEnvironment) -> Job:
    return Job(worker.token, worker.job_id, worker.epoch)


class Names:
    """A name service in which a pod's name has an address only after some look-ups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late: int, before: str | None) -> None:
        self.look_ups = 0
        self._late = late
        self._before = before
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self.look_up)

    def look_up(self, host: str, port: int, **options: Any) -> Any:
        if host != POD:
            return self._real(host, port, **options)
        self.look_ups += 1
        if self.look_ups > self._late:
            return self._real("127.0.0.1", port, **options)
        if self._before is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._real(self._before, port, **options)


@pytest.mark.parametrize("before", [None, ELSEWHERE])
def test_name_that_resolves_late_does_not_end_rank_0(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    names = Names(monkeypatch, late=5, before=before)
    worker = by_hand(0, f"{POD}:{free_port()}")
    with serve_store(worker, job_of(worker), Deadline(worker.start_timeout)) as store:
        assert names.look_ups == 6
        assert store.address.startswith("127.0.0.1:")


def test_name_that_never_resolves_ends_rank_0_at_the_start_timeout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "_QUIET_SECONDS", 0.0)
    Names(monkeypatch, late=1 << 30, before=None)
    worker = by_hand(0, f"{POD}:23456")
    with pytest.raises(BootstrapError, match=f"rank 0 cannot listen at {POD}:23456: Name or"):
        serve_store(worker, job_of(worker), Deadline(0.8))
    said = f"waits until {POD}:23456 is an address of its host: Name or service not known"
    assert capfd.readouterr().err.count(said) == 1


def test_address_of_another_host_ends_rank_0_at_once() -> None:
    worker = by_hand(0, f"{ELSEWHERE}:23456")
    with pytest.raises(BootstrapError, match=f"cannot listen at {ELSEWHERE}:23456: Cannot assign"):
        serve_store(worker, job_of(worker), Deadline(0))


def test_address_that_other_hosts_cannot_reach_is_refused() -> None:
    two_hosts = {"HVDLITE_LOCAL_RANK": "0", "HVDLITE_LOCAL_SIZE": "1"}
    worker = by_hand(0, f"127.0.0.1:{free_port()}", **two_hosts)
    with pytest.raises(BootstrapError, match="which no other host can reach; set HVDLITE_RENDEZ"):
        serve_store(worker, job_of(worker), Deadline(0))


def test_port_in_use_ends_rank_0_at_once() -> None:
    with listen("127.0.0.1:0") as taken:
        worker = by_hand(0, address_of(taken).replace("127.0.0.1", "localhost"))
        with pytest.raises(BootstrapError, match="Address already in use"):
            serve_store(worker, job_of(worker), Deadline(0))


def test_rank_0_listens_at_the_address_that_the_user_chooses() -> None:
    port = free_port("127.0.0.2")
    worker = by_hand(0, f"name.that.nobody.knows.invalid:{port}", HVDLITE_BIND_ADDRESS="127.0.0.2")
    with serve_store(worker, job_of(worker), Deadline(HANG)) as store:
        assert store.address == f"127.0.0.2:{port}"
    with Endpoint(worker, "127.0.0.1", {}) as endpoint:
        assert endpoint.description["tcp"].startswith("127.0.0.2:")


def test_ranks_look_the_name_up_again_when_its_host_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until the record of a new pod is there, its name leads to a pod that has gone."""
    monkeypatch.setattr(client, "_LOOK_UP_SECONDS", 0.3)
    silent = socket.socket()
    port = free_port()
    silent.bind(("127.0.0.3", port))
    silent.listen(0)
    crowd = [socket.socket() for _ in range(4)]
    for one in crowd:  # A full queue: the kernel drops further attempts, as if no host were there.
        one.setblocking(False)
        one.connect_ex(silent.getsockname())
    names = Names(monkeypatch, late=2, before="127.0.0.3")
    worker = by_hand(1, f"{POD}:{port}")
    try:
        with (
            Store.start(2, job_of(worker), f"127.0.0.1:{port}"),
            StoreClient(f"{POD}:{port}", job_of(worker), 1, Deadline(HANG)),
        ):
            assert names.look_ups == 3
    finally:
        for one in (silent, *crowd):
            one.close()


def test_leftovers_of_another_epoch_are_refused_under_every_launcher() -> None:
    address = f"127.0.0.1:{free_port()}"
    new, leftover = by_hand(0, address, HVDLITE_EPOCH="1"), by_hand(1, address)
    with serve_store(new, job_of(new), Deadline(HANG)):
        begin = time.monotonic()
        message = "rank 1 belongs to epoch 0 of the job, its peer to epoch 1; it is a leftover"
        with pytest.raises(BootstrapError, match=message):
            StoreClient(address, job_of(leftover), 1, Deadline(600))
        assert time.monotonic() - begin < HANG  # It is refused, and does not wait for the deadline.
        fitting = by_hand(1, address, HVDLITE_EPOCH="1")
        StoreClient(address, job_of(fitting), 1, Deadline(HANG)).close()
