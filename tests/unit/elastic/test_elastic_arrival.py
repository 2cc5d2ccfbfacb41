"""Which hosts an elastic job waits for when it starts, with hosts that are one end of a socket."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Collection, Iterator

import pytest

from hvdlite.launch import agents
from hvdlite.launch.agents import await_hosts
from hvdlite.launch.channels import AbsentError, LaunchError, Ssh
from hvdlite.launch.messages import Kind, frame
from hvdlite.launch.remote_host import RemoteHost
from patience import HANG


class FakeHost(RemoteHost):
    """A host whose agent says one word: its hello, or that it has another version."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hello = {}
        self.ours, self.theirs = socket.socketpair()

    def fileno(self) -> int:
        return self.ours.fileno()

    def receive(self) -> None:
        word = self.ours.recv(10)
        if not word:
            raise AbsentError(f"no way to {self.name}")
        if word == b"other":
            raise LaunchError(f"{self.name} has another version")
        self.hello = {"said": word}

    def send(self, data: bytes) -> None:
        self.ours.send(data)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeHost]]:
    monkeypatch.setattr(agents, "_LATE_SECONDS", 0.3)
    made = [FakeHost(name) for name in "abc"]
    yield made
    for host in made:
        host.ours.close()
        host.theirs.close()


def meet_some(hosts: list[FakeHost], least: int, interrupted: int | None = None) -> dict[str, str]:
    def enough(names: Collection[str]) -> bool:
        return len(names) >= least

    silent, _ = socket.socketpair()
    with silent, _:
        fd = silent.fileno() if interrupted is None else interrupted
        return await_hosts(hosts, enough, Ssh(connect_seconds=600), fd)


def test_all_that_come_are_waited_for(
    hosts: list[FakeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_LATE_SECONDS", HANG)
    hosts[0].theirs.send(b"hello")
    hosts[1].theirs.send(b"hello")
    later = threading.Timer(0.1, lambda: hosts[2].theirs.send(b"hello"))
    later.start()
    assert meet_some(hosts, 1) == {}
    later.join()
    assert all(host.hello for host in hosts)


def test_host_that_is_late_is_not_waited_for(hosts: list[FakeHost]) -> None:
    hosts[0].theirs.send(b"hello")
    hosts[2].theirs.send(b"hello")
    assert meet_some(hosts, 2) == {}
    assert [bool(host.hello) for host in hosts] == [True, False, True]


def test_host_that_cannot_be_reached_is_told(hosts: list[FakeHost]) -> None:
    hosts[0].theirs.close()
    hosts[1].theirs.send(b"hello")
    hosts[2].theirs.send(b"hello")
    assert meet_some(hosts, 2) == {"a": "no way to a"}


def test_host_that_is_needed_has_to_come(hosts: list[FakeHost]) -> None:
    hosts[1].theirs.send(b"hello")
    hosts[2].theirs.close()
    with pytest.raises(AbsentError, match="no way to c"):
        meet_some(hosts, 3)


def test_late_hosts_that_are_needed_end_the_wait(
    hosts: list[FakeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "connect_deadline", lambda way: time.monotonic() + 0.2)
    hosts[1].theirs.send(b"hello")
    with pytest.raises(AbsentError, match="host a, c has not answered in time"):
        meet_some(hosts, 2)


def test_other_version_is_not_accepted_where_others_are_enough(hosts: list[FakeHost]) -> None:
    hosts[0].theirs.send(b"hello")
    hosts[1].theirs.send(b"other")
    with pytest.raises(LaunchError, match="b has another version"):
        meet_some(hosts, 1)


def test_hosts_that_have_answered_are_told_that_the_launcher_is_alive(
    hosts: list[FakeHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(agents, "_LATE_SECONDS", HANG)
    thrice = frame(Kind.ALIVE) * 3
    told: list[bytes] = []
    told_too_early: list[socket.socket] = []

    def let_the_others_come() -> None:
        told.append(hosts[0].theirs.recv(len(thrice), socket.MSG_WAITALL))
        told_too_early.extend(select.select([host.theirs for host in hosts[1:]], [], [], 0)[0])
        for host in hosts[1:]:
            host.theirs.send(b"hello")

    others = threading.Thread(target=let_the_others_come)
    others.start()
    hosts[0].theirs.send(b"hello")
    meet_some(hosts, 1)
    others.join()
    assert told == [thrice] and not told_too_early
    assert all(host.hello for host in hosts)


def test_user_can_end_the_wait(hosts: list[FakeHost]) -> None:
    interrupted = os.eventfd(1)
    with pytest.raises(KeyboardInterrupt):
        meet_some(hosts, 1, interrupted)
    os.close(interrupted)
