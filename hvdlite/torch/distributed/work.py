"""What an operation of a process group returns: a `Work` to wait for, and its future."""

from __future__ import annotations

import collections
import contextlib
import copy
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from hvdlite import _core
from hvdlite.errors import CollectiveTimeoutError, HvdliteError, passed_on
from hvdlite.rendezvous.deadline import seconds_of
from hvdlite.torch.distributed import origins
from hvdlite.torch.distributed.origins import Origin

# copies the results of a completed operation to where the caller wants them
Finish = Callable[[_core.Handle], None]

_UNSET = timedelta(0)
_CALLBACK_SECONDS = 1.0


class Work(distributed.Work):  # type: ignore[misc]
    """An operation in flight. Any thread may wait for it."""

    def __init__(
        self,
        handle: _core.Handle,
        outputs: Sequence[torch.Tensor],
        finish: Finish | None,
        seconds: float,
        give_up: Callable[[], None],
        origin: Origin | None = None,
        line: Hashable = None,
    ) -> None:
        super().__init__()
        self._handle = handle
        self._outputs = outputs  # what the operation writes, the value of the future
        self._finish = finish  # copies the results to their place; None: they are there
        self._finishing = threading.Lock() if finish is not None else None
        self._error: Exception | None = None  # of `finish`
        self._seconds = seconds  # how long `wait` waits by default
        self._deadline = time.monotonic() + seconds  # The process group ends then.
        self._give_up = give_up  # is called when that time has passed, and raises
        self._origin = origin  # names what callbacks of the future start
        self.line = line  # Callbacks of the operations in one line run in the order of these.
        self._future: Any = None
        self._waited = False

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Block until the operation has completed, and return True, or raise its error.

        If `timeout` passes first, CollectiveTimeoutError is raised, and the operation goes on. If
        the process group's time passes, it is raised, too, and the group has ended.
        """
        if timeout and (seconds := seconds_of(timeout)) < self._deadline - time.monotonic():
            self._wait_for_a_while(seconds)
        else:
            self._wait()
        self._waited = True
        if self._finishing is not None:
            with self._finishing:
                self._deliver()
        return True

    def _wait_for_a_while(self, seconds: float) -> None:
        try:
            self._handle.wait(seconds)
        except TimeoutError as error:
            if self._handle.done():
                self._handle.wait()
                return
            raise CollectiveTimeoutError(
                f"wait() waited {seconds:g} s, the timeout that it was given: {error}; wait again, "
                "or with a longer timeout"
            ) from None

    def _wait(self) -> None:
        try:
            self._handle.wait(self._seconds, fatal=True)
        except TimeoutError:
            if not self._handle.done():
                self._give_up()
            self._handle.wait()  # It ended at the last moment, or itself failed by a timeout.

    def _deliver(self) -> None:
        """Copy the results to where they belong, once; an error of that is raised each time."""
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                finish(self._handle)
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Block until the operation has completed, well or not."""
        try:
            self._handle.wait(max(0.0, self._deadline - time.monotonic()))
        except TimeoutError:
            if not self._handle.done():
                with contextlib.suppress(HvdliteError):  # The waiting thread gets it, too.
                    self._give_up()
        except HvdliteError:
            pass  # The waiting thread gets it.

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._handle.done():
            return False
        with contextlib.suppress(HvdliteError):
            self._handle.wait()  # It lets go of memory that only the operation needed.
        return True

    def is_success(self) -> bool:
        return self._handle.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        if self._handle.done():
            try:
                self.wait()
            except Exception as error:
                return error
        return None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self._outputs)

    def get_future(self) -> Any:
        """Return a future, whose value is the list of tensors that were written."""
        # `Future.set_exception` would end a DistributedDataParallel in a segmentation fault: its
        # C++ code reads the value without a look at the error. A callback that raises makes a
        # future that C++ does look at.
        if self._future is None:
            origins.install(_step_aside)
            base: Any = torch.futures.Future()
            self._future = origins.plain_then(base, self._give)
            if self._origin is not None:
                origins.note(self._future, self._origin)
            if self._waited:  # Torch's C++ code reads the value after wait().
                base.set_result(None)
            else:
                _waiter.watch(self, base)
        return self._future

    def _give(self, _: Any) -> list[torch.Tensor]:
        try:
            self.wait()
        except HvdliteError as error:
            passed_on.append(copy.copy(error))  # The frames of a traceback would hold tensors.
            raise
        return list(self._outputs)


class _Turn:
    """The callbacks of one future."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.ended = threading.Event()  # or wait for another future


_of_thread = threading.local()  # A thread that runs callbacks has their turn here.


class _Waiter:
    """Threads that complete the futures of this process's operations, one for each in flight."""

    # To complete a future is to run its callbacks, which are the user's, and may wait for anything.
    # In each line they run in the order of the operations; but the next ones do not wait for those
    # that wait for a future, or take longer than a second. Idle threads wait for the next future.

    def __init__(self) -> None:
        self._arrived = threading.Condition()  # Its lock guards all attributes.
        self._pending: collections.deque[tuple[Work, Any, _Turn | None, _Turn]] = (
            collections.deque()
        )
        self._last: Any = weakref.WeakValueDictionary[Hashable, _Turn]()  # by line
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._stopped = False

    def watch(self, work: Work, base: Any) -> None:
        """Let `base` get its value when the operation has completed."""
        if getattr(_of_thread, "turn", None) is not None:
            # A callback that starts an operation mostly waits for it: no other thread is needed.
            work.settle()
            base.set_result(None)
            return
        turn = _Turn()
        with self._arrived:
            self._pending.append((work, base, self._last.get(work.line), turn))
            self._last[work.line] = turn
            if len(self._pending) <= self._idle:
                self._arrived.notify()
                return
            thread = threading.Thread(target=self._run, name="hvdlite-futures", daemon=True)
            self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while self._complete_next():
            pass

    def _complete_next(self) -> bool:
        """Complete a future, or return False if there will be no more."""
        with self._arrived:
            self._idle += 1
            while not self._pending and not self._stopped:
                self._arrived.wait()
            self._idle -= 1
            if not self._pending:
                return False
            work, base, before, turn = self._pending.popleft()
        work.settle()
        if before is not None:
            before.begun.wait()
            before.ended.wait(_CALLBACK_SECONDS)
        turn.begun.set()
        _of_thread.turn = turn
        base.set_result(None)
        _of_thread.turn = None
        turn.ended.set()
        return True

    def stop(self) -> None:
        """End the threads; called when all engines have been shut down, so that all has ended."""
        with self._arrived:
            self._stopped = True
            self._arrived.notify_all()
        end = time.monotonic() + _CALLBACK_SECONDS  # A callback may wait for something forever.
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))


_waiter = _Waiter()


def stop_waiter() -> None:
    global _waiter
    stopped, _waiter = _waiter, _Waiter()
    stopped.stop()


def _step_aside() -> None:
    """Let the next callbacks run, because this thread will wait for a future."""
    turn: _Turn | None = getattr(_of_thread, "turn", None)
    if turn is not None:
        turn.ended.set()
