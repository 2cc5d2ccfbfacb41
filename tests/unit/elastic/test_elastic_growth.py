"""The membership of an elastic job: who joins and leaves, limits, ends, and links."""

from __future__ import annotations

from hvdlite.launch.elastic.messages import (
    EpochFormed,
    Evict,
    Failed,
    Leaving,
    Refused,
    Warn,
)
from hvdlite.launch.elastic.state import Phase
from hvdlite.launch.elastic.verdicts import BrokenLinks
from membership_story import at_boundary, formed, lost

# Joining, leaving, limits.


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


def test_joiner_with_other_settings_is_refused() -> None:
    story = formed(1)
    story.expect(1)
    story.ready(1, "join", epoch=-1, endpoint={"agreed": {"fusion": "32", "cycle": "1"}})
    reason = story.event(Refused).reason
    assert "cycle is 1 on worker 1 (host b), and unset on worker 0 (host a)" in reason
    assert "fusion is 32 on worker 1 (host b), and 64 on worker 0 (host a)" in reason
    assert story.kinds(1) == ["refused"]
    at_boundary(story, 0)
    assert story.kinds(0)[-1] == "continue"


def test_joiners_wait_for_nobody_who_died_or_for_whom_there_is_no_room() -> None:
    story = formed(2, max_np=4)
    for worker in (2, 3, 4):
        story.expect(worker)
    story.waits(4.0)
    story.ready(3, "join", epoch=-1)
    assert not story.sent
    story.ready(4, "join", epoch=-1)
    assert story.only(0, "notice"), "there is no room for worker 2"
    story = formed(2)
    story.expect(2)
    story.expect(3)
    story.waits(4.0)
    story.ready(2, "join", epoch=-1)
    story.dies(3)
    assert story.only(0, "notice")


def test_worker_that_asks_to_leave_leaves_at_the_boundary() -> None:
    story = formed(3)
    story.says(2, "drain", why="it got SIGTERM")
    assert story.last(1, "notice")["removed"]
    at_boundary(story, 0, 1, 2)
    assert story.event(Leaving) == Leaving(2)
    story.says(2, "bye", commits={})
    story.ends(2)
    story.connected(0, 1)
    assert "worker 2 (host a) left: it got SIGTERM; 2" in story.event(EpochFormed).line


def test_worker_that_asks_to_leave_stays_if_all_are_to_stop() -> None:
    story = formed(3, min_np=3)
    story.says(2, "drain", why="it got SIGTERM")
    at_boundary(story, 0)
    story.take(story.membership.stops(story.now))
    story.says(1, "drain", why="it got SIGTERM")
    at_boundary(story, 1, 2)
    assert Leaving(1) not in story.events and Leaving(2) not in story.events
    assert [story.kinds(worker)[-1] for worker in range(3)] == ["continue"] * 3


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


def test_state_is_handed_over_to_one_joiner_when_another_one_dies_meanwhile() -> None:
    story = formed(1)
    story.take(story.membership.drain(0, "its host is not listed", story.now))
    for worker in (1, 2):
        story.expect(worker)
        story.ready(worker, "join", epoch=-1, synced=False)
    at_boundary(story, 0)
    story.dies(2)
    at_boundary(story, 0)
    at_boundary(story, 1, synced=False)
    story.connected(0, 1)
    assert story.phase is Phase.FORMED, "it waited for one more joiner"


def test_joiner_that_dies_before_go_is_waited_for_again() -> None:
    story = formed(2, min_np=2)
    story.expect(2)
    story.ready(2, "join", epoch=-1)
    story.dies(1)
    lost(story, 0)
    story.dies(2)
    story.connected(0)
    assert story.last(0, "gather")["epoch"] == 2
    lost(story, 0)
    assert story.kinds(0) == []
    story.expect(3)
    story.ready(3, "join", epoch=-1)
    assert story.last(0, "epoch")["mode"] == "resume"


def test_last_workers_go_on_below_min_np_when_one_has_finished() -> None:
    story = formed(3, min_np=3)
    story.dies(2)
    lost(story, 0, 1)
    story.ends(1)
    assert story.last(0, "gather")
    lost(story, 0)
    assert story.last(0, "epoch")["mode"] == "resume"


def test_shortage_counts_joiners_and_names_no_number_of_nobody() -> None:
    story = formed(3, min_np=3, elastic_timeout=25.0)
    story.dies(1)
    story.dies(2)
    lost(story, 0)
    story.expect(3)
    story.ready(3, "join", epoch=-1)
    story.waits(12.0)
    assert story.event(Warn).text == "2 of at least 3 workers wait for others to join"
    story.says(0, "raised", what="raised ValueError")  # Its process goes on.
    story.waits(14.0)
    assert story.event(Failed).reason.startswith("no worker is left; the first that went: worker 1")


def test_boundary_waits_for_min_np_and_then_fails() -> None:
    story = formed(2, min_np=2, elastic_timeout=25.0)
    story.dies(1)
    at_boundary(story, 0)
    story.waits(26.0)
    assert "--elastic-timeout (25 s): 1 of at least 2 (--min-np)" in story.event(Failed).reason


def test_reset_limit_fails_with_the_last_reasons() -> None:
    story = formed(4, reset_limit=2)
    for worker in (3, 2):
        story.dies(worker)
        lost(story, *range(worker), commits=10 - worker)
        story.connected(*range(worker))
    story.dies(1)
    lost(story, 0, commits=20)
    reason = story.event(Failed).reason
    assert "--reset-limit 2: the ranks may not be formed anew once more" in reason
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
    assert "3 worlds in a row ended before a step was committed" in reason
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
    assert line.startswith("world 1: worker 1 (host a) finished; 1 rank goes on")


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


# Suspicions.


def test_broken_link_without_a_death_evicts_who_is_suspected_most() -> None:
    story = formed(3)
    story.ready(0, "lost", suspect=1, reason="timed out")
    story.ready(0, "lost", suspect=1, reason="timed out")
    story.ready(1, "lost", suspect=0)
    story.ready(2, "lost", suspect=1)
    assert story.none_of(Evict)
    story.waits(0.4)
    assert story.event(Evict) == Evict(1, "worker 0 and 1 more reported: timed out")
    assert story.last(0, "epoch")["mode"] == "resume"


def test_death_makes_suspicions_moot() -> None:
    story = formed(3)
    story.ready(0, "lost", suspect=1)
    story.dies(2)
    lost(story, 1, suspect=0)
    lost(story, 0, suspect=1)
    story.waits(1.0)
    assert story.none_of(Evict)
    story.dies(1)  # While forming: what the last engines saw is repeated, and counts no more.
    assert story.last(0, "gather")


def test_repeated_suspicion_that_was_moot_stays_moot() -> None:
    story = formed(4)
    story.dies(3)
    lost(story, 0, 1, suspect=2)
    lost(story, 2)
    story.says(0, "unreachable", epoch=1, worker=1, reason="refused")
    story.waits(0.4)
    lost(story, 0, 1, suspect=2)
    lost(story, 2)
    assert story.event(Evict).worker == 1


def test_unreachable_member_is_evicted_unless_somebody_died() -> None:
    story = formed(3)
    story.dies(2)
    lost(story, 0, 1)
    story.says(0, "unreachable", epoch=1, worker=1, reason="refused")
    story.waits(0.2)
    assert story.last(1, "epoch")["epoch"] == 1
    story.waits(0.2)
    assert story.last(1, "gather")["epoch"] == 2
    assert story.none_of(Evict)
    lost(story, 0, 1)
    assert "cannot reach worker 1 (host a): refused" in story.event(Evict).why
    story.connected(0)
    assert story.phase is Phase.FORMED


def test_silent_way_is_held_against_both_of_its_ends() -> None:
    story = formed(3)
    lost(story, 0, 0, 1, 2)
    story.says(2, "unreachable", epoch=1, worker=1, reason="timed out", silent=True)
    story.waits(0.4)
    # What the former engine reported does not change who is at the ends of the way.
    story.ready(1, "lost", suspect=7)
    lost(story, 0, 2)
    evicted = story.event(Evict)
    assert evicted == Evict(2, "worker 2 reported: cannot reach worker 1 (host a): timed out")
    story.connected(0, 1)
    assert story.numbers == [0, 1]


def test_silent_way_explains_what_others_report() -> None:
    story = formed(4)
    lost(story, 0, 0, 1, 2, 3)
    story.says(0, "unreachable", epoch=1, worker=1, reason="left")
    story.says(3, "unreachable", epoch=1, worker=1, reason="left")
    story.says(2, "unreachable", epoch=1, worker=1, reason="timed out", silent=True)
    story.waits(0.4)
    story.says(0, "unreachable", epoch=1, worker=3, reason="left")
    lost(story, 0, 1, 2, 3)
    assert story.event(Evict).worker == 2


def test_lost_world_without_a_death_or_a_suspect_is_formed_again() -> None:
    story = formed(2)
    story.ready(0, "lost", reason="ENOMEM")
    lost(story, 0, 1)
    story.connected(0, 1)
    formed_again = story.event(EpochFormed)
    assert formed_again.workers == (0, 1)
    assert "worker 0 (host a) lost its world: ENOMEM; 2 ranks go on" in formed_again.line


def test_later_suspicion_leaves_a_silent_way_with_both_of_its_ends() -> None:
    links = BrokenLinks()
    links.add(1, 2, "timed out", 0.0, mutual=True)
    links.add(1, 0, "hung up", 0.1)
    assert links.worst({0, 1, 2}) == (2, "worker 1 reported: timed out")
