"""The membership of an elastic job, event by event, and by random schedules."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from hvdlite.launch.elastic.actions import (
    Action,
    Close,
    Entered,
    EpochFormed,
    Evict,
    Failed,
    Leaving,
    Limits,
    Refused,
    Send,
    Warn,
)
from hvdlite.launch.elastic.membership import Membership
from hvdlite.launch.elastic.roster import Phase
from membership_model import Job

T = TypeVar("T")
SCHEDULES = 10_000


class Story:
    """Drives a Membership by hand; `sent` and `events` have what it answered."""

    def __init__(self, np: int, **limits: Any) -> None:
        self.membership = Membership(Limits(np, **{"min_np": 1, **limits}))
        self.now = 0.0
        self.sent: dict[int, list[dict[str, Any]]] = {}
        self.events: list[Action] = []
        self.heard: dict[int, int] = {}
        for worker in range(np):
            self.expect(worker, joiner=False)

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.sent.setdefault(action.worker, []).append(action.message)
                if action.message["kind"] == "gather":
                    self.heard[action.worker] = action.message["epoch"]
            else:
                self.events.append(action)

    def expect(self, worker: int, joiner: bool = True) -> None:
        self.take(self.membership.expect(worker, "ab"[joiner], joiner, self.now))

    def dies(self, worker: int, why: str = "died of SIGKILL") -> None:
        self.take(self.membership.ended(worker, why, False, self.now))

    def ends(self, worker: int, status: int = 0) -> None:
        self.take(self.membership.ended(worker, f"exit status {status}", not status, self.now))

    def says(self, number: int, kind: str, **fields: Any) -> None:
        self.take(self.membership.received(number, {"kind": kind, **fields}, self.now))

    def ready(
        self, worker: int, why: str, commits: int | dict[str, int] = 0, **fields: Any
    ) -> None:
        message: dict[str, Any] = {
            "epoch": self.membership._formed,
            "why": why,
            "offer": {"port": worker, "agreed": {"fusion": "64"}},
            "commits": commits if isinstance(commits, dict) else {"0": commits},
            "stuck": None,
            "accused": None,
            "reason": "",
            "restored": False,
            "heard": self.heard.get(worker, -1),
            "synced": True,
        }
        self.says(worker, "ready", **{**message, **fields})

    def connected(self, *workers: int) -> None:
        for worker in workers:
            self.says(worker, "connected", epoch=self.membership.epoch, clock=worker)

    def waits(self, seconds: float) -> None:
        """Let time pass, with every tick that is asked for."""
        end = self.now + seconds
        while (at := self.membership.wake_at()) is not None and at <= end:
            assert at > self.now
            self.now = at
            self.take(self.membership.tick(at))
        self.now = end
        self.take(self.membership.tick(end))

    def kinds(self, worker: int) -> list[str]:
        """Take what was sent to a worker, by kind."""
        return [message["kind"] for message in self.sent.pop(worker, [])]

    def last(self, worker: int, kind: str) -> dict[str, Any]:
        """Take what was sent to a worker, and return the last message, which is of this kind."""
        message = self.sent.pop(worker)[-1]
        assert message["kind"] == kind, message
        return message

    def event(self, kind: type[T]) -> T:
        """Take all events, and return the only one of this kind."""
        events, self.events = self.events, []
        (found,) = [event for event in events if isinstance(event, kind)]
        return found

    def none_of(self, kind: type) -> bool:
        return not any(isinstance(event, kind) for event in self.events)

    @property
    def phase(self) -> Phase:
        return self.membership.phase

    @property
    def numbers(self) -> list[int]:
        return [worker.number for worker in self.membership.members]


def formed(np: int, in_run: bool = True, **limits: Any) -> Story:
    """Bring a job to its first epoch, and into `run`."""
    story = Story(np, **limits)
    for worker in range(np):
        story.ready(worker, "start")
    story.connected(*range(np))
    if in_run:
        at_boundary(story, *range(np))
        assert all(story.kinds(worker)[-1] == "continue" for worker in range(np))
        story.events.clear()
    return story


def at_boundary(story: Story, *workers: int, **fields: Any) -> None:
    for worker in workers:
        story.ready(worker, "boundary", **fields)


def lost(story: Story, *workers: int, **fields: Any) -> None:
    for worker in workers:
        story.ready(worker, "lost", **fields)


# The start.


def test_first_epoch_has_the_first_workers_in_their_order() -> None:
    story = Story(3)
    for worker in (2, 0, 1):
        assert story.phase is Phase.STARTING
        story.ready(worker, "start")
    epochs = [story.last(worker, "epoch") for worker in range(3)]
    assert [epoch["rank"] for epoch in epochs] == [0, 1, 2]
    assert {epoch["mode"] for epoch in epochs} == {"start"}
    story.connected(2, 0)
    assert not story.sent
    story.connected(1)
    assert story.last(1, "go")["clocks"] == [0, 1, 2]
    assert story.event(EpochFormed) == EpochFormed(0, (0, 1, 2), "epoch 0: 3 ranks start")


@pytest.mark.parametrize("ready", [0, 1, 2])
def test_death_before_the_first_epoch_fails_the_job(ready: int) -> None:
    story = Story(2)
    for worker in range(ready):
        story.ready(worker, "start")
    story.dies(1)
    reason = "worker 1 (host a) died of SIGKILL before all workers were connected"
    assert story.event(Failed).reason == reason
    story.ready(0, "start")
    assert story.phase is Phase.OVER


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
    story = Story(3, start_timeout=30.0)
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
    assert (epoch["mode"], epoch["rank"], epoch["cut"]) == ("resume", 1, {"0": 8})
    assert [member for member, _ in epoch["members"]] == [0, 2]
    story.now += 0.041
    story.connected(0, 2)
    line = "epoch 1: worker 1 (host a) died of SIGKILL; 2 ranks go on after 41 ms"
    assert story.event(EpochFormed) == EpochFormed(1, (0, 2), line)


def test_ready_that_crossed_gather_is_not_its_answer() -> None:
    story = formed(2)
    story.ready(0, "lost")  # Its link broke; the GATHER follows.
    assert story.kinds(0) == ["gather"]
    story.ready(0, "lost", heard=-1)
    story.ready(1, "lost")
    assert story.kinds(0) == []
    story.ready(0, "lost")
    assert story.kinds(0) == ["epoch"]


def test_cut_counts_what_a_worker_had_handed_out_before_it_left() -> None:
    story = formed(3)
    story.says(1, "bye", commits={"0": 9})
    story.dies(2)
    lost(story, 0, commits=8)
    assert story.last(0, "epoch")["cut"] == {"0": 9}


def test_cut_is_per_process_set_over_those_who_report_it() -> None:
    story = formed(3)
    story.dies(2)
    story.ready(0, "lost", commits={"0": 3, "1": 5})
    story.ready(1, "lost", commits={"0": 4})
    assert story.last(0, "epoch")["cut"] == {"0": 4, "1": 5}


def test_second_death_while_gathering_needs_no_second_gather() -> None:
    story = formed(4)
    story.dies(3)
    lost(story, 0, 1)
    story.dies(2)
    assert story.kinds(0) == ["gather", "epoch"]
    story.connected(0, 1)
    line = story.event(EpochFormed).line
    assert "worker 3 (host a) died of SIGKILL; worker 2 (host a) died of SIGKILL; 2 ranks" in line


def test_death_while_forming_gathers_again_and_keeps_the_cut() -> None:
    story = formed(3)
    story.dies(2)
    lost(story, 0, commits=8)
    lost(story, 1, commits=7)
    assert story.last(1, "epoch")["cut"] == {"0": 8}
    story.connected(1)
    story.dies(0)
    assert story.last(1, "gather")["epoch"] == 2
    lost(story, 1, commits=7)  # A report from before the cut.
    epoch = story.last(1, "epoch")
    assert (epoch["epoch"], epoch["cut"], epoch["rank"]) == (2, {"0": 8}, 0)
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
    assert story.kinds(0)[-1] == "notice", "the worker goes on"
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
    story.take(story.membership.heartbeat_lost(1, story.now))
    assert story.events == [Evict(1, "sent nothing for 3.5 s"), Close(1)]
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
    assert story.events == [Warn(text)] * 2
    lost(story, 1)
    assert story.kinds(1) == ["gather", "epoch"]


# Boundaries and deaths.


def test_death_while_all_others_are_at_a_boundary_needs_no_gather() -> None:
    story = formed(3)
    at_boundary(story, 0, 1)
    story.dies(2)
    epoch = story.last(0, "epoch")
    assert (epoch["epoch"], epoch["mode"], epoch["sync"]) == (1, "boundary", False)


def test_parked_workers_hand_out_and_come_to_those_at_the_boundary() -> None:
    story = formed(3)
    at_boundary(story, 0, commits=8)
    story.dies(2)
    at_boundary(story, 0, commits=8)
    lost(story, 1, commits=7)
    assert story.last(1, "cut")["cut"] == {"0": 8}
    assert story.kinds(0) == ["gather"]
    at_boundary(story, 1, commits=8)
    assert story.last(0, "epoch")["mode"] == "boundary"
    story.connected(0, 1)
    assert story.phase is Phase.FORMED


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


def test_restored_worker_waits_for_those_with_the_same_error() -> None:
    story = formed(2)
    at_boundary(story, 0, restored=True)
    story.waits(0.9)
    at_boundary(story, 1, restored=True)
    assert story.last(0, "continue") == {"kind": "continue", "epoch": 0, "sync": True}


def test_restored_worker_calls_those_without_an_error() -> None:
    story = formed(2)
    at_boundary(story, 0, restored=True, reason="a bad batch")
    story.waits(1.1)
    assert (
        "worker 0 (host a) restored its last commit: a bad batch"
        in (story.last(1, "gather")["reason"])
    )
    at_boundary(story, 0, restored=True)
    lost(story, 1)
    assert story.kinds(1) == ["restore"]
    at_boundary(story, 1, restored=True)
    assert story.last(0, "epoch")["sync"]


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


# Joining, leaving, limits.


def test_first_boundary_synchronizes_and_announces_run() -> None:
    story = formed(2, in_run=False)
    at_boundary(story, 0)
    assert story.event(Entered)
    at_boundary(story, 1)
    assert story.last(0, "continue") == {"kind": "continue", "epoch": 0, "sync": True}
    at_boundary(story, 0, 1)
    assert story.last(0, "continue")["sync"] is False


def test_joiner_is_announced_and_joins_last() -> None:
    story = formed(2)
    story.expect(5)
    assert not story.sent
    story.ready(5, "join", epoch=-1, synced=False)
    assert story.last(0, "notice") == {"kind": "notice", "version": 1, "removed": False}
    at_boundary(story, 1, 0)
    epoch = story.last(5, "epoch")
    assert (epoch["rank"], epoch["mode"], epoch["sync"]) == (2, "boundary", True)
    story.connected(0, 1, 5)
    assert "worker 5 (host b) joined; 3 ranks go on" in story.event(EpochFormed).line
    at_boundary(story, 0, 1, 5)
    assert story.last(5, "continue")["sync"] is False


def test_notice_comes_again_after_a_death() -> None:
    story = formed(3)
    story.expect(5)
    story.ready(5, "join", epoch=-1)
    story.dies(2)
    lost(story, 0, 1)
    story.connected(0, 1)
    assert story.kinds(0) == ["notice", "gather", "epoch", "go", "notice"]
    at_boundary(story, 0, 1)
    story.connected(0, 1, 5)
    assert story.numbers == [0, 1, 5]
    assert story.last(0, "go")


def test_data_is_dealt_anew_after_a_shrink_only_in_run() -> None:
    story = formed(3, in_run=False)
    story.dies(2)
    lost(story, 0, 1)
    story.connected(0, 1)
    assert story.last(0, "go")
    story.kinds(1)
    at_boundary(story, 0, 1)
    story.kinds(0)
    story.dies(1)
    lost(story, 0)
    story.connected(0)
    assert story.last(0, "notice") == {"kind": "notice", "version": 1, "removed": True}
    at_boundary(story, 0)
    assert story.kinds(0) == ["continue"]


@pytest.mark.parametrize("ready", [False, True])
def test_joiner_that_dies_while_waiting_is_not_missed(ready: bool) -> None:
    story = formed(1)
    story.expect(1)
    if ready:
        story.ready(1, "join", epoch=-1)
    story.dies(1)
    at_boundary(story, 0)
    assert story.kinds(0)[-1] == "continue"


def test_joiner_that_dies_while_its_epoch_forms() -> None:
    story = formed(2)
    story.expect(2)
    story.ready(2, "join", epoch=-1)
    at_boundary(story, 0, 1)
    story.dies(2)
    assert story.last(0, "gather")["epoch"] == 2
    at_boundary(story, 0, 1)
    story.connected(0, 1)
    assert story.event(EpochFormed).workers == (0, 1)


def test_joiner_is_a_member_in_the_next_attempt() -> None:
    story = formed(2)
    story.expect(2)
    story.ready(2, "join", epoch=-1)
    at_boundary(story, 0, 1)
    story.dies(0)
    story.ready(2, "join", epoch=-1)
    at_boundary(story, 1)
    epoch = story.last(2, "epoch")
    assert (epoch["rank"], epoch["sync"], epoch["epoch"]) == (1, True, 2)


def test_joiner_with_other_settings_is_refused() -> None:
    story = formed(1)
    story.expect(1)
    story.ready(1, "join", epoch=-1, offer={"agreed": {"fusion": "32", "cycle": "1"}})
    reason = story.event(Refused).reason
    assert "cycle is 1 on worker 1 (host b), and unset on worker 0 (host a)" in reason
    assert "fusion is 32 on worker 1 (host b), and 64 on worker 0 (host a)" in reason
    assert story.kinds(1) == ["refused"]
    at_boundary(story, 0)
    assert story.kinds(0)[-1] == "continue"


def test_no_more_than_max_np_join() -> None:
    story = formed(1, max_np=2)
    for worker in (1, 2):
        story.expect(worker)
        story.ready(worker, "join", epoch=-1)
    at_boundary(story, 0)
    story.connected(0, 1)
    assert story.numbers == [0, 1]
    assert story.kinds(0) == ["notice", "epoch", "go"], "no notice for whom there is no room"


def test_drained_worker_leaves_at_the_boundary() -> None:
    story = formed(3)
    story.take(story.membership.drain(0, "its host is not listed", story.now))
    assert story.last(1, "notice")["removed"]
    at_boundary(story, 0, 1, 2)
    assert story.kinds(0) == ["notice", "leave"]
    assert story.event(Leaving) == Leaving(0)
    epoch = story.last(1, "epoch")
    assert (epoch["rank"], epoch["sync"]) == (0, False)
    story.says(0, "bye", commits={})
    story.ends(0)
    story.connected(1, 2)
    assert "worker 0 (host a) left: its host is not listed; 2" in story.event(EpochFormed).line
    story.expect(3)
    story.ready(3, "join", epoch=-1)
    assert story.last(1, "notice"), "a drain does not end growth"


def test_workers_that_all_have_to_leave_hand_over_first() -> None:
    story = formed(1)
    story.take(story.membership.drain(0, "its host is not listed", story.now))
    at_boundary(story, 0)
    assert story.kinds(0) == ["notice"], "it waits for somebody to take the state"
    story.expect(1)
    story.ready(1, "join", epoch=-1, synced=False)
    story.connected(0, 1)
    assert story.numbers == [0, 1]
    at_boundary(story, 0, 1)
    assert story.event(Leaving) == Leaving(0)
    assert story.numbers == [1]


def test_boundary_waits_for_min_np_and_then_fails() -> None:
    story = formed(2, min_np=2, elastic_timeout=25.0)
    story.dies(1)
    lost(story, 0)
    story.connected(0)
    assert story.last(0, "notice")["removed"], "in place it may go on below min-np"
    story.events.clear()
    at_boundary(story, 0)
    assert story.kinds(0) == []
    story.waits(24.0)
    text = "1 of at least 2 workers wait at a boundary for others to join"
    assert story.events == [Warn(text)] * 2
    story.waits(2.0)
    assert "--elastic-timeout (25 s), and --min-np is 2" in story.event(Failed).reason


def test_boundary_goes_on_once_min_np_are_there() -> None:
    story = formed(2, min_np=2, elastic_timeout=25.0)
    story.dies(1)
    at_boundary(story, 0)
    story.waits(20.0)
    story.expect(2)
    story.ready(2, "join", epoch=-1)
    story.connected(0, 2)
    story.waits(60.0)
    assert story.phase is Phase.FORMED


def test_reset_limit_fails_with_the_last_reasons() -> None:
    story = formed(4, reset_limit=2)
    for worker in (3, 2):
        story.dies(worker)
        lost(story, *range(worker), commits=10 - worker)
        story.connected(*range(worker))
    story.dies(1)
    lost(story, 0, commits=20)
    reason = story.event(Failed).reason
    assert "formed anew 2 times, which is the --reset-limit" in reason
    assert "worker 3 (host a) died of SIGKILL; worker 2 (host a) died of SIGKILL" in reason


def test_three_epochs_without_a_step_fail_with_the_first_reason() -> None:
    story = formed(4)
    for worker in (3, 2):
        story.dies(worker)
        lost(story, *range(worker), steps=0)
        story.connected(*range(worker))
    story.dies(1, "died of SIGBUS")
    lost(story, 0, steps=0)
    reason = story.event(Failed).reason
    assert "3 epochs in a row ended before a step was committed" in reason
    assert "ended because worker 3 (host a) died of SIGKILL" in reason


def test_a_step_between_epochs_forgives_those_before() -> None:
    story = formed(5)
    for worker, steps in ((4, 0), (3, 0), (2, 1), (1, 1)):
        story.dies(worker)
        lost(story, *range(worker), steps=steps)
        story.connected(*range(worker))
    assert story.phase is Phase.FORMED


# Ends.


def test_clean_end_of_one_worker_blames_nobody_and_ends_growth() -> None:
    story = formed(2, reset_limit=0)
    story.expect(2)
    story.ready(2, "join", epoch=-1)
    story.kinds(0)
    story.says(1, "bye", commits={"0": 5})
    story.ends(1)
    assert story.kinds(2) == ["leave"]
    assert story.kinds(0) == [], "the others may be ending, too"
    story.waits(0.4)
    assert story.kinds(0) == ["gather"]
    lost(story, 0)
    story.connected(0)
    line = story.event(EpochFormed).line
    assert line.startswith("epoch 1: worker 1 (host a) finished; 1 rank goes on")


def test_all_end_well() -> None:
    story = formed(2)
    for worker in (0, 1):
        story.says(worker, "bye", commits={})
        story.take(story.membership.connection_lost(worker, story.now))
    for worker in (1, 0):
        story.ends(worker)
    assert story.phase is Phase.DONE
    assert not story.events
    story.expect(2)
    story.ready(2, "join", epoch=-1)
    assert story.kinds(2) == ["leave"], "a joiner that comes late ends, too"


def test_goodbye_of_a_script_that_raised_is_a_death() -> None:
    story = formed(2)
    story.says(1, "bye", commits={"0": 5})
    story.ends(1, status=1)
    lost(story, 0)
    story.connected(0)
    assert "worker 1 (host a) ended with exit status 1; 1" in story.event(EpochFormed).line
    story.expect(2)
    story.ready(2, "join", epoch=-1)
    assert story.last(0, "notice"), "another one takes its place"


def test_clean_end_without_goodbye() -> None:
    story = formed(1)
    story.take(story.membership.connection_lost(0, story.now))
    story.ends(0)
    assert story.phase is Phase.DONE
    assert not story.events


# Accusations.


def test_broken_link_without_a_death_evicts_who_has_most_accusers() -> None:
    story = formed(3)
    story.ready(0, "lost", accused=1, reason="timed out")
    story.ready(0, "lost", accused=1, reason="timed out")
    story.ready(1, "lost", accused=0)
    story.ready(2, "lost", accused=1)
    assert story.none_of(Evict)
    story.waits(0.4)
    assert story.event(Evict) == Evict(1, "worker 0 and 1 more reported: timed out")
    assert story.last(0, "epoch")["mode"] == "resume"


def test_two_that_accuse_each_other_lose_the_higher_one() -> None:
    story = formed(2)
    story.ready(1, "lost", accused=0)
    lost(story, 1, accused=0)
    lost(story, 0, accused=1)
    story.waits(0.4)
    assert story.event(Evict).worker == 1


def test_death_makes_accusations_moot() -> None:
    story = formed(3)
    story.ready(0, "lost", accused=1)
    story.dies(2)
    lost(story, 1, accused=0)
    lost(story, 0, accused=1)
    story.waits(1.0)
    assert story.none_of(Evict)
    story.dies(1)  # While forming: what the last engines saw is repeated, and counts no more.
    assert story.last(0, "gather")


def test_repeated_accusation_that_was_moot_stays_moot() -> None:
    story = formed(4)
    story.dies(3)
    lost(story, 0, 1, accused=2)
    lost(story, 2)
    story.says(0, "unreachable", epoch=1, worker=1, reason="refused")
    lost(story, 0, 1, accused=2)
    lost(story, 2)
    story.waits(1.0)
    assert story.event(Evict).worker == 1


def test_unreachable_member_is_evicted_unless_somebody_died() -> None:
    story = formed(3)
    story.dies(2)
    lost(story, 0, 1)
    story.says(0, "unreachable", epoch=1, worker=1, reason="refused")
    assert story.last(1, "gather")["epoch"] == 2
    lost(story, 0, 1)
    story.waits(0.2)
    assert story.none_of(Evict)
    story.waits(0.2)
    assert "cannot reach worker 1 (host a): refused" in story.event(Evict).why
    story.connected(0)
    assert story.phase is Phase.FORMED


def test_lost_world_without_a_death_or_an_accused_is_formed_again() -> None:
    story = formed(2)
    story.ready(0, "lost", reason="ENOMEM")
    lost(story, 0, 1)
    story.connected(0, 1)
    formed_again = story.event(EpochFormed)
    assert formed_again.workers == (0, 1)
    assert "worker 0 (host a) lost its world: ENOMEM; 2 ranks go on" in formed_again.line


def test_random_schedules() -> None:
    for seed in range(SCHEDULES):
        job = Job(seed)
        try:
            job.run()
        except Exception as error:
            steps = "\n".join(job.trace[-40:])
            raise AssertionError(f"schedule {seed} ({job.limits}):\n{steps}") from error
