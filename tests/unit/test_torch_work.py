"""What waits for an operation of a process group learns how the operation ended."""

from __future__ import annotations

from typing import Any

import pytest

from hvdlite.errors import CollectiveTimeoutError, RankFailedError
from hvdlite.torch.distributed.work import Work


class LastMoment:
    """A handle whose operation ends at the very end of the first wait for it."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self._ended = False

    def wait(self, seconds: float | None = None, fatal: bool = False) -> None:
        if not self._ended:
            self._ended = True
            raise TimeoutError("allreduce 'x' is still under way")
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._ended


def give_up() -> None:
    raise AssertionError("gave up")


def make_work(error: Exception | None) -> Work:
    handle: Any = LastMoment(error)
    return Work(handle, [], None, 1.0, give_up)


@pytest.mark.parametrize("error", [RankFailedError("rank 1 died"), CollectiveTimeoutError("late")])
def test_the_error_of_an_operation_that_fails_when_the_time_is_up(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        make_work(error).wait()


def test_an_operation_that_ends_well_when_the_time_is_up() -> None:
    assert make_work(None).wait()
