"""Timeouts of a start: valid values are accepted, 0 means no limit, and a start can be given up."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import hvdlite
from hvdlite.errors import ArgumentError, BootstrapError
from hvdlite.launch.channels import Ssh, ssh_command
from hvdlite.launch.flags import build_parser, variables
from hvdlite.rendezvous.address import address_of, dial, fresh_unix_address, listen
from hvdlite.rendezvous.deadline import Deadline, GivenUpError
from hvdlite.rendezvous.environment import detect
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.store import Store, StoreClient
from patience import HANG

JOB = Job(bytes(32), bytes(16), 0)
NEVER = ["0", "0.0", "inf", "1e10", "1e300"]
RANK = {
    "HVDLITE_RANK": "0",
    "HVDLITE_SIZE": "2",
    "HVDLITE_RENDEZVOUS": "unix:name",
    "HVDLITE_TOKEN": "00" * 32,
    "HVDLITE_JOB_ID": "00" * 16,
}


@pytest.mark.parametrize("variable", ["HVDLITE_START_TIMEOUT", "HOROVOD_START_TIMEOUT"])
@pytest.mark.parametrize("text", ["nan", "-1", "-inf", "soon", "1s"])
def test_what_is_no_time_is_refused(variable: str, text: str) -> None:
    with pytest.raises(BootstrapError, match=f"{variable}={text} cannot be used.*0 for no limit"):
        detect({**RANK, variable: text})


@pytest.mark.parametrize("text", [*NEVER, "1000000", "60"])
def test_any_start_timeout_lets_ranks_meet(text: str) -> None:
    seconds = detect({**RANK, "HVDLITE_START_TIMEOUT": text}).start_timeout
    with (
        Store.start(1, JOB) as store,
        StoreClient(store.address, JOB, 0, Deadline(seconds)) as client,
    ):
        assert client.exchange("hello", "me") == ["me"]


@pytest.mark.parametrize("seconds", [0, HANG])
def test_deadline_within_another_ends_with_it(seconds: float) -> None:
    outer = Deadline(0.01)
    inner = Deadline(seconds, outer=outer)
    assert inner.at == outer.at
    assert Deadline(0.01, outer=Deadline(seconds)).seconds_left <= 0.01
    with pytest.raises(TimeoutError):
        inner.sleep(HANG)


@pytest.mark.parametrize("text", NEVER)
def test_never_is_never(text: str) -> None:
    deadline = Deadline(float(text))
    assert deadline.seconds_left == math.inf and not deadline.passed
    assert 0 < deadline.check() < 1


def test_flags_and_calls_take_the_same_times(capsys: pytest.CaptureFixture[str]) -> None:
    parse = build_parser().parse_args
    for flag in ("--start-timeout", "--gloo-timeout-seconds"):
        with pytest.raises(SystemExit):
            parse([f"{flag}=nan", "-np", "1", "true"])
        assert flag in capsys.readouterr().err
    found = variables(parse(["--start-timeout=1e300", "--gloo-timeout-seconds=0", "true"]))
    assert float(found["HVDLITE_START_TIMEOUT"]) == 1e300
    assert float(found["HVDLITE_COLLECTIVE_TIMEOUT"]) == 0
    assert "ConnectTimeout=none" in ssh_command("node1", Ssh(connect_seconds=1e300))
    with pytest.raises(ArgumentError, match=r"start_timeout=.*0 for no limit"):
        hvdlite.run(print, start_timeout=math.nan)


def receive(connection: socket.socket, deadline: Deadline) -> None:
    deadline.receive(connection, 1)


def send(connection: socket.socket, deadline: Deadline) -> None:
    deadline.send(connection, bytes(64 << 20))


def ask_the_store(connection: socket.socket, deadline: Deadline) -> None:
    with (
        Store.start(2, JOB) as store,
        StoreClient(store.address, JOB, 0, deadline) as client,
    ):
        client.exchange("hello", "me")


def reach_nobody(connection: socket.socket, deadline: Deadline) -> None:
    StoreClient(fresh_unix_address(), JOB, 0, deadline)


def reach_who_never_answers(connection: socket.socket, deadline: Deadline) -> None:
    with listen(fresh_unix_address()) as silent:
        StoreClient(address_of(silent), JOB, 0, deadline)


def reach_who_never_accepts(connection: socket.socket, deadline: Deadline) -> None:
    with listen(fresh_unix_address()) as crowded:
        crowded.listen(0)
        waiting = []
        try:
            while True:
                waiting.append(dial(address_of(crowded), deadline))
        finally:
            for one in waiting:
                one.close()


WAITS: list[Callable[[socket.socket, Deadline], None]] = [
    receive,
    send,
    ask_the_store,
    reach_nobody,
    reach_who_never_answers,
    reach_who_never_accepts,
]


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("seconds", [0, 600])
def test_every_wait_can_be_given_up(wait: Callable[..., Any], seconds: float) -> None:
    deadline = Deadline(seconds)
    ours, theirs = socket.socketpair()
    threading.Timer(0.1, deadline.give_up).start()
    begun = time.monotonic()
    with ours, theirs, pytest.raises(GivenUpError, match=r"shutdown\(\) was called while"):
        wait(ours, deadline)
    assert time.monotonic() - begun < HANG


@pytest.mark.parametrize("wait", WAITS)
def test_every_wait_ends_at_the_deadline(wait: Callable[..., Any]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises((TimeoutError, BootstrapError)):
        wait(ours, Deadline(0.2))


def test_waits_of_a_thousand_slices_lose_nothing() -> None:
    ours, theirs = socket.socketpair()
    data = bytes(range(256)) * 4096
    with ours, theirs:
        sender = threading.Thread(target=partial(Deadline(HANG).send, ours, data))
        sender.start()
        received = b""
        while len(received) < len(data):
            received += Deadline(HANG).receive(theirs, 1 << 16)
        sender.join()
    assert received == data
