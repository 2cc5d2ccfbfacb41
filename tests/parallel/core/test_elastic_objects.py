"""A rank that joins an elastic job in another function than the others."""

from __future__ import annotations

from harness import run_world
from hvdlite import basics, elastic
from hvdlite.errors import MismatchError
from hvdlite.objects import broadcast_object
from hvdlite.rendezvous.membership import Decision, install_membership

PRELOAD = ("numpy",)


class _Boundary:
    """Lets everybody pass, with a sync."""

    def enter(self, restored: bool) -> Decision:
        return Decision(leave=False, sync=True, changed=True)

    @property
    def joiner(self) -> bool:
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
