"""`hvd.elastic.run`: calls a training function again whenever the ranks of its job have changed.

A *boundary* is the place between two calls of the function, where all ranks meet: ranks join and
leave there, and there alone the data is distributed anew. A failure in a step that the remaining
ranks can redo leaves the function running: the membership thread and the core do what it needs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from hvdlite import basics, ops
from hvdlite.elastic.state import ADDED, REMOVED, State
from hvdlite.errors import (
    ArgumentError,
    CollectiveError,
    HostsUpdatedInterrupt,
    MismatchError,
    RankFailedError,
)
from hvdlite.rendezvous import epochs
from hvdlite.rendezvous.membership import (
    Decision,
    MembershipThread,
    current_membership,
    has_state,
    listening,
    note_error,
    note_state,
)

_HINT = (
    "hvd.elastic.run: this is not an elastic job, so the error ends it; in a job that "
    "hvdlite-run --min-np N starts, the remaining ranks go on"
)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function elastic; use it as a decorator.

    The function is called once the ranks have met and the state is the same on all of them. It is
    called again, with the same arguments, whenever ranks have joined or left and after a failure
    that the remaining ranks could not redo, then from the last commit. So it reads from its state
    where to begin. Outside elastic jobs the state is synchronized, and the function is called once.

    Args:
        func: its first argument is a `State`; all ranks call it with a state of the same kind.

    Returns:
        A function of the same arguments that returns what the last call returns. In a rank that
        leaves the job it raises SystemExit(0).

    Raises:
        ArgumentError: (the returned function) its first argument is not a `State`.

    Example:
        >>> @hvd.elastic.run
        ... def train(state):
        ...     for state.epoch in range(state.epoch, 10):
        ...         train_one_epoch(state)
        ...         state.commit()
        >>> train(hvd.elastic.TorchState(model, optimizer, epoch=0))
    """

    @functools.wraps(func)
    def elastic(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise ArgumentError(
                f"the first argument of {getattr(func, '__name__', 'the function')}() is a "
                f"{type(state).__name__}; a function under hvd.elastic.run takes a state, such as "
                "hvd.elastic.TorchState(model, optimizer, epoch=0)"
            )
        membership = current_membership()
        if membership is None:
            return _run_once(func, state, args, kwargs)

        def hear(version: int, removed: bool) -> None:
            # A state that has seen no update has seen timestamp 0.
            state.on_hosts_updated(version + 1, REMOVED if removed else ADDED)

        with listening(hear):
            return _Run(membership, func, state).repeat(args, kwargs)

    return elastic


def _run_once(
    func: Callable[..., Any], state: State, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    try:
        state.sync()
        return func(state, *args, **kwargs)
    except CollectiveError as error:
        if hasattr(error, "add_note"):  # Python has it since 3.11.
            error.add_note(_HINT)
        else:
            print(f"hvdlite: {_HINT}", file=sys.stderr)
        raise


class _Outcome(Enum):
    RETURNED = 0
    INTERRUPTED = 1
    FAILED = 2


class _Run:
    def __init__(
        self, membership: MembershipThread, func: Callable[..., Any], state: State
    ) -> None:
        self._membership = membership
        self._func = func
        self._state = state
        # A rank that joins has come as far in the script as this rank has now.
        self._mark = ops.mark_names()
        self._first = True
        self._result: Any = None

    def repeat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        outcome = self._attempt(False, args, kwargs)
        while outcome is not _Outcome.RETURNED:
            # No exception is being handled here: its traceback would keep the iterators, their
            # workers and the tensors of the last call alive.
            outcome = self._attempt(outcome is _Outcome.FAILED, args, kwargs)
        return self._result

    def _attempt(self, restored: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Outcome:
        decision = self._cross_boundary(restored)
        if not self._prepare(decision.sync):
            return _Outcome.FAILED
        try:
            self._result = self._func(self._state, *args, **kwargs)
        except CollectiveError as error:
            note_error(error)
            self._state.restore()
            return _Outcome.FAILED
        except HostsUpdatedInterrupt:
            return _Outcome.INTERRUPTED
        return _Outcome.RETURNED

    def _cross_boundary(self, restored: bool) -> Decision:
        # The boundary settles every update that this rank knows by now. What arrives while it
        # waits may be about a rank that joins at the next boundary only.
        self._state.forget_host_updates()
        epochs.drop_step()
        decision = self._membership.enter(restored)
        if decision.leave:
            raise SystemExit(0)
        if not has_state() and (not decision.sync or basics.rank() == 0):
            raise RankFailedError(
                "this rank joined the job, and no rank is left that could send it the state of the "
                "training; start the job again from a checkpoint"
            )
        if decision.changed or decision.sync:
            # Otherwise names may be in flight, and the ranks have counted alike.
            ops.return_to_names(self._mark)
        return decision

    def _prepare(self, sync: bool) -> bool:
        """Adapt the state to the ranks and synchronize it; return False if another rank died."""
        first, self._first = self._first, False
        try:
            if sync:
                self._compare_functions()
            # A rank that joins calls the callbacks, too: they may use collectives, as `fit` does.
            if not first or not has_state():
                self._state.on_reset()
            elif not sync:
                self._state.reset()
            if sync:
                self._state.sync()
        except CollectiveError:
            if first and has_state():
                # Rank 0 died before all had its first state: what it alone had loaded is lost.
                raise
            return False
        note_state()
        return True

    def _compare_functions(self) -> None:
        """Check that rank 0 is in the same function as this rank, which may have joined."""
        if not basics.is_initialized():
            return
        mine = getattr(self._func, "__qualname__", type(self._func).__qualname__)
        # The name is not numbered: in another function ranks have counted otherwise.
        blocks, _ = ops.gather_bytes(basics.engine(), mine.encode(), "elastic.function")
        roots = bytes(blocks[0]).decode()
        if mine != roots:
            raise MismatchError(
                f"rank {basics.rank()} joins the job in {mine}(), and rank 0 is in {roots}() by "
                "now; make them one function under hvd.elastic.run, which reads from its state "
                "what is left to do"
            )
