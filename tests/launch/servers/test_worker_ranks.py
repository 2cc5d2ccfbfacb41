"""Worker ranks get new processes after deaths, later and later, and not for ever."""

from __future__ import annotations

import pytest

from hvdlite.errors import ArgumentError
from hvdlite.launch.command.flags import build_parser
from hvdlite.launch.command.server_flags import describe_servers, refuse_contradictions
from hvdlite.launch.description import Description, Servers
from hvdlite.launch.hosts import Host
from hvdlite.launch.policies.fixed_run import first_processes
from hvdlite.launch.policies.worker_ranks import WorkerRanks


def everywhere(host: str) -> bool:
    return True


def three_workers(fewest: int = 1, restarts: int = 3) -> WorkerRanks:
    """Return ranks 1 to 3 of a job with one server: one on host a, two on b."""
    what = Description(["x"], 4, {}, hosts=[Host("a", 2), Host("b", 2)])
    return WorkerRanks(first_processes(what)[1:], fewest, restarts, now=0.0)


def test_pauses_double_until_the_rank_is_given_up() -> None:
    ranks, worker, now, pauses = three_workers(), 2, 0.0, []
    while (pause := ranks.ended(worker, now, well=False)) is not None:
        pauses.append(pause)
        assert ranks.due(now + pause - 0.1, everywhere) == []
        assert ranks.wake_at(now) == now + pause
        now += pause
        (start,) = ranks.due(now, everywhere)
        worker = start.worker
        assert (start.placement.rank, start.joiner, start.host) == (2, True, "b")
    assert pauses == [1.0, 2.0, 4.0]
    assert ranks.given_up == [2] and ranks.live == 2 and not ranks.lost


def test_good_life_makes_deaths_count_anew() -> None:
    ranks = three_workers(restarts=1)
    assert ranks.ended(2, 0.0, well=False) == 1.0
    (start,) = ranks.due(1.0, everywhere)
    assert ranks.ended(start.worker, 100.0, well=False) == 1.0


def test_new_worker_waits_for_its_host() -> None:
    ranks = three_workers()
    ranks.ended(3, 0.0, well=False)
    ranks.ended(1, 0.0, well=False)
    assert [one.host for one in ranks.due(5.0, lambda host: host == "a")] == ["a"]
    assert [one.worker for one in ranks.due(6.0, everywhere)] == [5]


def test_nothing_is_started_once_a_worker_has_finished() -> None:
    ranks = three_workers(fewest=2)
    ranks.ended(1, 0.0, well=False)
    assert ranks.ended(2, 0.5, well=True) is None
    assert ranks.due(9.0, everywhere) == [] and not ranks.done and not ranks.lost
    assert ranks.ended(3, 1.0, well=False) is None
    assert ranks.done and ranks.lost  # Of two that are needed, one has finished.


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
