"""What a rank of an elastic job saves, restores after a failure, and receives when it joins."""

from __future__ import annotations

import copy
import pickle
import queue
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hvdlite import basics
from hvdlite.errors import ArgumentError, HostsUpdatedInterrupt, MismatchError
from hvdlite.objects import broadcast_object
from hvdlite.ops import maximum
from hvdlite.rendezvous.membership import current_membership

# What an update of the hosts does, as Horovod numbers it; both together are 3.
REMOVED = 1
ADDED = 2


class State:
    """Base of all states; a subclass says what `save`, `restore` and `sync` mean.

    Args:
        bcast_object: returns rank 0's object on all ranks.
        get_rank: returns the number of this rank.

    Example:
        >>> class Counter(State):
        ...     steps, saved = 0, 0
        ...     def save(self):
        ...         self.saved = self.steps
        ...     def restore(self):
        ...         self.steps = self.saved
        ...     def sync(self):
        ...         self.steps = self.saved = self._bcast_object(self.steps)
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[int, int]] = queue.Queue()
        self._last_updated_timestamp = 0
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Call functions whenever the ranks have changed, before the state is synchronized.

        Args:
            callbacks: functions without arguments; for example, one that scales the learning rate
                by `hvd.size()`. They are called in this order, on every rank, also on those that
                have just joined. An exception in one ends its rank.

        Example:
            >>> state.register_reset_callbacks([adapt_learning_rate])
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to new ranks: `reset`, then the callbacks.

        Messages about hosts stay, unlike in Horovod: one that arrived since this rank came to the
        boundary may be about a rank that still waits.
        """
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Note that hosts were added or removed, for the next `check_host_updates`.

        Args:
            timestamp: a number that grows from update to update.
            update_res: 1 if hosts were removed, 2 if hosts were added, 3 for both.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, and interrupt the function if ranks are to join or to leave.

        Every rank calls it, after the same step.

        Raises:
            HostsUpdatedInterrupt: on all ranks alike; `hvd.elastic.run` catches it.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Interrupt the function if ranks are to join or to leave, without saving the state.

        Every rank calls it, after the same step: the ranks compare what they know in one
        allreduce, so that all raise or none does.

        Raises:
            HostsUpdatedInterrupt: on all ranks alike; `hvd.elastic.run` catches it.
        """
        newest, added = self._take_messages()
        packed = (newest << 1 | added) if newest else 0
        if basics.is_initialized() and (current_membership() or basics.size() > 1):
            (packed,) = maximum(basics.engine(), "elastic.notice", packed)
        if packed:
            self._last_updated_timestamp = max(self._last_updated_timestamp, packed >> 1)
            raise HostsUpdatedInterrupt(skip_sync=not packed & 1)

    def forget_host_updates(self) -> None:
        """Drop the messages so far, because this rank goes to a boundary, which settles them."""
        newest, _ = self._take_messages()
        self._last_updated_timestamp = max(self._last_updated_timestamp, newest)

    def _take_messages(self) -> tuple[int, bool]:
        """Return the newest timestamp that was not handled (0: none), and whether hosts come."""
        newest, added = 0, False
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > self._last_updated_timestamp:
                newest = max(newest, int(timestamp))
                added = added or bool(update & ADDED)
        return newest, added

    def save(self) -> None:
        """Keep a copy of the state on this rank.

        Raises:
            NotImplementedError: a subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no save()")

    def restore(self) -> None:
        """Go back to the copy that the last `save` made.

        Raises:
            NotImplementedError: a subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no restore()")

    def sync(self) -> None:
        """Replace the state of every rank by that of rank 0, and save it.

        Raises:
            NotImplementedError: a subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sync()")

    def reset(self) -> None:
        """Adapt what depends on the ranks, before the callbacks; by default nothing does."""


class ObjectState(State):
    """A state of plain Python objects, which are its attributes.

    Args:
        bcast_object: returns rank 0's object on all ranks.
        get_rank: returns the number of this rank.
        kwargs: the attributes with their first values.

    Raises:
        ArgumentError: a value cannot be pickled, or an attribute has the name of a method.

    Example:
        >>> state = ObjectState(hvd.broadcast_object, hvd.rank, epoch=0, batch=0)
        >>> state.epoch += 1
        >>> state.restore()
        >>> state.epoch
        0
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any],
        get_rank: Callable[[], int],
        **kwargs: Any,
    ) -> None:
        for name, value in kwargs.items():
            check_name(type(self), name)
            _check_value(type(self), name, value)
        self._saved_state = copy.deepcopy(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        """Keep a copy of the attributes."""
        self._saved_state = copy.deepcopy(self._values())

    def restore(self) -> None:
        """Set the attributes to the copies of the last `save`."""
        self._set_attributes(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Set the attributes to rank 0's present values, and save."""
        if self._saved_state:
            self._set_attributes(self._bcast_object(self._values()))
        self.save()

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _set_attributes(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class TensorState(ObjectState):
    """A state with tensors that all ranks must have alike. Adapters say which they are."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(broadcast_object, basics.rank, **kwargs)

    def sync(self) -> None:
        """Replace the state of every rank by that of rank 0, and save it.

        Raises:
            MismatchError: this rank's tensors are not like rank 0's.
        """
        layout = self._layout()
        check_layout(layout, broadcast_object(layout, root_rank=0), basics.rank())
        self._sync_tensors()
        super().sync()

    def _layout(self) -> dict[str, str]:
        """Describe the tensors that must be alike on all ranks, by name."""
        raise NotImplementedError

    def _sync_tensors(self) -> None:
        raise NotImplementedError


class VariableState(TensorState):
    """A state that saves and restores variables. Adapters say which they are.

    A subclass has whatever `_variables` reads before it calls this class's constructor, to which it
    gives a function that returns the value of a variable as a NumPy array, copied or not.
    """

    def __init__(self, to_array: Callable[[Any], Any], /, **kwargs: Any) -> None:
        self._to_array = to_array
        self._copies: dict[int, tuple[Any, Any]] = {}  # It has (variable, value) by id().
        self._copy_variables()
        super().__init__(**kwargs)

    def save(self) -> None:
        """Copy the variables and the attributes."""
        self._copy_variables()
        super().save()

    def restore(self) -> None:
        """Go back to the last `save`."""
        for variable, buffer in self._copies.values():
            variable.assign(buffer)
        super().restore()

    def _copy_variables(self) -> None:
        """Copy the values, into the arrays of the last copy where these suit."""
        before, self._copies = self._copies, {}
        for variable in self._variables():
            value = self._to_array(variable)
            _, buffer = before.get(id(variable), (None, None))
            if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                buffer = value.copy()
            else:
                buffer[...] = value
            self._copies[id(variable)] = (variable, buffer)

    def _variables(self) -> list[Any]:
        raise NotImplementedError


def check_layout(mine: Mapping[str, str], roots: Mapping[str, str], rank: int) -> None:
    """Raise MismatchError if this rank's state does not hold the same tensors as rank 0's."""
    # Only ranks that differ from rank 0 raise, so that one rank that does not fit ends alone. By
    # name, `mine` and `roots` have the dtype and shape of each tensor here and on rank 0.
    for name in [*roots, *(name for name in mine if name not in roots)]:
        if mine.get(name) != roots.get(name):
            raise MismatchError(
                f"rank {rank} cannot receive the state of rank 0: '{name}' is "
                f"{mine.get(name, 'missing')} on rank {rank} and {roots.get(name, 'missing')} on "
                "rank 0; make the same model and optimizer on every rank"
            )


def check_name(state: type[State], name: str) -> None:
    if callable(getattr(state, name, None)):
        raise ArgumentError(
            f"{state.__name__}({name}=...): '{name}' is a method of the state; "
            "give the attribute another name"
        )


def _check_value(state: type[State], name: str, value: Any) -> None:
    try:
        pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # A user's __reduce__ may raise anything.
        raise ArgumentError(
            f"{state.__name__}({name}=...): the ranks exchange the attributes of a state, and "
            f"this {type(value).__name__} cannot be pickled: {error}; leave it out of the state"
        ) from error
