"""The registrar over real sockets: raw clients stand for workers, and one for strangers."""

from __future__ import annotations

import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdlite.errors import BootstrapError
from hvdlite.launch.elastic.messages import (
    Entered,
    EpochFormed,
    Event,
    Evict,
    Failed,
    Goodbye,
    Leaving,
    Limits,
    Warn,
)
from hvdlite.launch.elastic.registrar import Registrar
from hvdlite.rendezvous.address import dial
from hvdlite.rendezvous.client import introduce
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import FrameReader, FrameWriter, Job, Role, session_keys
from patience import HANG

JOB = Job(secrets.token_bytes(32), secrets.token_bytes(16), 0)
PATIENCE = HANG  # only a failing test waits so long
CONNECTIONS: list[socket.socket] = []  # of the running test
LONG = 600.0  # a heartbeat that no test outlasts


class Client:
    """A worker's connection, used by hand."""

    def __init__(self, registrar: Registrar, worker: int, role: Role = Role.MEMBERSHIP) -> None:
        self.worker = worker
        way = (registrar.address, JOB, worker, role, Deadline(PATIENCE))
        self.connection, handshake = introduce(*way)
        from_client, from_server = session_keys(JOB, handshake.transcript)
        self.writer, self.reader = FrameWriter(from_client), FrameReader(from_server)
        self.connection.settimeout(PATIENCE)
        CONNECTIONS.append(self.connection)
        self.messages: list[dict[str, Any]] = []
        self.heard = -1  # the epoch of the newest GATHER

    def send(self, **message: Any) -> None:
        if message["kind"] == "ready":
            message = {"heard": self.heard, "synced": True, **message}
        self.send_body(json.dumps(message).encode())

    def send_body(self, body: bytes) -> None:
        self.connection.sendall(self.writer.wrap(body))

    def ready(self, why: str, epoch: int, commits: int | None = None, **more: Any) -> None:
        counts = {} if commits is None else {"0": commits}
        endpoint = {"port": 1000 + self.worker, "agreed": {"fusion": more.pop("fusion", "64")}}
        self.send(kind="ready", epoch=epoch, why=why, endpoint=endpoint, commits=counts, **more)

    def next(self) -> dict[str, Any] | None:
        """Return the next message but heartbeats; None at the end of the connection."""
        while True:
            while self.messages:
                message = self.messages.pop(0)
                if message["kind"] == "gather":
                    self.heard = message["epoch"]
                if message != {"kind": "alive"}:
                    return message
            try:
                data = self.connection.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.messages += [json.loads(body) for body in self.reader.feed(data)]

    def expect(self, kind: str) -> dict[str, Any]:
        message = self.next()
        assert message is not None
        assert message["kind"] == kind, message
        return message

    def connect(self, epoch: int) -> dict[str, Any]:
        """Take EPOCH, and say that all connections stand."""
        message = self.expect("epoch")
        assert message["epoch"] == epoch
        self.send(kind="connected", epoch=epoch, clock=[self.worker])
        return message


class Launcher:
    """What the launcher sees of a registrar."""

    def __init__(self, registrar: Registrar) -> None:
        self.registrar = registrar
        self.events: list[Event] = []

    def wait(self, kind: type, where: Callable[[Any], bool] = lambda event: True) -> Any:
        """Return the next event of a kind; others before it are dropped."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            while self.events:
                event = self.events.pop(0)
                if isinstance(event, kind) and where(event):
                    return event
            select.select([self.registrar.fd], [], [], end - time.monotonic())
            self.events += self.registrar.take()
        raise AssertionError(f"no {kind.__name__}")


@pytest.fixture(autouse=True)
def _close_connections() -> Iterator[None]:
    yield
    while CONNECTIONS:
        CONNECTIONS.pop().close()


@pytest.fixture
def make() -> Iterator[Callable[..., Launcher]]:
    launchers: list[Launcher] = []

    def start(np: int, heartbeat: float = LONG, **limits: Any) -> Launcher:
        limits = {"min_np": 1, "start_timeout": PATIENCE, **limits}
        registrar = Registrar.start(JOB, Limits(np=np, heartbeat=heartbeat, **limits))
        for worker in range(np):
            registrar.expect(worker, "a", joiner=False)
        launchers.append(Launcher(registrar))
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.registrar.close()
        launcher.registrar.close()  # A second call does nothing.


def start(launcher: Launcher, np: int) -> list[Client]:
    """Bring the first epoch up, and let the workers enter `run`."""
    clients = [Client(launcher.registrar, worker) for worker in range(np)]
    for client in clients:
        client.ready("start", -1)
    for client in clients:
        client.connect(0)
    for client in clients:
        assert client.expect("go")["clocks"] == [[worker] for worker in range(np)]
    assert launcher.wait(EpochFormed).workers == tuple(range(np))
    for client in clients:
        client.ready("boundary", 0)
    for client in clients:
        assert client.expect("continue") == {"kind": "continue", "epoch": 0, "sync": True}
    launcher.wait(Entered)
    return clients


def test_life_of_two_workers(make: Callable[..., Launcher]) -> None:
    launcher = make(2)
    first, second = start(launcher, 2)

    # A death: the survivor suspends its engine, hands out what the dead one may have handed out,
    # and goes on.
    second.connection.close()
    gather = first.expect("gather")
    assert (gather["epoch"], gather["gone"][0][0]) == (1, 1)
    launcher.registrar.ended(1, "died of SIGKILL", clean=False)
    first.ready("lost", 0, commits=7)
    epoch = first.connect(1)
    assert (epoch["mode"], epoch["rank"], epoch["commit_point"]) == ("resume", 0, {"0": 7})
    # Data is to be distributed anew, at a boundary; nobody joins.
    assert first.expect("notice") == {"kind": "notice", "version": 1, "removed": True}
    first.expect("go")
    formed = launcher.wait(EpochFormed)
    assert formed.workers == (0,)
    assert formed.line.startswith("world 1: worker 1 (host a) died of SIGKILL; 1 rank goes on")
    first.ready("boundary", 1, commits=9)
    assert first.expect("continue") == {"kind": "continue", "epoch": 1, "sync": False}

    # A joiner.
    launcher.registrar.expect(2, "b", joiner=True)
    joiner = Client(launcher.registrar, 2)
    joiner.ready("join", -1)
    assert first.expect("notice") == {"kind": "notice", "version": 2, "removed": False}
    first.ready("boundary", 1, commits=11)
    assert first.connect(2)["members"] == [
        [0, {"port": 1000, "agreed": {"fusion": "64"}}],
        [2, {"port": 1002, "agreed": {"fusion": "64"}}],
    ]
    epoch = joiner.connect(2)
    assert (epoch["mode"], epoch["rank"], epoch["sync"]) == ("boundary", 1, True)
    for client in (first, joiner):
        client.expect("go")
    assert "worker 2 (host b) joined; 2 ranks go on" in launcher.wait(EpochFormed).line

    # A host is drained: its worker leaves at the next boundary.
    launcher.registrar.drain(2, "host b is not listed any more")
    for client in (first, joiner):
        assert client.expect("notice")["removed"]
        client.ready("boundary", 2, commits=20)
    joiner.expect("leave")
    assert launcher.wait(Leaving) == Leaving(2)
    first.connect(3)
    first.expect("go")
    assert "worker 2 (host b) left: host b is not" in launcher.wait(EpochFormed).line

    # The end.
    first.send(kind="bye", commits={"0": 30}, status="done")
    assert launcher.wait(Goodbye) == Goodbye(0)
    first.connection.close()
    launcher.registrar.ended(0, "exit status 0", clean=True)
    time.sleep(0.1)
    assert launcher.registrar.take() == []


def test_strangers_and_unknown_workers_are_refused(make: Callable[..., Launcher]) -> None:
    launcher = make(1)
    address = launcher.registrar.address
    stranger = dial(address, Deadline(PATIENCE))
    stranger.sendall(b"GET / HTTP/1.1\r\nHost: somewhere.example\r\nAccept: everything\r\n\r\n" * 4)
    stranger.settimeout(PATIENCE)
    try:
        assert stranger.recv(1) == b""
    except ConnectionResetError:
        pass  # It was refused before the registrar had read all.
    stranger.close()
    other = Job(secrets.token_bytes(32), JOB.job_id, 0)
    with pytest.raises(BootstrapError, match="it belongs to another job, or another user"):
        introduce(address, other, 0, Role.MEMBERSHIP, Deadline(PATIENCE))
    unknown = Client(launcher.registrar, 7)
    assert "worker 7 is not of this job" in unknown.expect("refused")["reason"]
    assert unknown.next() is None
    wrong = Client(launcher.registrar, 0, Role.STORE)
    assert wrong.next() is None
    start(launcher, 1)


def test_second_connection_of_a_worker_is_refused(make: Callable[..., Launcher]) -> None:
    launcher = make(1)
    (client,) = start(launcher, 1)
    second = Client(launcher.registrar, 0)
    assert "has a connection already" in second.expect("refused")["reason"]
    assert second.next() is None
    client.ready("boundary", 0)
    client.expect("continue")


def test_tampered_frame_ends_its_worker_alone(make: Callable[..., Launcher]) -> None:
    launcher = make(2)
    first, second = start(launcher, 2)
    second.connection.sendall(struct.pack("<IQ", 5 << 20, 4) + b"x" * 64)
    assert "worker 1" in launcher.wait(Warn).text
    assert second.next() is None
    assert first.expect("gather")["gone"][0][0] == 1


def test_silent_worker_is_evicted_and_others_are_not(make: Callable[..., Launcher]) -> None:
    launcher = make(2, heartbeat=1.0, silence=1.5)
    first, second = start(launcher, 2)
    evicted: list[Event] = []
    end = time.monotonic() + PATIENCE
    while not evicted and time.monotonic() < end:
        first.send(kind="alive")
        select.select([launcher.registrar.fd], [], [], 0.1)
        evicted += [one for one in launcher.registrar.take() if isinstance(one, Evict)]
    assert evicted == [Evict(1, "sent nothing for 1.5 s")]
    assert first.expect("gather")["gone"] == [[1, "was evicted: sent nothing for 1.5 s"]]
    assert {"kind": "alive"} in [json.loads(body) for body in raw(second)]


def raw(client: Client) -> list[bytes]:
    """Read all until the end of the connection."""
    bodies = []
    while data := client.connection.recv(1 << 16):
        bodies += client.reader.feed(data)
    return bodies


def test_worker_that_does_not_read_blocks_nobody(make: Callable[..., Launcher]) -> None:
    launcher = make(2)
    first, second = start(launcher, 2)
    endpoint = {"names": "x" * 500_000}
    # Both lose their links again and again, and the second one does not read its messages.
    for epoch in range(20):
        first.send(kind="ready", epoch=epoch, why="lost", endpoint=endpoint, commits={"0": epoch})
        message = first.next()
        for kind in ("gather", "epoch", "go"):
            assert message is not None
            if message["kind"] != kind or message.get("gone"):
                break
            if kind == "gather":
                lost = {"kind": "ready", "epoch": epoch, "why": "lost", "endpoint": endpoint}
                first.send(**lost, commits={"0": epoch})
                second.send(**lost, heard=message["epoch"], commits={})
            if kind == "epoch":
                first.send(kind="connected", epoch=epoch + 1, clock=[])
                second.send(kind="connected", epoch=epoch + 1, clock=[])
            message = first.next() if kind != "go" else message
        if message is not None and message.get("gone"):
            break
    assert message is not None
    gone = message["gone"]
    assert "bytes of messages unread" in gone[0][1]
    assert "unread" in launcher.wait(Evict).why


def test_world_too_large_to_describe_fails_the_job(make: Callable[..., Launcher]) -> None:
    launcher = make(2)
    for worker in (0, 1):
        client = Client(launcher.registrar, worker)
        endpoint = {"names": "x" * 2_400_000}
        client.send(kind="ready", epoch=-1, why="start", endpoint=endpoint, commits={})
    reason = launcher.wait(Failed).reason
    assert "a message of 48" in reason and "is too long: at most 4194304" in reason


def test_first_worker_that_never_comes_fails_the_job(make: Callable[..., Launcher]) -> None:
    begun = time.monotonic()
    start(make(1), 1)
    seconds = round(0.2 + 20 * (time.monotonic() - begun), 1)
    launcher = make(2, min_np=2, start_timeout=seconds)
    Client(launcher.registrar, 0).ready("start", -1)
    reason = launcher.wait(Failed).reason
    assert f"within --start-timeout ({seconds:g} s): waits for worker 1 (host a) to call" in reason


def test_close_ends_connections_and_leaks_nothing() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    registrar = Registrar.start(JOB, Limits(np=1, min_np=1))
    registrar.expect(0, "a", joiner=False)
    client = Client(registrar, 0)
    registrar.close()
    registrar.expect(1, "a", joiner=True)  # Does nothing any more.
    assert client.next() is None
    client.connection.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
