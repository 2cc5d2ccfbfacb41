"""Which hosts an elastic job waits for when it starts, with hosts that are one end of a socket."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Collection, Iterator
from typing import ClassVar

import pytest

import hvdlite
from hvdlite.launch import agents
from hvdlite.launch.agents import Agents, Pulse
from hvdlite.launch.channels import AbsentError, LaunchError, Ssh
from hvdlite.launch.messages import GREETING, Kind, data_frame, frame
from patience import HANG


class Socket:
    """The channel to a host, whose agent is the test."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.read_fd = self.write_fd = self.ours.fileno()

    def say(self, version: str = hvdlite.__version__) -> None:
        self.theirs.send(GREETING + data_frame(Kind.HELLO, 0, {"version": version}))

    def said(self) -> str:
        return ""

    def cut(self) -> None:
        self.theirs.close()

    end = cut


class Sockets(Ssh):
    """Hosts that are one end of a socket each."""

    made: ClassVar[dict[str, Socket]] = {}

    def open(self, host: str) -> Socket:  # type: ignore[override]
        return self.made[host]

    def explain(self, host: str, said: str, status: int | None) -> str:
        return f"no way to {host}"


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Socket]]:
    monkeypatch.setattr(agents, "_LATE_SECONDS", 0.3)
    monkeypatch.setattr(Sockets, "made", {name: Socket() for name in "abc"})
    made = list(Sockets.made.values())
    yield made
    for host in made:
        host.ours.close()
        host.theirs.close()


def meet_some(least: int, interrupted: int | None = None) -> tuple[dict[str, str], str]:
    """Return why hosts were given up, and the names of those that have come."""

    def enough(names: Collection[str]) -> bool:
        return len(names) >= least

    silent, _ = socket.socketpair()
    with silent, _:
        fd = silent.fileno() if interrupted is None else interrupted
        with Agents(Sockets(connect_seconds=600), Pulse(3, 30, 1), fd) as there:
            missed = there.greet("abc", enough)
            return missed, "".join(host.name for host in there.present)


def test_all_that_come_are_waited_for(hosts: list[Socket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_LATE_SECONDS", HANG)
    hosts[0].say()
    hosts[1].say()
    later = threading.Timer(0.1, lambda: hosts[2].say())
    later.start()
    assert meet_some(1) == ({}, "abc")
    later.join()


def test_host_that_is_late_is_not_waited_for(hosts: list[Socket]) -> None:
    hosts[0].say()
    hosts[2].say()
    assert meet_some(2) == ({}, "ac")


def test_host_that_cannot_be_reached_is_told(hosts: list[Socket]) -> None:
    hosts[0].theirs.close()
    hosts[1].say()
    hosts[2].say()
    assert meet_some(2) == ({"a": "no way to a"}, "bc")


def test_host_that_is_needed_has_to_come(hosts: list[Socket]) -> None:
    hosts[1].say()
    hosts[2].theirs.close()
    with pytest.raises(AbsentError, match="no way to c"):
        meet_some(3)


def test_late_hosts_that_are_needed_end_the_wait(
    hosts: list[Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "connect_deadline", lambda way: time.monotonic() + 0.2)
    hosts[1].say()
    with pytest.raises(AbsentError, match="host a, c has not answered in time"):
        meet_some(2)


def test_other_version_is_not_accepted_where_others_are_enough(hosts: list[Socket]) -> None:
    hosts[0].say()
    hosts[1].say("0")
    with pytest.raises(LaunchError, match="host b has hvdlite 0, this launcher is"):
        meet_some(1)


def test_hosts_that_have_answered_are_told_that_the_launcher_is_alive(
    hosts: list[Socket], monkeypatch: pytest.MonkeyPatch
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
            host.say()

    others = threading.Thread(target=let_the_others_come)
    others.start()
    hosts[0].say()
    assert meet_some(1) == ({}, "abc")
    others.join()
    assert told == [thrice] and not told_too_early


def test_user_can_end_the_wait(hosts: list[Socket]) -> None:
    interrupted = os.eventfd(1)
    with pytest.raises(KeyboardInterrupt):
        meet_some(1, interrupted)
    os.close(interrupted)
