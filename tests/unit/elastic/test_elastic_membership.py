"""The membership of an elastic job: how it starts, and goes on after deaths; random schedules."""

from __future__ import annotations

import pytest

from hvdlite.launch.elastic.messages import (
    EpochFormed,
    Evict,
    Failed,
    Raised,
    Replace,
    Warn,
    Went,
)
from hvdlite.launch.elastic.state import Phase
from membership_model import Job
from membership_story import Story, at_boundary, formed, lost

SCHEDULES = 10_000


# The start.


@pytest.mark.parametrize("ready", [0, 1, 2])
def test_worker_that_is_killed_before_the_first_epoch_is_replaced(ready: int) -> None:
    story = Story(2)
    for worker in range(ready):
        story.ready(worker, "start")
    story.dies(1)
    assert story.events.count(Replace()) == 1
    assert story.event(Warn).text == (
        "worker 1 (host a) died of SIGKILL, and is replaced before the first step"
    )
    if ready == 2:
        assert story.kinds(0) == ["epoch", "gather"]
    if ready in (0, 2):
        story.ready(0, "start")
    assert story.phase is Phase.STARTING
    story.expect(2, joiner=False)
    story.ready(2, "start")
    assert [member for member, _ in story.last(2, "epoch")["members"]] == [0, 2]
    story.connected(0, 2)
    assert story.event(EpochFormed).workers == (0, 2)


@pytest.mark.parametrize("ready", [0, 1, 2])
def test_death_that_leaves_too_few_before_the_first_epoch_fails_the_job(ready: int) -> None:
    story = Story(2, min_np=2)
    for worker in range(ready):
        story.ready(worker, "start")
    story.dies(1)
    reason = "worker 1 (host a) died of SIGKILL before all workers were connected"
    assert story.event(Failed).reason == reason
    story.ready(0, "start")
    assert story.phase is Phase.OVER


def test_job_starts_with_the_workers_that_are_there_after_the_start_timeout() -> None:
    story = Story(3, min_np=2, start_timeout=30.0)
    for worker in (0, 2):
        story.ready(worker, "start")
    story.waits(31.0)
    why = "was not ready within --start-timeout (30 s)"
    assert story.event(Evict) == Evict(1, why)
    story.dies(1)
    assert [member for member, _ in story.last(2, "epoch")["members"]] == [0, 2]
    story.waits(20.0)
    story.connected(0, 2)
    assert story.event(EpochFormed) == EpochFormed(0, (0, 2), "world 0: 2 ranks start")


def test_lost_connection_before_the_first_epoch_waits_for_the_reason() -> None:
    story = Story(2)
    story.ready(0, "start")
    story.take(story.membership.connection_lost(0, story.now))
    assert story.none_of(Failed)
    story.ends(0, status=3)
    assert "ended with exit status 3 before" in story.event(Failed).reason


def test_worker_that_ends_well_without_init_fails_those_that_wait() -> None:
    story = Story(2)
    story.ends(0)
    assert story.none_of(Failed)
    story.ready(1, "start")
    assert "worker 0 (host a) ended with exit status 0 before" in story.event(Failed).reason


def test_workers_that_all_end_well_without_init_are_a_job() -> None:
    story = Story(2)
    story.ends(0)
    story.ends(1)
    assert story.phase is Phase.DONE
    assert not story.events


def test_start_timeout_names_who_is_missing() -> None:
    story = Story(3, min_np=2, start_timeout=30.0)
    story.ready(1, "start")
    story.waits(29.0)
    assert [type(event) for event in story.events] == [Warn, Warn]
    story.waits(2.0)
    assert "waits for worker 0 (host a), worker 2 (host a)" in story.event(Failed).reason


def test_first_workers_that_cannot_reach_each_other_fail_the_job() -> None:
    story = Story(2)
    story.ready(0, "start")
    story.ready(1, "start")
    story.says(1, "unreachable", epoch=0, worker=0, reason="refused")
    story.waits(1.0)
    reason = "worker 1 (host a) cannot reach worker 0 (host a): refused"
    assert story.event(Failed).reason == reason


# Deaths.


def test_survivors_go_on_in_place_with_the_newest_commit() -> None:
    story = formed(3)
    story.now = 5.0
    story.dies(1)
    gather = story.last(0, "gather")
    assert (gather["epoch"], gather["gone"]) == (1, [[1, "died of SIGKILL"]])
    lost(story, 0, commits=7)
    assert story.kinds(0) == []
    lost(story, 2, commits=8)
    epoch = story.last(2, "epoch")
    assert (epoch["mode"], epoch["rank"], epoch["commit_point"]) == ("resume", 1, {"0": 8})
    assert [member for member, _ in epoch["members"]] == [0, 2]
    story.now += 0.041
    story.connected(0, 2)
    line = "world 1: worker 1 (host a) died of SIGKILL; 2 ranks go on after 41 ms"
    assert story.event(EpochFormed) == EpochFormed(1, (0, 2), line)


@pytest.mark.parametrize("killed", [0, 1])
def test_worker_that_is_killed_after_its_goodbye_has_done_its_work(killed: int) -> None:
    story = formed(2)
    for worker in (0, 1):
        story.says(worker, "bye", commits={})
        story.take(story.membership.connection_lost(worker, story.now))
    for worker in (0, 1):
        story.dies(worker) if worker == killed else story.ends(worker)
    assert story.phase is Phase.DONE
    assert story.none_of(Failed)


def test_ready_that_crossed_gather_is_not_its_answer() -> None:
    story = formed(2)
    story.ready(0, "lost")  # Its link broke; the GATHER follows.
    assert story.kinds(0) == ["gather"]
    story.ready(0, "lost", heard=-1)
    story.ready(1, "lost")
    assert story.kinds(0) == []
    story.ready(0, "lost")
    assert story.kinds(0) == ["epoch"]


def test_ready_that_crossed_go_tells_of_a_former_epoch() -> None:
    story = formed(3)
    story.dies(2)
    lost(story, 0, 1, commits=7)
    story.connected(0, 1)
    story.ready(0, "lost", epoch=0, commits=7)
    assert story.kinds(0) == ["gather", "epoch", "notice", "go"]
    story.dies(1)
    story.ready(0, "lost", epoch=0, commits=7)
    lost(story, 0, commits=5)
    assert story.last(0, "epoch")["commit_point"] == {"0": 5}


def test_boundary_that_crossed_go_is_reached() -> None:
    story = formed(3)
    story.dies(2)
    lost(story, 0, 1)
    story.connected(0, 1)
    story.ready(0, "boundary", epoch=0)
    story.ready(1, "boundary")
    assert story.kinds(0)[-1] == "continue"


def test_cut_counts_what_a_worker_had_handed_out_before_it_left() -> None:
    story = formed(3)
    story.says(1, "bye", commits={"0": 9})
    story.dies(2)
    lost(story, 0, commits=8)
    assert story.last(0, "epoch")["commit_point"] == {"0": 9}


def test_death_while_forming_gathers_again_and_keeps_the_cut() -> None:
    story = formed(3)
    story.dies(2)
    lost(story, 0, commits=8)
    lost(story, 1, commits=7)
    assert story.last(1, "epoch")["commit_point"] == {"0": 8}
    story.connected(1)
    story.dies(0)
    assert story.last(1, "gather")["epoch"] == 2
    lost(story, 1, commits=7)  # A report from before the commit point.
    epoch = story.last(1, "epoch")
    assert (epoch["epoch"], epoch["commit_point"], epoch["rank"]) == (2, {"0": 8}, 0)
    story.says(1, "connected", epoch=1, clock=0)
    assert story.kinds(1) == []
    story.connected(1)
    assert story.event(EpochFormed).workers == (1,)


def test_reason_of_a_lost_connection_is_learnt_from_the_process() -> None:
    story = formed(2)
    story.take(story.membership.connection_lost(1, story.now))
    lost(story, 0)
    story.dies(1)
    assert story.kinds(0) == ["gather", "epoch"], "what is learnt later does not gather again"
    story.connected(0)
    assert "worker 1 (host a) died of SIGKILL" in story.event(EpochFormed).line


@pytest.mark.parametrize("late", [0.1, 0.4])
def test_line_of_an_epoch_waits_for_the_reason_a_moment(late: float) -> None:
    story = formed(2)
    story.take(story.membership.connection_lost(1, story.now))
    lost(story, 0)
    story.connected(0)
    assert story.kinds(0)[-1] == "go", "the worker goes on"
    assert story.none_of(EpochFormed)
    story.waits(late)
    story.dies(1)
    why = "died of SIGKILL" if late < 0.25 else "lost its connection to the launcher"
    assert f"worker 1 (host a) {why}; 1 rank" in story.event(EpochFormed).line


def test_process_that_outlives_its_connection_is_killed() -> None:
    story = formed(2)
    story.take(story.membership.connection_lost(1, story.now))
    story.waits(2.9)
    assert story.none_of(Evict)
    story.waits(0.2)
    assert story.event(Evict) == Evict(1, "lost its connection to the launcher")


def test_all_dead_fails_with_the_first_reason() -> None:
    story = formed(2)
    story.take(story.membership.connection_lost(0, story.now))
    story.dies(1)
    assert story.none_of(Failed)
    story.dies(0, "died of SIGSEGV")
    reason = "no worker is left; the first that went: worker 0 (host a) died of SIGSEGV"
    assert story.event(Failed).reason == reason


def test_silent_worker_is_evicted() -> None:
    story = formed(2)
    story.take(story.membership.evict(1, "sent nothing for 60 s", story.now))
    assert story.events[0] == Evict(1, "sent nothing for 60 s")
    lost(story, 0)
    story.connected(0)
    assert "was evicted: sent nothing" in story.event(EpochFormed).line
    story.ready(1, "boundary")  # It is not a member any more.
    assert story.kinds(1) == []


def test_living_workers_are_waited_for_with_a_warning() -> None:
    story = formed(3)
    story.dies(2)
    lost(story, 0)
    story.waits(25.0)
    text = "waits for worker 1 (host a) to leave the epoch that has ended"
    assert [one for one in story.events if isinstance(one, Warn)] == [Warn(text)] * 2
    lost(story, 1)
    assert story.kinds(1) == ["gather", "epoch"]


# Boundaries and deaths.


def test_parked_workers_hand_out_and_come_to_those_at_the_boundary() -> None:
    story = formed(3)
    at_boundary(story, 0, commits=8)
    story.dies(2)
    at_boundary(story, 0, commits=8)
    lost(story, 1, commits=7)
    assert story.last(1, "commit_point")["commit_point"] == {"0": 8}
    assert story.kinds(0) == ["gather"]
    at_boundary(story, 1, commits=8)
    assert story.last(0, "epoch")["mode"] == "boundary"
    story.connected(0, 1)
    assert story.phase is Phase.FORMED


def test_exception_is_told_however_late_the_process_ends() -> None:
    story = formed(3)
    story.says(2, "raised", what="raised ValueError: a bug")
    assert Raised(2, "raised ValueError: a bug") in story.events
    story.take(story.membership.connection_lost(2, story.now))
    story.take(story.membership.connection_lost(1, story.now))
    assert [event.worker for event in story.events if isinstance(event, Went)] == [2, 1]
    lost(story, 0)
    story.waits(4.0)
    story.connected(0)
    story.ends(2, status=1)
    story.waits(1.0)
    assert story.event(EpochFormed).line.startswith(
        "world 1: worker 2 (host a) raised ValueError: a bug; worker 1 (host a) lost its connection"
    )


def test_process_that_has_raised_takes_its_time_while_the_others_go_on() -> None:
    story = formed(2)
    story.says(1, "raised", what="raised ValueError: a bug")
    assert story.last(0, "gather")["gone"] == [[1, "raised ValueError: a bug"]]
    lost(story, 0, 1)  # The membership thread of worker 1 still answers, which does not count.
    story.connected(0)
    assert story.numbers == [0]
    story.waits(20.0)
    story.take(story.membership.connection_lost(1, story.now))
    story.waits(20.0)
    assert story.none_of(Evict)
    story.ends(0, status=1)
    story.waits(1.0)
    assert story.none_of(Failed), "the end of worker 1 is still to come"
    story.ends(1, status=1)
    assert story.event(Failed).reason.startswith("no worker is left; the first that went: ")


def test_first_of_two_failures_is_the_one_whose_goodbye_came_first() -> None:
    story = formed(2)
    story.says(1, "bye", commits={"0": 5})
    story.now += 0.1
    story.says(0, "bye", commits={"0": 5})
    story.now += 0.1
    story.ends(0, status=1)
    story.ends(1, status=1)
    went = [event for event in story.events if isinstance(event, Went)]
    assert went == [Went(0, 0.1), Went(1, 0.0)]


def test_stuck_worker_leads_all_parked_ones_to_restore() -> None:
    story = formed(4)
    story.dies(3)
    at_boundary(story, 0)
    lost(story, 1)
    lost(story, 2, stuck="alltoall 'tokens'")
    assert story.kinds(0) == ["gather"]
    assert story.last(1, "restore")["reason"] == "alltoall 'tokens'"
    assert story.last(2, "restore")
    at_boundary(story, 2, 1, restored=True)
    epoch = story.last(0, "epoch")
    assert (epoch["mode"], epoch["sync"]) == ("boundary", True)


def test_after_restore_no_epoch_resumes() -> None:
    story = formed(4)
    story.dies(3)
    lost(story, 0, 1)
    lost(story, 2, stuck="alltoall 'tokens'")
    lost(story, 0, 1, 2)  # All of them say it again, as after a crossing.
    assert story.kinds(0)[-1] == "restore"


def test_boundary_that_is_reached_while_forming_counts_after_go() -> None:
    story = formed(3)
    story.dies(2)
    lost(story, 0, 1)
    at_boundary(story, 1)
    story.connected(0, 1)
    assert story.phase is Phase.FORMED
    at_boundary(story, 0)
    assert story.kinds(0)[-1] == "continue"


def test_restored_worker_calls_the_others_at_once() -> None:
    story = formed(2)
    at_boundary(story, 0, restored=True, reason="a bad batch")
    assert (
        "worker 0 (host a) restored its last commit: a bad batch"
        in (story.last(1, "gather")["reason"])
    )
    at_boundary(story, 0, restored=True)
    lost(story, 1)
    assert story.kinds(1) == ["restore"]
    at_boundary(story, 1, restored=True)
    assert story.last(0, "epoch")["sync"]


def test_restored_worker_alone_goes_on_in_its_world() -> None:
    story = formed(1)
    at_boundary(story, 0, restored=True)
    assert story.last(0, "continue") == {"kind": "continue", "epoch": 0, "sync": True}


def test_only_joiners_without_the_state_are_left() -> None:
    story = formed(1)
    story.expect(1)
    story.ready(1, "join", epoch=-1, synced=False)
    at_boundary(story, 0)
    story.connected(0, 1)
    assert story.event(EpochFormed).workers == (0, 1)
    story.dies(0)
    lost(story, 1, synced=False)
    assert "no worker is left that has the state" in story.event(Failed).reason


@pytest.mark.parametrize(
    "seeds",
    [
        range(SCHEDULES // 10),
        pytest.param(range(SCHEDULES // 10, SCHEDULES), marks=pytest.mark.long),
    ],
    ids=["first", "others"],
)
def test_random_schedules(seeds: range) -> None:
    for seed in seeds:
        job = Job(seed)
        try:
            job.run()
        except Exception as error:
            steps = "\n".join(job.trace[-40:])
            raise AssertionError(f"schedule {seed} ({job.limits}):\n{steps}") from error
