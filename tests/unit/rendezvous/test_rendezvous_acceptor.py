"""The acceptor keeps the connection of a rank when strangers come in numbers."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from hvdlite.rendezvous import service
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import ClientHandshake, Job, Role, ServerHandshake
from hvdlite.rendezvous.store import Store, StoreClient
from patience import HANG

JOB = Job(token=b"t" * 32, job_id=b"j" * 16, epoch=3)


def test_strangers_do_not_push_out_a_rank_that_has_named_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_LEAST_ROOM", 2)
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        listener = socket.create_server(("127.0.0.1", 0))
        welcomed: list[int] = []

        def welcome(connection: socket.socket, handshake: ServerHandshake) -> None:
            stack.enter_context(connection)
            welcomed.append(handshake.rank)

        door = service.Acceptor(listener, JOB, 1, selector, welcome)
        stack.callback(door.close)

        def dial() -> socket.socket:
            dialled = socket.create_connection(listener.getsockname(), HANG)
            return stack.enter_context(dialled)

        def serve() -> None:
            for key, _ in selector.select(HANG):
                key.data()

        client, rank = ClientHandshake(JOB, 0, Role.STORE), dial()
        serve()
        rank.sendall(client.hello)
        serve()
        for _ in range(4):
            dial()
            serve()
        rank.sendall(client.feed(rank.recv(client.wanted())))
        serve()
    assert welcomed == [0]


def test_stranger_may_hang_up_in_the_moment_in_which_it_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_LEAST_ROOM", 1)
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        listener = socket.create_server(("127.0.0.1", 0))
        door = service.Acceptor(listener, JOB, 0, selector, lambda *_: None)
        stack.callback(door.close)
        first = socket.create_connection(listener.getsockname(), HANG)
        for key, _ in selector.select(HANG):
            key.data()
        first.close()
        stack.enter_context(socket.create_connection(listener.getsockname(), HANG))
        events: dict[bool, selectors.SelectorKey] = {}
        while len(events) < 2:
            events.update({key.fileobj is listener: key for key, _ in selector.select(HANG)})
        events[True].data()  # It lets the second one in, and so drops the first one.
        events[False].data()
        assert len(door._pending) == 1


OF_ANOTHER_USER = """
import os, socket, sys
from hvdlite.rendezvous.handshake import ClientHandshake, Job, Role
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
client = ClientHandshake(Job(b"t" * 32, b"j" * 16, 3), 0, Role.STORE)
answer = b""
with socket.socket(socket.AF_UNIX) as stranger:
    stranger.connect(chr(0) + sys.argv[1])
    try:
        stranger.sendall(client.hello)
        answer = stranger.recv(client.wanted())
    except OSError:
        pass  # It was hung up on.
print("answered" if answer else "refused")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_of_the_host_is_refused_even_with_the_secret() -> None:
    with Store.start(1, JOB) as store:
        name = store.address.removeprefix("unix:")
        command = [sys.executable, "-c", OF_ANOTHER_USER, name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
        assert done.stdout == "refused\n", done.stderr


WITH_FEW_FILES = """
import os, resource, select, sys
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.store import Store
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
with Store.start(1, Job(b"t" * 32, b"j" * 16, 3)) as store:
    print(store.address, flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        os.listdir("/proc")  # This opens it.
"""


def test_strangers_leave_files_for_the_process_that_they_call() -> None:
    with ExitStack() as stack:
        command = [sys.executable, "-c", WITH_FEW_FILES]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        server = stack.enter_context(subprocess.Popen(command, text=True, **pipes))  # type: ignore[call-overload]
        address = server.stdout.readline().strip()
        for _ in range(300):
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
            stranger.connect("\0" + address.removeprefix("unix:"))
        with StoreClient(address, JOB, 0, deadline=Deadline(HANG)) as client:
            assert client.exchange("a key", 7) == [7]
        _, stderr = server.communicate()
    assert (server.returncode, stderr) == (0, "")


class EndlessQueue(socket.socket):
    """A listener at which strangers always wait, behind the first connection."""

    accepted = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.accepted += 1
        assert self.accepted < 10_000, "strangers alone are let in"
        if self.accepted == 1:
            return super().accept()
        stranger, end = socket.socketpair()
        end.close()
        return stranger, None


def test_rank_is_served_while_strangers_never_stop_to_come() -> None:
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        listener = EndlessQueue()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        welcomed: list[socket.socket] = []
        door = service.Acceptor(listener, JOB, 1, selector, lambda *one: welcomed.append(one[0]))
        stack.callback(door.close)
        client = ClientHandshake(JOB, 0, Role.STORE)
        rank, _waiting = (
            stack.enter_context(socket.create_connection(listener.getsockname(), HANG))
            for _ in range(2)
        )
        for message in (client.hello, None):
            rank.sendall(message or client.feed(rank.recv(client.wanted())))
            for _ in range(2):
                for key, _ in selector.select(HANG):
                    key.data()
        (served,) = welcomed
        served.close()


class FullTable(socket.socket):
    """A listener of a process that can open no more files."""

    full = True

    def accept(self) -> tuple[socket.socket, object]:
        if self.full:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_acceptor_without_a_file_rests_says_so_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        listener = FullTable()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        door = service.Acceptor(listener, JOB, 1, selector, lambda *_: None)
        stack.callback(door.close)
        stack.enter_context(socket.create_connection(listener.getsockname(), HANG))
        for _ in range(2):
            monkeypatch.setattr(service, "_REST_SECONDS", HANG)
            for key, _ in selector.select(HANG):
                key.data()
            door.expire()
            assert selector.select(0) == [], "it does not turn in circles"
            monkeypatch.setattr(door, "_rests_until", 0.0)
            door.expire()
        listener.full = False
        for key, _ in selector.select(HANG):
            key.data()
        assert len(door._pending) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "hvdlite: connections have to wait: Too many open files: this process may open " in said
    assert "by `ulimit -n 4096`, or start fewer ranks on this host" in said
