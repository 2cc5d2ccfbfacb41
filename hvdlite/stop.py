"""Stop in time: a signal to any rank ends the loops of all ranks after the same step.

A batch system sends a signal some time before it ends a job, and ranks get the signal at different
moments. The handler of `stop_on` only notes it. `stop_requested`, which every rank calls at the
same place of its loop, combines what the ranks have noted, so that all of them save the same step.
"""

from __future__ import annotations

import atexit
import functools
import signal
import threading
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError, StopHandlerWarning

Handler = Callable[[int, FrameType | None], Any] | int | None

_NAME = "stop.requested"
_ABOVE_RANKS = 1 << 31  # The first rank that noted a signal wins the maximum.

# Written by the main thread: by `stop_on`, and by its handlers, which Python calls there.
_installed: dict[int, Handler] = {}  # Each watched signal has got this handler last.
_noted: list[int] = []  # This process has got these signals, in this order.


def stop_on(signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
    """Note these signals from now on, for `stop_requested`, instead of ending at once.

    Call it in the main thread, after frameworks have installed handlers of their own. Handlers of
    Python that were installed before are called after the signal was noted. Python's own actions
    (to end, or to raise KeyboardInterrupt at SIGINT) do not happen any more.

    Args:
        signals: SIGTERM is what batch systems and hvdlite-run send; SIGUSR1 is what Slurm sends
            with `--signal=USR1@120`.

    Raises:
        ArgumentError: this is not the main thread, or a signal cannot be caught.

    Example:
        >>> import os, signal
        >>> import hvdlite.torch as hvd
        >>> hvd.init()
        >>> hvd.stop_on()
        >>> hvd.stop_requested() is None
        True
        >>> os.kill(os.getpid(), signal.SIGUSR1)
        >>> hvd.stop_requested()
        'rank 0: SIGUSR1'
    """
    if threading.current_thread() is not threading.main_thread():
        raise ArgumentError(
            "stop_on() was called in a thread, and Python handles signals in the main thread only; "
            "call it there, before the thread starts"
        )
    if isinstance(signals, int):
        raise ArgumentError(f"stop_on takes several signals: give it [{signals!r}]")
    for number in signals:
        before = signal.getsignal(number)
        if number not in _installed or before is not _installed[number]:
            _install(number, before)


def watched() -> bool:
    return bool(_installed)


def _install(number: int, before: Handler) -> None:
    def note(number: int, frame: FrameType | None) -> None:
        """Note a signal, and call the handler that was there before."""
        if number not in _noted:
            _noted.append(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    try:
        signal.signal(number, note)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"stop_on(): {_name(number)} cannot be caught ({error}); leave it out of the signals"
        ) from error
    if not _installed:
        atexit.register(_ignore_late_ones)
    _installed[number] = note
    if before is None:
        warnings.warn(
            f"stop_on(): the handler of {_name(number)} was not installed by Python, and it is "
            "not called any more; leave this signal out if the handler is needed",
            StopHandlerWarning,
            stacklevel=3,
        )


def _ignore_late_ones() -> None:
    """Ignore the signals from here on, because this process ends."""
    # Batch systems signal every process, and launchers pass their signals on, too. Python removes
    # its handlers before it ends; a signal after that would hide the exit status.
    for number, note in _installed.items():
        if signal.getsignal(number) is note:
            signal.signal(number, signal.SIG_IGN)


def stop_requested(every: int = 1) -> str | None:
    """Return on all ranks alike whether a rank was asked to stop: by whom, or None.

    Every rank calls it at the same places of its loop. It is an allreduce of two numbers. Once it
    has returned a reason, it goes on to return one. A rank that waits in `join` takes no part: let
    all ranks call `join`, and ask after it.

    In an elastic job SIGTERM to some ranks means that these are taken away: they leave at the next
    boundary, and the others go on. So there SIGTERM stops the job when all ranks have got it, as
    they do from hvdlite-run. Any other signal to any rank stops the job.

    Args:
        every: ask the other ranks in the first of so many calls only, and return None in the
            others; the same on all ranks. It saves time where steps are very short.

    Returns:
        The first rank that was asked and the signal that asked it, such as "rank 1: SIGUSR1"; None
        if no rank was asked.

    Raises:
        ArgumentError: `every` is not at least 1.
        NotInitializedError: `init` was not called.
        HvdliteError: the collective failed.

    Example:
        >>> if hvd.stop_requested(every=10):
        ...     save_checkpoint()
        ...     sys.exit(hvd.EXIT_STOPPED)
    """
    if every < 1:
        raise ArgumentError(f"stop_requested(every={every}): ask in every call (1), or in fewer")
    # The count begins anew on all ranks wherever ranks may join that have not counted so far.
    if ops.next_number(_NAME) % every:
        return None
    elastic = basics.in_elastic_job()
    ends_all = [one for one in _noted if not (elastic and one == signal.SIGTERM)]
    mine = (_ABOVE_RANKS - basics.rank()) << 8 | ends_all[0] if ends_all else 0
    first, some_stay = mine, int(signal.SIGTERM not in _noted)
    if elastic or basics.size() > 1:
        first, some_stay = ops.maximum(basics.engine(), _NAME, first, some_stay)
    if first:
        return f"rank {_ABOVE_RANKS - (first >> 8)}: {_name(first & 0xFF)}"
    if not some_stay:
        return "all ranks: SIGTERM"
    if elastic and signal.SIGTERM in _noted:
        _ask_once_to_leave()
    return None


@functools.cache
def _ask_once_to_leave() -> None:
    member = basics.current_world().member
    if member is not None:
        member.ask_to_leave("it got SIGTERM")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
