"""hvd.elastic.run: what happens in which order, with a fake in place of the membership thread."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from hvdlite import basics, objects, ops
from hvdlite.elastic import State, run
from hvdlite.errors import (
    ArgumentError,
    CollectiveError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    MismatchError,
    RankFailedError,
)
from hvdlite.rendezvous.membership import Decision, install_membership, notify

START = Decision(leave=False, sync=True, changed=False)
GROWN = Decision(leave=False, sync=True, changed=True)
SHRUNK = Decision(leave=False, sync=False, changed=True)
GOES_ON = Decision(leave=False, sync=False, changed=False)
LEAVES = Decision(leave=True, sync=False, changed=False)


class Told(State):
    """A state that notes what is done with it."""

    def __init__(self) -> None:
        super().__init__(lambda value: value, lambda: 0)
        self.calls: list[str] = []
        self.sync_fails = 0

    def save(self) -> None:
        self.calls.append("save")

    def restore(self) -> None:
        self.calls.append("restore")

    def reset(self) -> None:
        self.calls.append("reset")

    def sync(self) -> None:
        self.calls.append("sync")
        if self.sync_fails:
            self.sync_fails -= 1
            raise RankFailedError("rank 0 died")


class Fake:
    """A boundary that answers with the given decisions, one after the other."""

    def __init__(self, state: Told, *decisions: Decision, joins: bool = False) -> None:
        self._state = state
        self._decisions = list(decisions)
        self.joiner = joins
        self.at_boundary: Any = lambda: None

    def enter(self, restored: bool) -> Decision:
        self._state.calls.append("enter restored" if restored else "enter")
        self.at_boundary()
        return self._decisions.pop(0)


@pytest.fixture(autouse=True)
def no_job() -> Iterator[None]:
    ops.return_to_names({})
    yield
    install_membership(None)
    ops.return_to_names({})


def train(state: Told, *outcomes: Any) -> Any:
    """Run a function whose calls end in these ways."""
    left = list(outcomes)

    @run
    def function(state: Told, plus: int) -> Any:
        state.calls.append("call")
        outcome = left.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome + plus

    return function(state, plus=1)


def in_job(*decisions: Decision, joins: bool = False) -> tuple[Told, Fake]:
    state = Told()
    state.register_reset_callbacks([lambda: state.calls.append("callback")])
    fake = Fake(state, *decisions, joins=joins)
    install_membership(fake)
    return state, fake


def test_without_a_sync_samplers_are_distributed_anew_all_the_same() -> None:
    state, _ = in_job(GOES_ON)
    train(state, 6)
    assert state.calls == ["enter", "reset", "call"]


def test_failure_restores_then_forms_a_world_then_resets_then_synchronizes() -> None:
    state, _ = in_job(START, GROWN)
    assert train(state, HorovodInternalError("rank 1 died"), 6) == 7
    first = ["enter", "sync", "call"]
    again = ["restore", "enter restored", "reset", "callback", "sync", "call"]
    assert state.calls == first + again


def test_other_errors_end_the_rank() -> None:
    state, _ = in_job(START)
    with pytest.raises(MismatchError, match="differ"):
        train(state, MismatchError("differ"))
    assert "restore" not in state.calls


def test_rank_that_leaves_exits_without_an_error() -> None:
    state, _ = in_job(START, LEAVES)
    with pytest.raises(SystemExit) as ending:
        train(state, HostsUpdatedInterrupt())
    assert ending.value.code == 0
    assert state.calls == ["enter", "sync", "call", "enter"]


def test_failed_sync_leads_to_another_boundary_without_a_restore() -> None:
    state, fake = in_job(START, GROWN, GROWN)

    def fails_at_the_second() -> None:
        state.sync_fails = int(state.calls[-1] == "enter" and "call" in state.calls)

    fake.at_boundary = fails_at_the_second
    assert train(state, HostsUpdatedInterrupt(), 6) == 7
    failed = ["enter", "reset", "callback", "sync"]
    again = ["enter restored", "reset", "callback", "sync", "call"]
    assert state.calls == ["enter", "sync", "call", *failed, *again]


def test_first_state_that_never_arrived_is_not_replaced_by_another() -> None:
    state, _ = in_job(START, GROWN)
    state.sync_fails = 1
    with pytest.raises(RankFailedError, match="rank 0 died"):
        train(state, 6)
    assert state.calls == ["enter", "sync"]


def test_rank_that_joins_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basics, "rank", lambda: 2)
    state, _ = in_job(GROWN, GROWN, joins=True)
    state.sync_fails = 1
    assert train(state, 6) == 7


def test_rank_that_joins_calls_the_callbacks_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(basics, "rank", lambda: 2)
    state, _ = in_job(GROWN, joins=True)
    train(state, 6)
    assert state.calls == ["enter", "reset", "callback", "sync", "call"]


def test_second_function_of_a_rank_that_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basics, "rank", lambda: 2)
    state, _ = in_job(GROWN, GOES_ON, joins=True)
    train(state, 6)
    monkeypatch.setattr(basics, "rank", lambda: 0)
    assert train(state, 6) == 7


@pytest.mark.parametrize(("rank", "decision"), [(0, GROWN), (2, SHRUNK)])
def test_rank_that_joins_never_trains_without_the_state(
    rank: int, decision: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(basics, "rank", lambda: rank)
    state, _ = in_job(decision, joins=True)
    with pytest.raises(RankFailedError, match="no rank is left that could send it"):
        train(state, 6)
    assert state.calls == ["enter"]


def test_names_count_from_the_first_boundary_again() -> None:
    ops.next_name("broadcast")
    ops.next_object("optimizer")
    state, _ = in_job(START, GOES_ON, GROWN, START)
    names = []

    @run
    def function(state: Told) -> None:
        names.append(ops.next_name("broadcast"))
        names.append(str(ops.next_object("optimizer")))
        if len(names) in (2, 4):
            raise HostsUpdatedInterrupt
        if len(names) == 6:
            raise HorovodInternalError("rank 1 died")

    function(state)
    continued = ["#broadcast.1", "1", "#broadcast.2", "2"]
    assert names == [*continued, "#broadcast.1", "1", "#broadcast.1", "1"]


@pytest.mark.parametrize("ending", [HorovodInternalError("died"), HostsUpdatedInterrupt()])
def test_what_the_function_held_is_free_at_the_boundary(ending: Exception) -> None:
    class Iterator_:
        pass

    state, fake = in_job(START, GROWN)
    alive: list[Any] = []
    kept: list[bool] = []
    fake.at_boundary = lambda: kept.extend(one() is not None for one in alive)

    @run
    def function(state: Told) -> None:
        if alive:
            return
        iterator = Iterator_()
        alive.append(weakref.ref(iterator))
        # A new one: its traceback is the function's alone.
        raise type(ending)()

    gc.disable()
    try:
        function(state)
    finally:
        gc.enable()
    assert kept == [False]


def test_notice_reaches_the_states_in_use_only() -> None:
    state, _ = in_job(START, SHRUNK)
    notify(0, removed=True)
    assert state._host_messages.empty()
    skips: list[bool] = []

    @run
    def function(state: Told) -> None:
        if skips:
            return
        notify(0, removed=True)
        notify(1, removed=True)
        assert not state._host_messages.empty()
        try:
            state.check_host_updates()
        except HostsUpdatedInterrupt as interrupt:
            skips.append(interrupt.skip_sync)
            raise

    function(state)
    assert skips == [True]
    notify(2, removed=False)
    assert state._host_messages.empty()


def test_boundary_settles_the_notices_before_it_and_none_that_come_later() -> None:
    state, fake = in_job(START, SHRUNK, SHRUNK)
    waiting: list[bool] = []
    fake.at_boundary = lambda: notify(2, removed=False) if len(waiting) == 2 else None

    @run
    def function(state: Told) -> None:
        waiting.append(not state._host_messages.empty())
        if len(waiting) < 3:
            notify(len(waiting) - 1, removed=False)
            raise HorovodInternalError("rank 1 died")

    function(state)
    assert waiting == [False, False, True]


def test_state_is_required() -> None:
    @run
    def function(state: Any) -> None: ...

    with pytest.raises(ArgumentError, match=r"first argument of function\(\) is a dict"):
        function({})


def test_outside_elastic_jobs_the_function_is_called_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = Told()
    assert train(state, 6) == 7
    assert state.calls == ["sync", "call"]
    with pytest.raises(CollectiveError) as failed:
        train(state, HorovodInternalError("rank 1 died"))
    hints = "".join(getattr(failed.value, "__notes__", [])) + capsys.readouterr().err
    assert "hvdlite-run --min-np" in hints
    with pytest.raises(HostsUpdatedInterrupt):
        train(state, HostsUpdatedInterrupt())
    assert "restore" not in state.calls


def test_values_that_a_death_has_overtaken_are_given_to_no_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The world has one rank now, and three have given their values."""
    basics.init()
    monkeypatch.setattr(objects, "gather_bytes", lambda *_: ([memoryview(b"N.")] * 3, 0))
    assert objects.allgather_object(None) == [None] * 3
    with pytest.raises(RankFailedError, match="'x' has values of 3 ranks, and there are 1 now"):
        objects.gather_json(None, "x")
    basics.shutdown()
