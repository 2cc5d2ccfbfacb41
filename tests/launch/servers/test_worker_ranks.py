"""Worker ranks get new processes after deaths, later and later, and not for ever."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvdlite.errors import ArgumentError
from hvdlite.launch.cli import describe_servers, refuse_contradictions
from hvdlite.launch.description import Description, Servers
from hvdlite.launch.flags import build_parser
from hvdlite.launch.hosts import Host
from hvdlite.launch.job import first_processes
from hvdlite.launch.process import Ending
from hvdlite.launch.report import Failure
from hvdlite.launch.servers import ServersJob
from hvdlite.launch.slots import Slots
from hvdlite.launch.supervisor import Next


def three_workers(restarts: int = 3) -> Slots:
    """Return ranks 1 to 3 of a job with one server: one on host a, two on b."""
    what = Description(["x"], 4, {}, hosts=[Host("a", 2), Host("b", 2)])
    return Slots.of(first_processes(what)[1:], restarts, now=0.0)


def ended(slots: Slots, worker: int, now: float, well: bool = False) -> float | None:
    pause = slots.ended(worker, now, died=not well, blames=False)
    if well:
        slots.grows = False
    return pause


def test_pauses_double_until_the_rank_is_given_up() -> None:
    slots, worker, now, pauses = three_workers(), 2, 0.0, []
    while (pause := ended(slots, worker, now)) is not None:
        pauses.append(pause)
        assert slots.waits
        assert slots.due(now + pause - 0.1) == []
        assert slots.wake_at(now) == now + pause
        now += pause
        (start,) = slots.due(now)
        worker = start.worker
        assert (start.placement.rank, start.joiner, start.host) == (2, True, "b")
        assert (start.placement.local_rank, start.slot) == (0, 0)
    assert pauses == [1.0, 2.0, 4.0]
    assert slots.grows and not slots.waits and slots.size == 2
    assert slots.due(1000.0) == []


def test_nothing_is_started_once_a_worker_has_finished() -> None:
    slots = three_workers()
    ended(slots, 1, 0.0)
    assert ended(slots, 2, 0.5, well=True) is None
    assert slots.due(9.0) == [] and not slots.waits and slots.size == 1
    assert ended(slots, 3, 1.0) is None
    assert slots.size == 0 and not slots.waits


class Supervisor:
    """What the policy sees of a job in which nothing has failed."""

    ending = told = lost = False
    signalled = 0
    workers = ()

    def __init__(self) -> None:
        self.said: list[str] = []

    def tell(self, text: str) -> None:
        self.said.append(text)


def policy_of(servers: Servers) -> ServersJob:
    hosts = [Host("a", 2, here=True), Host("b", 2, here=True)]
    policy = ServersJob(Description(["x"], 4, {}, hosts, servers=servers), None, None, None)
    policy.attach(Supervisor())
    return policy


def end(policy: ServersJob, number: int, status: int) -> Next:
    worker = SimpleNamespace(number=number, host="b")
    return policy.ended(worker, Ending(status, by_signal=False), excused=False)


def failure_of(worker: int) -> Failure:
    return Failure(worker, 7, Ending(1, by_signal=False), 0.0, b"")


def test_job_fails_when_fewer_workers_live_than_it_needs() -> None:
    policy = policy_of(Servers(1, min_workers=2))
    assert end(policy, 1, 1) is Next.RECOVER and policy.expects()
    assert end(policy, 2, 0) is Next.GO_ON and policy.expects()
    assert policy.remark(failure_of(1)) == ""
    assert end(policy, 3, 1) is Next.FAIL and not policy.expects()
    left = "hvdlite-run: 1 of 3 workers were left, fewer than --min-workers\n"
    assert policy.remark(failure_of(3)) == left  # Of two that are needed, one has finished.
    assert policy.remark(failure_of(0)) == ""


def test_rank_that_is_given_up_says_so_and_one_that_is_not_needed_does_not() -> None:
    policy = policy_of(Servers(1, restarts=0))
    assert end(policy, 2, 3) is Next.RECOVER
    assert end(policy, 1, 0) is Next.GO_ON
    assert end(policy, 3, 4) is Next.RECOVER
    many, few = (f"{n} of 3 workers go on or have finished, and its rank gets no" for n in (2, 1))
    why = "because its workers died too often (--worker-restarts)"
    assert policy.supervisor.said == [
        f"worker 2 (host b): exit status 3; {many} other one, {why}",
        f"worker 3 (host b): exit status 4; {few} other one",
    ]
    assert not policy.expects()


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        (Servers(0), "servers 0: at least one is needed"),
        (Servers(4), "servers 4 of np 4 ranks leave none to train"),
        (Servers(1, min_workers=0), "min-workers 0: at least one is needed"),
        (Servers(1, min_workers=4), "min-workers 4 is more than the 3 workers of np 4 and serv"),
    ],
)
def test_numbers_that_contradict_each_other(servers: Servers, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        servers.check(4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--servers 1 --min-np 2", r"--servers and --min-np \(write --min-workers\): a job has"),
        ("--servers 1 --max-np 2", "--servers and --max-np: a job has one of them"),
        ("--servers 1 --emit slurm", "--servers and --emit: a job has one of them"),
        ("--min-workers 1", "--min-workers belongs to --servers, which is not given"),
        ("--worker-restarts 1", "--worker-restarts belongs to --servers, which is not"),
    ],
)
def test_flags_that_make_no_sense_together(flags: str, message: str) -> None:
    options = build_parser().parse_args(["-np", "4", *flags.split(), "python", "train.py"])
    with pytest.raises(ArgumentError, match=message):
        refuse_contradictions(options)


def test_flags_describe_the_servers() -> None:
    flags = ["-np", "4", "--servers", "2", "--min-workers", "2", "--worker-restarts", "0"]
    options = build_parser().parse_args([*flags, "python", "train.py"])
    refuse_contradictions(options)
    assert describe_servers(options) == Servers(2, min_workers=2, restarts=0)
    assert describe_servers(build_parser().parse_args(["-np", "4", "true"])) is None
