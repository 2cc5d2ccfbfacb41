"""Names of the backend's operations: they repeat, and what has ended is forgotten."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from hvdlite.torch.distributed.submission import SLOTS, Numbering


class Operation:
    """An operation that ends when it is told to."""

    def __init__(self, ended: bool) -> None:
        self.ended = ended

    def done(self) -> bool:
        return self.ended

    def wait(self, seconds: float | None) -> None:
        if not self.ended:
            raise TimeoutError


def start(numbering: Numbering, signature: str, ended: bool = True) -> Any:
    operation: Any = Operation(ended)
    numbering.note(numbering.next(signature, seconds=0.0).text, operation)
    return operation


def test_names_repeat_by_signature() -> None:
    numbering = Numbering()
    names = [numbering.next("a").text for _ in range(SLOTS + 1)]
    assert len(set(names)) == SLOTS
    assert names[0] == names[SLOTS]
    assert numbering.next("b").text not in names


def test_a_name_in_flight_is_waited_for() -> None:
    numbering = Numbering()
    for _ in range(SLOTS):
        start(numbering, "a", ended=False)
    numbering.next("b", seconds=0.0)
    with pytest.raises(TimeoutError):
        numbering.next("a", seconds=0.0)


def test_transfers_have_names_without_limit() -> None:
    numbering = Numbering()
    names = {numbering.next_of_pair("send.0.1.7") for _ in range(1000)}
    assert len(names) == 1000
    assert all(name.startswith("#send.0.1.7#") for name in names)  # The cache does not keep them.


def test_operations_that_have_ended_are_forgotten() -> None:
    numbering = Numbering()
    running = [start(numbering, f"running {i}", ended=False) for i in range(3)]
    ended = [weakref.ref(start(numbering, f"ended {i}")) for i in range(10_000)]
    assert sum(one() is not None for one in ended) <= 8
    for one, signature in zip(running, ("running 0", "running 1", "running 2"), strict=True):
        for _ in range(SLOTS - 1):
            numbering.next(signature, seconds=0.0)
        with pytest.raises(TimeoutError):
            numbering.next(signature, seconds=0.0)
        assert not one.done()
