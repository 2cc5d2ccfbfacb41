"""The tasks of a job learn that a rank has failed: `hvdlite.spark.task`."""

from __future__ import annotations

import secrets
import selectors
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.address import address_of, fresh_unix_address, listen
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import Job
from hvdlite.spark.task import Alarm
from patience import HANG


class Tasks:
    """Rank 0's task and those of the other ranks, each with a selector of its own."""

    def __init__(self, size: int) -> None:
        self.job = Job(secrets.token_bytes(32), secrets.token_bytes(16), epoch=0)
        self.selectors = [selectors.DefaultSelector() for _ in range(size)]
        self.rung: list[int] = []
        listener = listen(fresh_unix_address())
        self.address = address_of(listener)
        self.hub = Alarm(self.selectors[0], lambda: self.rung.append(0))
        self.hub.listen(listener, self.job, size)
        self.lines = [self.connect(rank) for rank in range(1, size)]

    def connect(self, rank: int, job: Job | None = None) -> Alarm:
        """Connect a task, while the loop of rank 0's task runs."""
        found: list[Alarm | BootstrapError] = []

        def dial() -> None:
            try:
                line = Alarm(self.selectors[rank], lambda: self.rung.append(rank))
                line.connect(self.address, job or self.job, rank, Deadline(HANG))
                found.append(line)
            except BootstrapError as error:
                found.append(error)

        thread = threading.Thread(target=dial)
        thread.start()
        self.turn(lambda: bool(found))
        thread.join()
        if isinstance(found[0], BootstrapError):
            raise found[0]
        return found[0]

    def turn(self, until: Callable[[], bool]) -> None:
        """Run all loops until something is so."""
        deadline = time.monotonic() + HANG
        while not until():
            assert time.monotonic() < deadline
            for selector in self.selectors:
                if selector.get_map():
                    for key, _ in selector.select(0.01):
                        key.data()

    def close(self) -> None:
        self.hub.close()
        for line in self.lines:
            line.close()
        for selector in self.selectors:
            assert not selector.get_map()
            selector.close()


@pytest.fixture
def tasks() -> Iterator[Tasks]:
    made = Tasks(4)
    yield made
    made.close()


def test_hub_stays_until_all_ranks_are_done(tasks: Tasks) -> None:
    tasks.hub.done()
    assert tasks.hub.waits
    for line in tasks.lines:
        assert tasks.hub.waits and not line.waits
        line.done()
    tasks.turn(lambda: not tasks.hub.waits)
    assert tasks.rung == []


def test_all_tasks_learn_that_a_rank_has_failed(tasks: Tasks) -> None:
    tasks.lines[0].done()
    tasks.lines[1].ring()
    tasks.turn(lambda: len(tasks.rung) == 2)
    assert sorted(tasks.rung) == [0, 3]  # Rank 1 is done, and rank 2 knows.
    assert not tasks.hub.waits


def test_all_tasks_learn_that_rank_0_has_failed(tasks: Tasks) -> None:
    tasks.hub.ring()
    tasks.turn(lambda: len(tasks.rung) == 3)
    assert sorted(tasks.rung) == [1, 2, 3]


def test_strangers_change_nothing(tasks: Tasks) -> None:
    other = Job(secrets.token_bytes(32), tasks.job.job_id, epoch=0)
    with pytest.raises(BootstrapError):
        tasks.connect(1, other)
    assert tasks.rung == [] and tasks.hub.waits


def test_done_is_said_once_and_also_after_the_end(tasks: Tasks) -> None:
    for line in tasks.lines:
        line.done()
        line.done()
    tasks.turn(lambda: not tasks.hub.waits)
    tasks.hub.ring()
    assert tasks.rung == []
