"""A worker's connection to the registrar: messages, heartbeats, and every way in which it ends."""

from __future__ import annotations

import json
import os
import queue
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous import client
from hvdlite.rendezvous.address import address_of, fresh_unix_address, listen
from hvdlite.rendezvous.client import RegistrarClient
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import (
    FrameReader,
    FrameWriter,
    Job,
    Role,
    ServerHandshake,
    session_keys,
)
from hvdlite.rendezvous.service import Acceptor
from patience import HANG, wait_until

JOB = Job(secrets.token_bytes(32), secrets.token_bytes(16), 0)
WORKER = 7
LIMIT = HANG  # far more than anything here takes


class Server:
    """A registrar with one worker; it says nothing by itself."""

    def __init__(self, address: str) -> None:
        self._listener = listen(address)
        self.address = address_of(self._listener)
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(self._listener, JOB, 16, self._selector, self._welcome)
        self.connection: socket.socket | None = None
        self.handshake: ServerHandshake | None = None
        self.received: list[dict[str, Any]] = []

    def _welcome(self, connection: socket.socket, handshake: ServerHandshake) -> None:
        from_client, from_server = session_keys(JOB, handshake.transcript)
        self._reader, self._writer = FrameReader(from_client), FrameWriter(from_server)
        self.connection, self.handshake = connection, handshake
        connection.settimeout(LIMIT)

    def accept(self) -> None:
        end = time.monotonic() + LIMIT
        while self.connection is None:
            assert time.monotonic() < end
            for key, _ in self._selector.select(0.1):
                key.data()

    def send(self, body: Any) -> None:
        assert self.connection is not None
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.connection.sendall(self._writer.wrap(body))

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, or None when the worker has hung up."""
        assert self.connection is not None
        while not self.received:
            data = self.connection.recv(1 << 16)
            if not data:
                return None
            self.received += [json.loads(body) for body in self._reader.feed(data)]
        return self.received.pop(0)

    def receive_until_the_end(self) -> list[dict[str, Any]]:
        messages = []
        while (message := self.receive()) is not None:
            messages.append(message)
        return messages

    def hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close()

    def close(self) -> None:
        self.hang_up()
        self._acceptor.close()
        self._selector.close()


class Worker:
    """A client, with what it got."""

    def __init__(self, server: Server, heartbeat: float = 60.0) -> None:
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self.ends: queue.Queue[str] = queue.Queue()
        accepting = threading.Thread(target=server.accept)
        accepting.start()
        self.client = RegistrarClient(
            server.address, JOB, WORKER, Deadline(LIMIT), self.take, self.ends.put, heartbeat
        )
        accepting.join()

    def take(self, message: dict[str, Any]) -> None:
        self.messages.put(message)


@pytest.fixture(params=["unix", "127.0.0.1:0"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    before = open_descriptors()
    one = Server(fresh_unix_address() if request.param == "unix" else request.param)
    yield one
    one.close()
    wait_until(lambda: open_descriptors() <= before, "no descriptor stays open")


def assert_true(value: bool) -> None:
    assert value


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_messages_travel_both_ways(server: Server) -> None:
    worker = Worker(server)
    assert server.handshake is not None
    assert (server.handshake.rank, server.handshake.role) == (WORKER, Role.MEMBERSHIP)
    assert worker.client.local_host == ("127.0.0.1" if ":" in server.address[5:] else None)
    worker.client.send({"kind": "ready", "epoch": -1})
    assert server.receive() == {"kind": "ready", "epoch": -1}
    gather = {"kind": "gather", "epoch": 1, "gone": [[2, "died"]], "reason": "x" * 100_000}
    for message in (gather, {"kind": "alive"}, {"kind": "restore"}):
        server.send(message)
    assert worker.messages.get(timeout=LIMIT) == gather
    assert worker.messages.get(timeout=LIMIT) == {"kind": "restore"}
    worker.client.close()


def test_close_sends_all_that_was_said_and_is_no_end_to_report(server: Server) -> None:
    worker = Worker(server)
    server.send({"kind": "notice", "version": 1, "removed": False})
    worker.client.send({"kind": "bye", "commits": {}, "status": "done"})
    closing = threading.Thread(target=worker.client.close)
    closing.start()
    assert [one["kind"] for one in server.receive_until_the_end()] == ["bye"]
    server.hang_up()
    closing.join(LIMIT)
    assert worker.ends.empty()
    with pytest.raises(BootstrapError, match="worker 7 has closed this connection"):
        worker.client.send({"kind": "alive"})


def test_a_silent_registrar_is_lost(server: Server) -> None:
    worker = Worker(server, heartbeat=0.1)
    assert worker.ends.get(timeout=LIMIT) == ("worker 7 lost the registrar: it was silent for 2 s")
    assert set(map(str, server.receive_until_the_end())) == {"{'kind': 'alive'}"}
    with pytest.raises(BootstrapError, match=r"it was silent for 2 s"):
        worker.client.send({"kind": "alive"})
    assert worker.ends.empty()


def test_a_worker_that_was_late_itself_does_not_call_the_registrar_silent(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SILENT_HEARTBEATS", 5)
    worker = Worker(server, heartbeat=0.1)
    released = threading.Event()
    worker.client._on_message = lambda _: assert_true(released.wait(LIMIT))
    server.send({"kind": "restore"})
    time.sleep(0.7)  # Longer than the worker waits for a word.
    server.send({"kind": "alive"})
    released.set()
    check_goes_on(server, worker)


class PollerWithoutTheLock:
    """A poller whose thread, when nothing has come, gets Python's lock much later."""

    def __init__(self) -> None:
        self.waits, self.goes_on = threading.Event(), threading.Event()
        self._own = select.poll()
        self.register = self._own.register

    def poll(self, milliseconds: float) -> Any:
        found = self._own.poll(milliseconds)
        if not found and not self.waits.is_set():
            self.waits.set()
            assert self.goes_on.wait(LIMIT)
        return found


def test_a_worker_that_waited_for_the_lock_does_not_call_the_registrar_silent(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SILENT_HEARTBEATS", 5)
    poller = PollerWithoutTheLock()
    pollers = [select.poll(), poller]
    kinds = {"POLLIN": select.POLLIN, "POLLOUT": select.POLLOUT}
    fake = SimpleNamespace(poll=pollers.pop, **kinds)
    monkeypatch.setattr(client, "select", fake)
    worker = Worker(server, heartbeat=0.1)
    assert poller.waits.wait(LIMIT)
    time.sleep(0.7)  # Longer than the worker waits for a word.
    server.send({"kind": "alive"})
    poller.goes_on.set()
    check_goes_on(server, worker)


def check_goes_on(server: Server, worker: Worker) -> None:
    for _ in range(3):  # Its own heartbeat goes on.
        assert server.receive() == {"kind": "alive"}
        server.send({"kind": "alive"})
    assert worker.ends.empty()
    worker.client.close()


def test_a_registrar_that_hangs_up_is_lost(server: Server) -> None:
    worker = Worker(server)
    server.hang_up()
    assert worker.ends.get(timeout=LIMIT) == "worker 7 lost the registrar: it hung up"
    with pytest.raises(BootstrapError, match="lost the registrar"):
        worker.client.send({"kind": "alive"})
    worker.client.close()
    assert worker.ends.empty()


def test_a_refused_worker_hears_why(server: Server) -> None:
    worker = Worker(server)
    server.send({"kind": "refused", "reason": "worker 7 has left"})
    server.hang_up()
    assert worker.messages.get(timeout=LIMIT)["kind"] == "refused"
    assert worker.ends.get(timeout=LIMIT) == "the registrar refused worker 7: worker 7 has left"


def test_a_refusal_that_was_not_read_yet_explains_a_message_that_cannot_be_sent(
    server: Server,
) -> None:
    worker = Worker(server)
    released = threading.Event()
    worker.client._on_message = lambda _: assert_true(released.wait(LIMIT))
    server.send({"kind": "restore"})
    server.send({"kind": "refused", "reason": "worker 7 has left"})
    server.hang_up()
    release = threading.Timer(0.2, released.set)
    release.start()
    with pytest.raises(BootstrapError, match="refused worker 7: worker 7 has left"):
        while True:  # TCP takes a message or two after the end.
            worker.client.send({"kind": "ready"})
    assert "refused worker 7" in worker.ends.get(timeout=LIMIT)
    release.join()


def test_a_message_that_is_too_long_is_refused_and_the_connection_stays(server: Server) -> None:
    worker = Worker(server)
    with pytest.raises(BootstrapError, match="too long: at most 4194304 are allowed"):
        worker.client.send({"kind": "ready", "reason": "x" * (4 << 20)})
    worker.client.send({"kind": "ready"})
    assert server.receive() == {"kind": "ready"}
    worker.client.close()


def test_a_registrar_that_cannot_be_reached_is_named() -> None:
    address = fresh_unix_address()
    with pytest.raises(BootstrapError, match="worker 7 cannot reach the registrar at unix:"):
        RegistrarClient(address, JOB, WORKER, Deadline(0.1), print, print)


FORKS = """
import os, sys, time
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.client import RegistrarClient
job = Job(bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3]), 0)
client = RegistrarClient(sys.argv[1], job, 7, Deadline(60), print, print)
child = os.fork()
if child == 0:
    try:
        client.send({"kind": "ready"})
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    time.sleep(600)
    os._exit(0)
client.send({"kind": "child", "pid": child})
time.sleep(600)
"""


def test_a_forked_child_does_not_keep_the_connection_of_a_dead_worker(server: Server) -> None:
    arguments = [server.address, JOB.token.hex(), JOB.job_id.hex()]
    command = [sys.executable, "-c", FORKS, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        server.accept()
        message = server.receive()
        assert message is not None
        try:
            assert "is a forked child of worker 7" in worker.stdout.readline()
            worker.kill()
            assert server.receive_until_the_end() == []
        finally:
            os.kill(message["pid"], signal.SIGKILL)
