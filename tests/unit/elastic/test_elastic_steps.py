"""The steps of a worker: what is kept of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hvdlite.elastic import epochs, steps
from hvdlite.elastic.epochs import MOST_KEPT, Epoch
from hvdlite.errors import ArgumentError


@pytest.fixture(autouse=True)
def nothing_before() -> Iterator[None]:
    yield
    steps.forget()
    epochs.forget()


def test_steps_of_long_ago_take_no_memory_and_have_no_known_epoch() -> None:
    last = 3 * MOST_KEPT
    for number in range(last + 1):
        epochs.record(Epoch(number, workers=(0,), worker=0, reason="a test"))
        steps.committed(number)
        steps.committed(number)
    assert len(steps._epochs) == MOST_KEPT + 1
    oldest = last - MOST_KEPT + 1
    for number in (oldest, last):
        assert {steps.epoch_of(2 * number + 1), steps.epoch_of(2 * number + 2)} == {number}
    assert steps.epoch_of(2 * last + 3) is None
    for step in (1, 2 * oldest):
        found = steps.epoch_of(step)
        assert found is not None
        with pytest.raises(ArgumentError, match="was not a member of epoch"):
            epochs.find(found)
