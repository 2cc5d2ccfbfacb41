"""The handles that asynchronous collectives return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdlite import _core
from hvdlite.torch.collectives.submit import Submission
from hvdlite.torch.dynamo import outside_graphs

Core = Submission | _core.Handle  # It is the latter if no tensor is on a GPU.


class Handle:
    """A collective in flight: `poll` it, and `synchronize` it for the result.

    The asynchronous functions return handles; scripts do not make them. A handle keeps the tensors
    of its collective alive.

    Args:
        core: the core's handle of the collective.
        finish: makes the result of what the core returns.

    Example:
        >>> handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
        >>> total = handle.wait()
    """

    __slots__ = ("_core", "_finish", "_result")

    def __init__(self, core: Core, finish: Callable[[Any], Any]) -> None:
        self._core = core
        self._finish: Callable[[Any], Any] | None = finish
        self._result: Any = None

    def done(self) -> bool:
        """Return whether the collective has completed, successfully or with an error."""
        return self._core.done()

    def wait(self) -> Any:
        """Block until the collective has completed; return the same result at every call."""
        self._core.wait()
        if self._finish is not None:
            self._result = self._finish(self._core)
            self._finish = None
        return self._result

    def then(self, change: Callable[[Any], Any]) -> Handle:
        """Return a handle of the same collective whose result is `change(result)`."""
        return Handle(self._core, lambda _: change(self.wait()))

    def first(self) -> Handle:
        """Return a handle of the same collective whose result is the first one of its list."""
        return self.then(lambda results: results[0])


@outside_graphs
def poll(handle: Handle) -> bool:
    """Return whether an asynchronous collective has completed, so that `synchronize` is immediate.

    Args:
        handle: what an asynchronous function returned.

    Example:
        >>> handle = hvd.allreduce_async(torch.ones(2))
        >>> while not hvd.poll(handle):
        ...     ...  # something else
    """
    return handle.done()


@outside_graphs
def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous collective and return its result.

    Args:
        handle: what an asynchronous function returned.

    Returns:
        A tensor; for grouped collectives a list of tensors. In-place collectives return the tensors
        that they were given.

    Raises:
        HvdliteError: the collective failed.

    Example:
        >>> total = hvd.synchronize(hvd.allreduce_async(torch.ones(2), op=hvd.Sum))
    """
    return handle.wait()
