"""What an operation of a process group returns: a `Work` to wait for, and its future."""

from __future__ import annotations

import collections
import contextlib
import copy
import threading
import time
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
from hvdlite.torch.dynamo import keep_out

# copies the results of a completed operation to where the caller wants them
Finish = Callable[[_core.Handle], None]

_UNSET = timedelta(0)
_SLICE_SECONDS = 0.005  # The leader waits so long for one operation before it looks at the others.
_CALLBACK_SECONDS = 1.0  # Then another thread takes the place of one that runs a callback.


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
        self.deadline = time.monotonic() + seconds  # The process group ends then.
        self._give_up = give_up  # is called when that time has passed, and raises
        self._origin = origin  # names what callbacks of the future start
        self.line = line  # Callbacks of the operations in one line run in the order of these.
        self._future: Any = None
        self._waited = False

    @keep_out
    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Block until the operation has completed, and return True, or raise its error.

        If `timeout` passes first, CollectiveTimeoutError is raised, and the operation goes on. If
        the process group's time passes, it is raised, too, and the group has ended.
        """
        if timeout and (seconds := seconds_of(timeout)) < self.deadline - time.monotonic():
            self._wait(seconds, fatal=False)
        else:
            self._wait(self._seconds, fatal=True)
        self._waited = True
        if self._finishing is not None:
            with self._finishing:
                self._deliver()
        return True

    def _wait(self, seconds: float, fatal: bool) -> None:
        try:
            self._handle.wait(seconds, fatal=fatal)
        except TimeoutError as error:
            if self._handle.done():
                # It ended at the last moment, or itself failed by a timeout.
                self._handle.wait()
            elif fatal:
                self._give_up()
            else:
                raise CollectiveTimeoutError(
                    f"wait() waited {seconds:g} s, the timeout that it was given: {error}; wait "
                    "again, or with a longer timeout"
                ) from None

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
        """Wait a moment for the end of the operation; end the group when its time has passed."""
        left = self.deadline - time.monotonic()
        try:
            self._handle.wait(max(0.0, min(_SLICE_SECONDS, left)))
        except TimeoutError:
            if left < _SLICE_SECONDS and not self._handle.done():
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

    @keep_out
    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self._outputs)

    @keep_out
    def get_future(self) -> Any:
        """Return a future, whose value is the list of tensors that were written."""
        # `Future.set_exception` would end a DistributedDataParallel in a segmentation fault: its
        # C++ code reads the value without a look at the error. A callback that raises makes a
        # future that C++ does look at.
        if self._future is None:
            base: Any = torch.futures.Future()
            self._future = origins.future_of(base, self._give, self._origin, _waiter.step_aside)
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


class _Waiter:
    """Threads that complete the futures of this process's operations."""

    # Operations of one line complete about in their order, and those of different lines in any
    # order. So the *leader* looks which have completed, and waits for the one whose time would be
    # up first, but never long. To complete a future is to run its callbacks, which are the user's.
    # They may wait for another future, or take long. Then the *guard* becomes the leader, and the
    # former leader ends after its callback. The lock guards all attributes.

    def __init__(self) -> None:
        self._pending: collections.deque[tuple[Work, Any]] = collections.deque()
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # There is something for the leader.
        self._needed = threading.Condition(self._lock)  # The guard is needed.
        self._leader: threading.Thread | None = None
        self._guard: threading.Thread | None = None
        self._since: float | None = None  # The leader began to run callbacks at this time.
        self._of_thread = threading.local()

    def watch(self, work: Work, base: Any) -> None:
        """Let `base` get its value when the operation has completed."""
        if getattr(self._of_thread, "leads", False):
            # A callback that starts an operation mostly waits for it: no other thread is needed.
            while not work.is_completed():
                work.settle()
            base.set_result(None)
            return
        with self._lock:
            self._pending.append((work, base))
            if self._guard is None:
                self._guard = self._start()
            self._arrived.notify()

    def step_aside(self) -> None:
        """Let another thread lead, because this thread will wait for a future."""
        with self._lock:
            if self._leader is threading.current_thread():
                self._leader = None
                self._needed.notify()

    def stop(self) -> None:
        """End the threads; called when all engines have been shut down, so that all has ended."""
        with self._lock:
            threads = (self._leader, self._guard)
            self._leader = self._guard = None
            left = [*self._pending]
            self._pending.clear()
            self._arrived.notify_all()
            self._needed.notify_all()
        for _, base in left:
            base.set_result(None)
        for thread in threads:
            if thread is not None and thread is not threading.current_thread():
                thread.join(_CALLBACK_SECONDS)  # A callback may wait for something forever.

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="hvdlite-futures", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        """Be the guard until the leader is away; be the leader then."""
        this = threading.current_thread()
        with self._lock:
            while self._guard is this and not self._leader_is_away():
                self._needed.wait(_CALLBACK_SECONDS)
            if self._guard is not this:
                return
            self._leader, self._since, self._guard = this, None, self._start()
        self._of_thread.leads = True
        while self._lead():
            pass

    def _lead(self) -> bool:
        """Complete a future, or wait a moment; return False in a thread that leads no more."""
        with self._lock:
            while self._leader is threading.current_thread() and not self._pending:
                self._since = None
                self._arrived.wait()
            if self._leader is not threading.current_thread():
                return False
            base = self._take_completed()
            if base is None:
                work = min((work for work, _ in self._pending), key=lambda work: work.deadline)
            self._since = None if base is None else time.monotonic()
        if base is None:
            work.settle()
        else:
            base.set_result(None)
        return True

    def _take_completed(self) -> Any:
        """Take the next future to complete; None if there is none at the moment."""
        held = set[Hashable]()
        for index, (work, base) in enumerate(self._pending):
            if work.line not in held and work.is_completed():
                del self._pending[index]
                return base
            held.add(work.line)
        return None

    def _leader_is_away(self) -> bool:
        if self._leader is None:
            return True
        return self._since is not None and time.monotonic() - self._since > _CALLBACK_SECONDS


_waiter = _Waiter()
stop_waiter = _waiter.stop
