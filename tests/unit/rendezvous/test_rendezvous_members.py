"""The members of an epoch connect to each other, and go from epoch to epoch, with threads as ranks.

The tests share a process, whose sockets behave as those between processes do. Where the death of a
process matters, a second Python is killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous import mesh
from hvdlite.rendezvous.address import address_of, listen
from hvdlite.rendezvous.client import introduce
from hvdlite.rendezvous.connection import Connection, UnreachableError
from hvdlite.rendezvous.deadline import Deadline, GivenUpError
from hvdlite.rendezvous.descriptors import make_room
from hvdlite.rendezvous.environment import WorkerEnvironment
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.mesh import Endpoint, Mesh
from patience import HANG, Stopwatch, wait_until

TOKEN, JOB_ID = secrets.token_bytes(32), secrets.token_bytes(16)
BYTES = 4096  # of a segment, for each rank of its host
LIMIT = HANG  # far more than anything here takes; a test that waits for it fails


def make_segment(local_size: int) -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, BYTES * local_size)
    return fd


def offer_of(host: str, slot: int = 0, agreed: str = "1") -> Endpoint:
    worker = WorkerEnvironment(local_rank=slot, host_id=host, elastic=True)
    return Endpoint(worker, None, {"HVDLITE_SHM_CHUNK": agreed})


class Meeting:
    """Where the ranks of one epoch wait for each other, as at the registrar."""

    def __init__(self, size: int) -> None:
        self._clocks: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def meet(clock: Any) -> list[Any]:
            self._clocks[rank] = clock
            self._barrier.wait(LIMIT)
            return list(self._clocks)

        return meet


def never_meet(clock: Any) -> list[Any]:
    raise AssertionError("an attempt succeeded that cannot")


class Attempt:
    """One member's attempt to connect in one epoch, in a thread of its own."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        rank: int,
        epoch: int,
        meet: Callable[[Any], list[Any]] = never_meet,
        seconds: float = LIMIT,
        answer: float = 0.0,
    ) -> None:
        self.deadline = Deadline(seconds)
        self.result: Connection | BaseException | None = None
        members = [endpoint.description for endpoint in endpoints]
        job = Job(TOKEN, JOB_ID, epoch)

        def run() -> None:
            try:
                own, limit = endpoints[rank], self.deadline
                mesh = Mesh(own, rank, members, job, make_segment, limit, answer)
                self.result = mesh.connect(meet)
            except BaseException as error:
                self.result = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def wait(self) -> Connection | BaseException:
        self._thread.join(LIMIT)
        assert self.result is not None, "the attempt still runs"
        return self.result

    def connection(self) -> Connection:
        result = self.wait()
        if isinstance(result, BaseException):
            raise result
        return result

    def error(self) -> BaseException:
        result = self.wait()
        assert isinstance(result, BaseException)
        return result


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def endpoints_of(hosts: Sequence[str]) -> Iterator[list[Endpoint]]:
    before = open_descriptors()
    with ExitStack() as stack:
        slots = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
        yield [
            stack.enter_context(offer_of(host, slot))
            for host, slot in zip(hosts, slots, strict=True)
        ]
    assert open_descriptors() <= before  # A former test may have closed some meanwhile.


def connect_all(endpoints: Sequence[Endpoint], epoch: int) -> list[Connection]:
    meeting = Meeting(len(endpoints))
    attempts = [Attempt(endpoints, rank, epoch, meeting.of(rank)) for rank in range(len(endpoints))]
    return [attempt.connection() for attempt in attempts]


def ample_seconds(endpoints: Sequence[Endpoint], epoch: int) -> float:
    """Return seconds in which these members connect many times; they try it in this epoch."""
    begun = time.monotonic()
    check_and_close(connect_all(endpoints, epoch))
    return 0.2 + 20 * (time.monotonic() - begun)


def check_and_close(world: Sequence[Connection]) -> None:
    """Check that each link leads to the rank that it names."""
    for own in world:
        for peer, *links in own.links:
            for fd in links[:2] if links[2] < 0 else []:
                os.write(fd, bytes([own.rank, peer]))
            if links[2] >= 0:
                os.pwrite(links[2], bytes([own.rank, peer]), 2 * own.rank)
                os.eventfd_write(links[3], 1)
    for own in world:
        for peer, *links in own.links:
            for fd in links[:2] if links[2] < 0 else []:
                select.select([fd], [], [], LIMIT)
                assert os.read(fd, 2) == bytes([peer, own.rank])
        local = [peer for peer, *links in own.links if links[2] >= 0]
        for peer in local:
            assert os.pread(own.segment_fd, 2, 2 * peer) == bytes([peer, own.rank])
        assert not local or os.eventfd_read(own.event_fd) == len(local)
    lifelines = [
        (own.rank, peer, links[0]) for own in world for peer, *links in own.links if links[2] >= 0
    ]
    for leaver in world if len(world) > 1 else []:
        os.close(leaver.lifeline_fd)
        # Each neighbour sees it, and sees nothing of those who have not left.
        ended, _, _ = select.select([end for _, _, end in lifelines], [], [], 0)
        assert set(ended) == {end for _, peer, end in lifelines if peer <= leaver.rank}
    for own in world:
        replace(own, lifeline_fd=-1).close()


@pytest.mark.parametrize("hosts", ["aaaa", "ab", "aab", "abab"])
def test_offers_serve_one_epoch_after_the_other(hosts: str) -> None:
    with endpoints_of(hosts) as endpoints:
        for epoch in range(1, 4):
            check_and_close(connect_all(endpoints, epoch))


def test_survivors_are_a_smaller_world_and_the_last_one_a_world_of_one() -> None:
    with endpoints_of("aab") as endpoints:
        for epoch, members in enumerate([endpoints, endpoints[1:], endpoints[1:2]]):
            world = connect_all(members, epoch)
            assert [(one.rank, one.size) for one in world] == [
                (rank, len(members)) for rank in range(len(members))
            ]
            check_and_close(world)


def test_the_host_of_a_worker_is_counted_anew_in_every_epoch() -> None:
    slots = [
        WorkerEnvironment(local_rank=one, local_size=3, node=0, elastic=True) for one in (0, 2)
    ]
    with Endpoint(slots[0], None, {}) as first, Endpoint(slots[1], None, {}) as second:
        world = connect_all([first, second], 0)
    assert [(one.local_rank, one.local_size) for one in world] == [(0, 2), (2, 2)]
    for connection in world:
        connection.close()


def test_a_host_with_two_names_has_memory_for_all_of_its_ranks() -> None:
    """The launcher numbers names, such as localhost and 127.0.0.1; memory is per machine."""
    names = [WorkerEnvironment(local_rank=0, local_size=1, node=node) for node in (0, 1)]
    with Endpoint(names[0], None, {}) as first, Endpoint(names[1], None, {}) as second:
        world = connect_all([first, second], 0)
    assert [(one.local_rank, one.local_size) for one in world] == [(0, 1), (0, 1)]
    for connection in world:
        assert connection.host_of == (0, 0)
        assert os.fstat(connection.segment_fd).st_size == 2 * BYTES
        connection.close()


@pytest.mark.parametrize("hosts", ["aabb", "abca"])
@pytest.mark.parametrize("seed", range(3))
def test_attempts_given_up_at_any_time_leave_the_next_one_whole(
    hosts: str, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(seed)
    with endpoints_of(hosts) as endpoints:
        running: dict[int, Attempt] = {}
        for epoch in range(1, 9):
            # The ranks begin in any order, and rank 3 never, so that no epoch can be completed.
            for rank in chance.sample(range(3), 3):
                if rank in running:
                    running[rank].deadline.give_up()
                    assert not isinstance(running[rank].wait(), Connection)
                running[rank] = Attempt(endpoints, rank, epoch)
                time.sleep(chance.choice([0, 0, 0.002, 0.01, 0.03]))
        # Those that begin the last epoch early dial members that are still in an earlier one.
        meeting = Meeting(4)
        last = {3: Attempt(endpoints, 3, 9, meeting.of(3))}
        for rank in chance.sample(range(3), 3):
            running[rank].deadline.give_up()
            assert not isinstance(running[rank].wait(), Connection)
            last[rank] = Attempt(endpoints, rank, 9, meeting.of(rank))
            time.sleep(chance.choice([0, 0.01, 0.1]))
        check_and_close([last[rank].connection() for rank in range(4)])
    assert "refused" not in capfd.readouterr().err


def test_an_interrupt_leaves_nothing_open_and_the_next_attempt_whole() -> None:
    """Python raises it in the main thread, and so the attempt runs there."""
    with endpoints_of("aa") as endpoints:
        main = threading.main_thread().ident
        interrupt = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
        members = [endpoint.description for endpoint in endpoints]
        job, deadline = Job(TOKEN, JOB_ID, 1), Deadline(LIMIT)
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            Mesh(endpoints[0], 0, members, job, make_segment, deadline).connect(never_meet)
        interrupt.join()
        check_and_close(connect_all(endpoints, 2))


@dataclass
class Obstacle:
    """A rank's attempt that waits for ever, and the name of the place where it does."""

    where: str
    rank: int
    hosts: str
    backlog: int | None = None


OBSTACLES = [
    Obstacle("accepting", 0, "aa"),
    Obstacle("accepting from another host", 0, "ab"),
    Obstacle("shaking hands", 1, "aa"),
    Obstacle("shaking hands with another host", 1, "ab"),
    Obstacle("dialing and accepting", 1, "aaa"),
    Obstacle("dialing a crowded listener", 1, "aa", backlog=0),
]


@pytest.mark.parametrize("obstacle", OBSTACLES, ids=lambda one: str(one.where))
def test_an_attempt_can_be_given_up_wherever_it_waits(obstacle: Obstacle) -> None:
    with endpoints_of(obstacle.hosts) as endpoints, ExitStack() as stack:
        if obstacle.backlog is not None:
            crowded = stack.enter_context(listen("unix:hvdlite-" + secrets.token_hex(8)))
            crowded.listen(obstacle.backlog)
            address = crowded.getsockname()
            for _ in range(2):
                waiting = stack.enter_context(type(crowded)(crowded.family))
                waiting.setblocking(False)
                waiting.connect_ex(address)
            endpoints[0].description["unix"] = "unix:" + bytes(address)[1:].decode()
        attempt = Attempt(endpoints, obstacle.rank, 1)
        time.sleep(0.1)
        assert attempt.result is None
        attempt.deadline.give_up()
        assert isinstance(attempt.error(), GivenUpError)


@pytest.mark.parametrize("hosts", ["aaa", "bba"])
def test_a_member_whose_listener_has_gone_is_named_soon(hosts: str) -> None:
    with endpoints_of(hosts) as endpoints:
        endpoints[0].close()
        watch = Stopwatch()
        error = Attempt(endpoints, 1, 1).error()
        seconds = watch.seconds()
    assert isinstance(error, UnreachableError)
    assert error.rank == 0
    assert "rank 1 cannot reach rank 0: " in str(error)
    assert seconds < LIMIT / 2


def test_the_first_rank_of_a_host_tells_the_others_whom_it_misses() -> None:
    with endpoints_of("aaa") as endpoints:
        seconds = ample_seconds(endpoints, 1)
        attempts = [Attempt(endpoints, rank, 2, seconds=seconds) for rank in (0, 2)]
        errors = [attempt.error() for attempt in attempts]
    for error in errors:
        assert isinstance(error, UnreachableError)
        assert error.rank == 1
        assert str(error) == "rank 1 did not connect to rank 0 in time"


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_members_find_each_other_among_strangers_at_every_listener(hosts: str) -> None:
    noise = random.Random(7)
    with endpoints_of(hosts) as endpoints, ExitStack() as strangers:
        for listener in (one for each in endpoints for one in each.listeners()):
            address, family = listener.getsockname(), listener.family
            listener.close()
            for number in range(60):
                stranger = strangers.enter_context(socket.socket(family))
                stranger.connect(address)
                stranger.sendall(noise.randbytes(number % 3 * 100))  # Every third one is silent.
        check_and_close(connect_all(endpoints, 1))


def test_descriptors_wait_while_too_many_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    send, refused = socket.send_fds, []

    def refuse_at_first(*arguments: Any) -> int:
        if len(refused) < 5:
            refused.append(arguments)
            raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
        return send(*arguments)

    monkeypatch.setattr(socket, "send_fds", refuse_at_first)
    with endpoints_of("aaa") as endpoints:
        check_and_close(connect_all(endpoints, 1))
    assert len(refused) == 5


def test_limit_of_open_files_is_raised_where_it_has_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.__setitem__(0, pair[0]))
    make_room(100, 8)
    assert limits[0] == 1024
    make_room(2000, 1024)
    assert 2000 < limits[0] < 4096
    with pytest.raises(BootstrapError, match="other ranks of 4096, and may open 4096; raise"):
        make_room(8000, 4096)


def test_a_member_that_stays_in_another_epoch_is_named_at_the_deadline() -> None:
    with endpoints_of("aa") as endpoints:
        seconds = ample_seconds(endpoints, 0)
        behind = Attempt(endpoints, 0, 1)
        error = Attempt(endpoints, 1, 2, seconds=seconds).error()
        assert isinstance(error, UnreachableError)
        assert error.rank == 0
        assert "belongs to epoch 2 of the job, its peer to epoch 1" in str(error)
        behind.deadline.give_up()
        behind.wait()


def test_members_with_different_settings_are_refused() -> None:
    with offer_of("a", agreed="1") as first, offer_of("a", agreed="2") as second:
        error = Attempt([first, second], 0, 1).error()
    assert isinstance(error, BootstrapError)
    assert "rank 0 has HVDLITE_SHM_CHUNK=1, rank 1 has HVDLITE_SHM_CHUNK=2" in str(error)


def test_an_error_of_the_meeting_ends_the_attempt() -> None:
    def fail(clock: Any) -> list[Any]:
        raise BootstrapError("the registrar is gone")

    with endpoints_of("ab") as endpoints:
        attempts = [Attempt(endpoints, rank, 1, fail) for rank in range(2)]
        errors = [str(attempt.error()) for attempt in attempts]
    # A rank may find that its peer has left while they compared clocks.
    assert "the registrar is gone" in errors


DIES_WITH_A_CHILD = """
import json, os, sys, time
from hvdlite.rendezvous.environment import WorkerEnvironment
from hvdlite.rendezvous.mesh import Endpoint
endpoint = Endpoint(WorkerEnvironment(host_id=sys.argv[1], elastic=True), None, {})
child = os.fork()
if child == 0:
    time.sleep(600)
    os._exit(0)
print(json.dumps([endpoint.description, child]), flush=True)
time.sleep(600)
"""


def has_sockets(pid: int) -> bool:
    links = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # It was closed just now.
            links.append(str(one.readlink()))
    return any(link.startswith("socket:") for link in links)


@pytest.mark.parametrize("host", ["a", "b"])
def test_a_forked_child_does_not_keep_the_listeners_of_a_dead_member(host: str) -> None:
    import json

    command = [sys.executable, "-c", DIES_WITH_A_CHILD, host]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as member,
        Endpoint(WorkerEnvironment(host_id="a", elastic=True), None, {}) as own,
    ):
        assert member.stdout is not None
        description, child = json.loads(member.stdout.readline())
        try:
            wait_until(lambda: not has_sockets(child), "the child has closed its copies")
            member.kill()
            member.wait()
            members = [description, own.description]
            job = Job(TOKEN, JOB_ID, 1)
            with pytest.raises(UnreachableError) as caught:
                Mesh(own, 1, members, job, make_segment, Deadline(LIMIT)).connect(never_meet)
        finally:
            os.kill(child, signal.SIGKILL)
    assert caught.value.rank == 0


def test_host_whose_kernel_does_not_answer_is_reported_before_the_deadline() -> None:
    """The queue of the listener is full, so its kernel drops further requests to connect."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        endpoints = stack.enter_context(endpoints_of(["a", "b"]))
        cut_off = {**endpoints[0].description, "tcp": address_of(full)}
        members = [cut_off, endpoints[1].description]
        job, deadline = Job(TOKEN, JOB_ID, 1), Deadline(1000)
        with pytest.raises(UnreachableError, match="cannot reach rank 0: timed out") as caught:
            Mesh(endpoints[1], 1, members, job, make_segment, deadline, 0.3).connect(never_meet)
    assert (caught.value.rank, caught.value.silent) == (0, True)


@pytest.mark.parametrize("passes", [True, False])
def test_missing_route_may_come_back(monkeypatch: pytest.MonkeyPatch, passes: bool) -> None:
    failures: list[str] = []

    def fail_at_first(address: str, *arguments: Any) -> Any:
        if passes and len(failures) == 3:
            return introduce(address, *arguments)
        failures.append(address)
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(mesh, "introduce", fail_at_first)
    with endpoints_of(["a", "b"]) as endpoints:
        meeting = Meeting(2)
        seconds = LIMIT if passes else 1.0
        attempts = [
            Attempt(endpoints, rank, 1, meeting.of(rank), answer=seconds) for rank in (0, 1)
        ]
        if passes:
            for attempt in attempts:
                attempt.connection().close()
            return
        error = attempts[1].error()
        assert isinstance(error, UnreachableError)
        assert (error.rank, error.silent) == (0, True)
        attempts[0].deadline.give_up()
        assert isinstance(attempts[0].error(), GivenUpError)
    assert len(failures) > 1


def test_member_that_is_late_is_not_taken_for_silent() -> None:
    with endpoints_of(["a", "b"]) as endpoints:
        meeting = Meeting(2)
        eager = Attempt(endpoints, 1, 1, meeting.of(1), answer=0.1)
        time.sleep(0.4)
        late = Attempt(endpoints, 0, 1, meeting.of(0), answer=0.1)
        for attempt in (eager, late):
            attempt.connection().close()
