"""Which worker starts when and where: slots, waits after deaths, hosts that are away or drained."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.launch.hosts import Start
from hvdlite.launch.slots import Slots


def slots_of(
    hosts: Mapping[str, int],
    ranks: int,
    min_np: int = 1,
    max_np: int | None = None,
    timeout: float = 600.0,
    cooldown: tuple[float, float] = (10.0, 600.0),
    jitter: float = 0.0,
) -> Slots:
    """Make a slots that has begun, whose workers can take joiners."""
    slots = Slots(ranks, min_np, max_np, timeout, cooldown, lambda: jitter)
    slots.offer(hosts, 0.0)
    assert len(slots.due(0.0)) == ranks
    slots.entered()
    return slots


def where(starts: list[Start]) -> list[tuple[int, str, int]]:
    return [(start.worker, start.host, start.slot) for start in starts]


def die(slots: Slots, worker: int, now: float) -> None:
    slots.ended(worker, now, died=True, blames=True)


def test_joiner_gets_the_next_rank_and_its_slot_as_local_rank() -> None:
    slots = slots_of({"a": 2, "b": 2}, ranks=3)
    die(slots, 0, 5.0)
    (start,) = slots.due(5.0)
    assert (start.worker, start.host, start.slot, start.joiner) == (3, "b", 1, True)
    (start,) = slots.due(6.0)
    assert (start.worker, start.host, start.slot) == (4, "a", 0)
    placement = start.placement
    assert (placement.rank, placement.size, placement.local_rank) == (3, 4, 0)


def test_slot_waits_longer_after_each_death_up_to_a_minute() -> None:
    slots = slots_of({"a": 1}, ranks=1)
    now, worker, waits = 0.0, 0, []
    for _ in range(9):
        die(slots, worker, now)
        assert slots.due(now) == []
        due = slots.wake_at(now)
        assert due is not None
        assert slots.due(due - 0.001) == []
        waits.append(due - now)
        (start,) = slots.due(due)
        now, worker = due, start.worker
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_good_life_makes_the_slot_forget_its_deaths() -> None:
    slots = slots_of({"a": 1}, ranks=1)
    die(slots, 0, 0.0)
    (start,) = slots.due(1.0)
    die(slots, start.worker, 61.0)
    assert slots.wake_at(61.0) == 62.0


def test_host_of_three_deaths_in_a_minute_is_away_and_longer_each_time() -> None:
    slots = slots_of({"a": 3, "b": 1}, ranks=4, max_np=4, jitter=0.5)
    for worker in (0, 1, 2):
        die(slots, worker, 10.0)
    assert slots.due(24.9) == []
    starts = slots.due(25.0)  # 10 s, and half of 10 s at random.
    assert [start.host for start in starts] == ["a"] * 3
    for start in starts:
        die(slots, start.worker, 30.0)
    assert slots.due(54.9) == []
    assert len(slots.due(55.0)) == 3


def test_loss_of_a_host_that_is_away_does_not_count_twice() -> None:
    slots = slots_of({"a": 3, "b": 1}, ranks=4, max_np=4)
    slots.lost("a", 10.0)
    for worker in (0, 1, 2):
        die(slots, worker, 10.0)
    assert len(slots.due(20.0)) == 3


def test_host_that_cannot_be_reached_gets_nothing() -> None:
    slots = slots_of({"a": 1, "b": 2}, ranks=2)
    slots.reach("b", False)
    assert slots.due(1.0) == [] and slots.wanted == {"a": 0.0, "b": 0.0}
    slots.reach("b", True)
    assert where(slots.due(1.0)) == [(2, "b", 1)]


def test_last_host_that_is_left_is_never_away() -> None:
    slots = slots_of({"a": 1, "b": 1}, ranks=2)
    slots.lost("a", 1.0)
    die(slots, 0, 1.0)
    slots.lost("b", 2.0)
    die(slots, 1, 2.0)
    assert where(slots.due(3.0)) == [(2, "b", 0)]
    assert where(slots.due(11.0)) == [(3, "a", 0)]


def test_end_by_sigterm_makes_only_the_slot_wait() -> None:
    slots = slots_of({"a": 3, "b": 1}, ranks=4)
    for worker in (0, 1, 2):
        slots.ended(worker, 10.0, died=True, blames=False)
    assert [start.host for start in slots.due(11.0)] == ["a"] * 3


def test_host_that_is_not_listed_any_more_has_to_be_left() -> None:
    slots = slots_of({"a": 2, "b": 1}, ranks=3)
    assert slots.offer({"a": 1}, 1.0) == [1, 2]
    assert slots.offer({"a": 1}, 2.0) == []
    assert slots.due(2.0) == []
    for worker in (1, 2):
        slots.ended(worker, 3.0, died=False, blames=False)
    assert slots.offer({"b": 1, "a": 1}, 4.0) == []
    assert where(slots.due(4.0)) == [(3, "b", 0)]


def test_drained_host_gets_nothing_until_it_is_listed_anew() -> None:
    slots = slots_of({"a": 1, "b": 1}, ranks=2)
    assert slots.drain("b") == [1]
    slots.ended(1, 1.0, died=False, blames=False)
    slots.offer({"a": 1, "b": 1}, 2.0)
    assert slots.due(2.0) == []
    slots.offer({"a": 1}, 3.0)
    slots.offer({"a": 1, "b": 1}, 4.0)
    assert where(slots.due(4.0)) == [(2, "b", 0)]


def test_leaver_makes_room_below_max_np() -> None:
    slots = slots_of({"a": 1, "b": 2}, ranks=2, max_np=2)
    assert slots.due(1.0) == []
    assert slots.offer({"b": 2}, 1.0) == [0]
    assert where(slots.due(1.0)) == [(2, "b", 1)]
    assert slots.due(1.0) == []


def test_nothing_starts_before_joiners_make_sense_or_after_a_worker_has_finished() -> None:
    slots = Slots(1, 1, None, 600.0, (10.0, 600.0))
    slots.offer({"a": 2}, 0.0)
    slots.due(0.0)
    assert slots.due(1.0) == [] and slots.wake_at(1.0) is None
    slots.entered()
    slots.grows = False
    assert slots.due(2.0) == []


def test_job_starts_with_fewer_workers_than_asked_for_if_they_are_enough() -> None:
    slots = Slots(4, 2, None, 600.0, (10.0, 600.0))
    slots.offer({"a": 1}, 0.0)
    assert slots.due(0.0) == []
    slots.offer({"a": 3}, 1.0)
    assert [start.placement.size for start in slots.due(1.0)] == [3, 3, 3]


def test_too_few_slots_for_too_long() -> None:
    slots = slots_of({"a": 2, "b": 2}, ranks=4, min_np=3, timeout=50.0)
    slots.offer({"a": 2}, 10.0)
    assert slots.shortage(59.9) is None
    assert slots.wake_at(59.9) == 60.0
    reason = slots.shortage(60.0)
    assert reason is not None
    assert "for 50 s there have been fewer than 3 slots: 2 now (a:2)" in reason
    slots.offer({"a": 3}, 60.0)
    assert slots.shortage(200.0) is None


def test_hosts_that_come_and_go_are_forgotten() -> None:
    slots = slots_of({"a": 1}, ranks=1, max_np=1)
    for number in range(100):
        slots.offer({"a": 1, f"spot{number}": 1}, float(number))
    slots.offer({"a": 1}, 101.0)
    assert list(slots._hosts) == ["a"]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["die", "finish", "leave", "offer", "drain", "lose", "wait"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


@given(EVENTS, st.integers(1, 4), st.one_of(st.none(), st.integers(4, 8)))
@settings(max_examples=150)
def test_slots_are_used_once_and_numbers_are_never_used_again(
    events: list[tuple[str, int]], ranks: int, max_np: int | None
) -> None:
    hosts = {"a": 2, "b": 2, "c": 1}
    slots = Slots(ranks, 1, max_np, 600.0, (10.0, 600.0))
    slots.offer(hosts, 0.0)
    now, seen = 0.0, -1
    running: dict[int, Start] = {}
    leaving: set[int] = set()
    for event, number in [("wait", 0), ("wait", 1), *events]:
        now += 0.7
        worker = list(running)[number % len(running)] if running else None
        if event == "offer":
            hosts = {"a": 1 + number % 2, **({"b": 2} if number & 2 else {}), "c": 1}
            leaving |= set(slots.offer(hosts, now))
        elif event == "drain":
            leaving |= set(slots.drain("abc"[number % 3]))
        elif event == "lose":
            slots.lost("abc"[number % 3], now)
        elif event == "wait":
            now += 2.0**number
        elif worker is not None and event == "leave":
            slots.leaving(worker)
            leaving.add(worker)
        elif worker is not None:
            del running[worker]
            leaving.discard(worker)
            slots.ended(worker, now, died=event == "die", blames=event == "die")
        for start in slots.due(now):
            assert start.worker == seen + 1
            seen = start.worker
            assert start.slot < hosts[start.host]
            assert (start.host, start.slot) not in {
                (one.host, one.slot) for one in running.values()
            }
            assert start.placement.local_rank == start.slot < start.placement.local_size
            assert 0 <= start.placement.rank < start.placement.size
            running[start.worker] = start
        if seen >= 0:
            slots.entered()
        assert slots.size == len(running)
        if max_np is not None:
            assert len(running.keys() - leaving) <= max_np
