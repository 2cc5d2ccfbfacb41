"""Which reducer reduces the gradient of a parameter: that of the optimizer that was made last.

Two living optimizers may have the same parameters: one for the start of the training and one for
the rest, or two that step in turns. If both reduced a gradient, one would write it while the other
reads it, and a sum would be summed twice. So the later one reduces it, and the earlier one *gives
it up*. The earlier optimizer may go on to step, with the gradients that the later one has reduced,
if both would have reduced them alike; otherwise its next use is an error that names both.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from hvdlite import ops
from hvdlite.errors import HvdliteError
from hvdlite.torch.compression import Compression

if TYPE_CHECKING:
    from hvdlite.torch.optimizers.reducer import GradientReducer

_reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


def owner_of(params: Iterable[torch.Tensor], ranks: Iterable[int] = ()) -> GradientReducer | None:
    """Return a reducer, over at least these ranks, of the gradient of one of the parameters."""
    wanted, least = set(params), set(ranks)

    def owns(reducer: GradientReducer) -> bool:
        members = reducer.settings.reduction.process_set
        return reducer.watches(wanted) and (not least or least.issubset(members.ranks))

    for _ in range(2):
        found = next(filter(owns, _reducers), None)
        if found is None:
            break
        gc.collect()  # It may belong to an optimizer that is no longer used.
    return found


def refuse_reduced(params: Iterable[torch.Tensor], ranks: Iterable[int]) -> None:
    """Raise if another optimizer reduces the gradients of these ranks, which Adasum combines."""
    owner = owner_of(params, ranks)
    if owner is not None:
        raise HvdliteError(
            f"{owner.title} reduces the same gradients, so that all ranks have equal ones and "
            "op=hvd.Adasum has nothing to combine: use one of the two, and delete the other"
        )


def drop_accumulated(params: Iterable[torch.Tensor]) -> None:
    """Drop gradients of these parameters that were accumulated and not sent, at a boundary."""
    # The samples of an elastic job that are in no finished step are distributed again.
    wanted = set(params)
    for reducer in list(_reducers):
        if reducer.watches(wanted):
            reducer.drop_accumulated()


def claim(reducer: GradientReducer, params: Iterable[torch.Tensor]) -> None:
    """Let one reducer alone reduce these gradients from now on; raise if another is doing so."""
    wanted = set(params)
    for other in list(_reducers):
        other.give_up(wanted, reducer)
    _reducers.add(reducer)


class GivenUp:
    """The parameters that one reducer has given up, and who reduces their gradients instead."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = weakref.ref(reducer)
        self.by_param: dict[torch.Tensor, tuple[weakref.ref[GradientReducer], str]] = {}

    def __bool__(self) -> bool:
        return bool(self.by_param)

    def add(self, params: Iterable[torch.Tensor], taker: GradientReducer) -> None:
        """Note that another reducer has them from now on."""
        self.by_param |= dict.fromkeys(params, (weakref.ref(taker), taker.title))

    def concede(self, params: Iterable[torch.Tensor]) -> bool:
        """Leave new parameters that other reducers have to these; return whether there are any."""
        before = len(self.by_param)
        for other in list(_reducers):
            if other is not self._reducer():
                self.add([param for param in params if other.watches({param})], other)
        return len(self.by_param) > before

    def living(self) -> list[GradientReducer]:
        """Return the reducers that have them now."""
        found = (reference() for reference in self._by_title().values())
        return [taker for taker in found if taker is not None]

    def _by_title(self) -> dict[str, weakref.ref[GradientReducer]]:
        return {title: reference for reference, title in self.by_param.values()}

    def refuse_weight(self) -> None:
        """Refuse to weigh gradients that another reducer reduces, without that weight."""
        if self.by_param:
            title = next(iter(self._by_title()))
            raise HvdliteError(
                f"the gradients are reduced by {title}, which was made later over the same "
                "parameters, so a weight goes to that one"
            )

    def takers(self) -> list[GradientReducer]:
        """Return the reducers that have them; raise if one is gone or reduces differently."""
        found = []
        own = self._reducer()
        assert own is not None
        for title, reference in self._by_title().items():
            taker = reference()
            why = "which is gone" if taker is None else _difference(own, taker)
            if taker is None or why:
                raise HvdliteError(
                    f"the gradients of {own.title} are reduced by {title}, which was "
                    f"made later over the same parameters, and {why}: step with that one, or make "
                    "this one a DistributedOptimizer again after the other one is deleted"
                )
            found.append(taker)
        return found


def _difference(own: GradientReducer, taker: GradientReducer) -> str:
    """Say in what two reducers differ, so that one cannot stand for the other; "" if nothing."""
    # A gradient may be reduced again after the first of two steps. An average of equal values is
    # the value itself; a sum, and what is not exact, is not.
    ours, theirs = own.settings, taker.settings
    both = (ours, theirs)
    same_ranks = ours.reduction.process_set.ranks == theirs.reduction.process_set.ranks
    differs = {
        "does not average": any(one.reduction.op != ops.Average for one in both),
        "has another process set": not same_ranks,
        "has another backward_passes_per_step": ours.passes != theirs.passes,
        "compresses gradients": any(one.compression is not Compression.none for one in both),
        "weighs the ranks": any(one.weight is not None for one in both),
        "uses gradients of other steps": not (
            own.exchange.of_one_step and taker.exchange.of_one_step
        ),
        "reduces in step()": not all(one.in_backward for one in both),
        "shards gradients": own.divides or taker.divides,
    }
    return next((f"one of the two {what}" for what, true in differs.items() if true), "")
