"""Elastic states without a framework: objects and messages over several ranks."""

from __future__ import annotations

from harness import run_world
from hvdlite import basics, elastic
from hvdlite.elastic.membership import Decision, install_membership
from hvdlite.errors import HostsUpdatedInterrupt, MismatchError
from hvdlite.objects import broadcast_object

PRELOAD = ("numpy",)


def _train_with_objects() -> list[object]:
    basics.init()
    state = elastic.ObjectState(broadcast_object, basics.rank, epoch=0, ranks=[basics.rank()])
    state.epoch = basics.rank() + 5
    interrupts = []

    @elastic.run
    def train(state: elastic.ObjectState) -> list[object]:
        seen = [state.epoch, state.ranks]
        for step in range(4):
            if step == 2 and basics.rank() == 1:
                state.on_hosts_updated(1, 2)
            try:
                state.commit()
            except HostsUpdatedInterrupt as interrupt:
                interrupts.append((step, interrupt.skip_sync))
        return [*seen, interrupts]

    result: list[object] = train(state)
    basics.shutdown()
    return result


def test_ranks_have_one_state_and_are_interrupted_alike() -> None:
    for result in run_world(3, _train_with_objects):
        assert result.value == [5, [0], [(2, False)]]


class _Boundary:
    """Lets everybody pass, with a sync."""

    def enter(self, restored: bool) -> Decision:
        return Decision(leave=False, sync=True, changed=True)

    def first_joins(self) -> bool:
        return basics.rank() == 2


def _join_in_another_function() -> str:
    basics.init()
    install_membership(_Boundary())
    state = elastic.ObjectState(broadcast_object, basics.rank)

    def first(state: elastic.ObjectState) -> str:
        return "first"

    def second(state: elastic.ObjectState) -> str:
        return "second"

    try:
        return str(elastic.run(second if basics.rank() < 2 else first)(state))
    except MismatchError as error:
        return str(error)
    finally:
        basics.shutdown()


def test_rank_that_joins_in_another_function_is_told() -> None:
    *others, joined = [result.value for result in run_world(3, _join_in_another_function)]
    assert others == ["second", "second"]
    assert "rank 2 joins the job in" in joined
    assert "first(), and rank 0 is in" in joined
