"""Joiners that one change of hosts starts come in one epoch, and nobody else waits for them."""

from __future__ import annotations

from hvdlite.launch.elastic.actions import EpochFormed, Failed
from membership_story import at_boundary, formed, lost


def test_workers_of_one_change_of_hosts_join_in_one_reset() -> None:
    story = formed(2, reset_limit=2)
    for worker in (2, 3, 4):
        story.expect(worker)
    story.waits(4.0)
    story.ready(2, "join", epoch=-1)
    story.waits(3.0)
    story.ready(4, "join", epoch=-1)
    assert not story.sent, "worker 3 still starts"
    story.ready(3, "join", epoch=-1)
    assert story.only(0, "notice")["removed"] is False
    at_boundary(story, 0, 1)
    story.connected(0, 1, 2, 3, 4)
    assert story.event(EpochFormed).workers == (0, 1, 2, 3, 4)
    story.dies(4)
    lost(story, 0, 1, 2, 3)
    assert story.none_of(Failed), "the change of hosts was one reset, and the death is the second"


def test_joiners_wait_for_others_no_longer_than_their_own_start_took() -> None:
    story = formed(2)
    story.expect(2)
    story.expect(3)
    story.waits(4.0)
    story.ready(2, "join", epoch=-1)
    story.waits(3.9)
    assert not story.sent
    story.waits(0.2)
    assert story.only(0, "notice")["removed"] is False


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


def test_nobody_waits_for_joiners_in_order_to_leave_or_after_a_death() -> None:
    story = formed(3)
    story.expect(3)
    story.expect(4)
    story.waits(4.0)
    story.ready(3, "join", epoch=-1)
    story.take(story.membership.drain(2, "its host is drained", story.now))
    assert story.only(0, "notice")["removed"] is False, "worker 3 joins there, too"
    story.dies(1)
    assert story.kinds(0) == ["gather"]
