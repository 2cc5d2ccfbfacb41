"""What an operation of a process group returns: a `Work` to wait for, and its future."""

from __future__ import annotations

import collections
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from hvdlite import _core
from hvdlite.bootstrap.deadline import seconds_of
from hvdlite.errors import HvdliteError

# Copies the results of a completed operation to where the caller wants them.
Finish = Callable[[_core.Handle], None]

_UNSET = timedelta(0)
_SLICE_SECONDS = 0.005  # how long the waiter waits for one operation before it looks at the others


class Work(distributed.Work):  # type: ignore[misc]
    """An operation in flight. Any thread may wait for it.

    Args:
        handle: of the engine.
        outputs: the tensors that the operation writes, which are the value of the future.
        finish: copies the results to where the caller wants them; None if they are there.
        seconds: how long `wait` waits by default.
        give_up: called when that time has passed; raises.
    """

    def __init__(
        self,
        handle: _core.Handle,
        outputs: Sequence[torch.Tensor],
        finish: Finish | None,
        seconds: float,
        give_up: Callable[[float], None],
    ) -> None:
        super().__init__()
        self._handle = handle
        self._outputs = outputs
        self._finish = finish
        self._finishing = threading.Lock() if finish is not None else None
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._give_up = give_up
        self._future: Any = None

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Block until the operation has completed, and return True.

        Raises:
            HvdliteError: the operation failed.
            CollectiveTimeoutError: `timeout`, or that of the process group, passed first.
        """
        seconds = seconds_of(timeout) if timeout else self._seconds
        try:
            self._handle.wait(seconds, fatal=True)
        except TimeoutError:
            if not self._handle.done():
                self._give_up(seconds)
            self._handle.wait()  # It ended at the last moment, or itself failed by a timeout.
        if self._finishing is not None:
            with self._finishing:
                finish, self._finish = self._finish, None
                if finish is not None:
                    finish(self._handle)
        return True

    def settle(self, seconds: float = math.inf) -> None:
        """Block until the operation has completed, well or not, but not longer than `seconds`.

        When the time of the process group has passed, this ends its world.
        """
        left = self._deadline - time.monotonic()
        try:
            self._handle.wait(max(0.0, min(seconds, left)))
        except TimeoutError:
            if left < seconds and not self._handle.done():
                with contextlib.suppress(HvdliteError):  # The waiting thread gets it, too.
                    self._give_up(self._seconds)
        except HvdliteError:
            pass  # The waiting thread gets it.

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has completed, successfully or with an error."""
        return self._handle.done()

    def is_success(self) -> bool:
        """Return whether the operation has completed without an error."""
        return self._handle.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of a completed operation, or None."""
        if self._handle.done():
            try:
                self.wait()
            except Exception as error:
                return error
        return None

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors that were written."""
        self.wait()
        return list(self._outputs)

    def get_future(self) -> Any:
        """Return a future, whose value is the list of tensors that were written.

        `Future.set_exception` would end a DistributedDataParallel in a segmentation fault: its C++
        code reads the value without a look at the error. A callback that raises makes a future
        that C++ does look at.
        """
        if self._future is None:
            base: Any = torch.futures.Future()
            self._future = base.then(self._give)
            _waiter.watch(self, base)
        return self._future

    def _give(self, _: Any) -> list[torch.Tensor]:
        self.wait()
        return list(self._outputs)


class _Waiter:
    """A thread that completes the futures of this process's operations.

    Operations of one process group complete about in their order, and those of different groups in
    any order. So the thread waits for the oldest operation, but never long.
    """

    def __init__(self) -> None:
        self._pending: collections.deque[tuple[Work, Any]] = collections.deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def watch(self, work: Work, base: Any) -> None:
        """Complete `base` when the operation has completed."""
        if threading.current_thread() is self._thread:
            # A callback of a future may wait for the next one, which this thread would complete.
            work.settle()
            base.set_result(None)
            return
        with self._changed:
            self._pending.append((work, base))
            if self._thread is None:
                self._stopped = False
                self._thread = threading.Thread(
                    target=self._run, name="hvdlite-futures", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def stop(self) -> None:
        """End the thread; called when all engines have been shut down, so that nothing is left."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while (oldest := self._oldest()) is not None:
            oldest.settle(_SLICE_SECONDS)
            for base in self._take_completed():
                base.set_result(None)

    def _oldest(self) -> Work | None:
        with self._changed:
            while not self._pending:
                if self._stopped:
                    return None
                self._changed.wait()
            return self._pending[0][0]

    def _take_completed(self) -> list[Any]:
        completed, left = [], collections.deque[tuple[Work, Any]]()
        with self._changed:
            for work, base in self._pending:
                if work.is_completed():
                    completed.append(base)
                else:
                    left.append((work, base))
            self._pending = left
        return completed


_waiter = _Waiter()
stop_waiter = _waiter.stop
