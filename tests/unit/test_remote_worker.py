"""A process on another host, as the supervisor sees it."""

from __future__ import annotations

import os
import select

from hvdlite.launch.process import Ending
from hvdlite.launch.remote_host import RemoteWorker


class ItsHost:
    """A host that takes all messages."""

    name = "far"
    over = False

    def send(self, data: bytes) -> None:
        pass

    def forget(self, number: int) -> None:
        pass


def test_process_has_not_ended_before_its_supervisor_looks() -> None:
    """The thread of its host hears of the end earlier; the job is not over before it is handled."""
    worker = RemoteWorker(3, ItsHost(), [])
    for pipe in worker.take_pipes().values():
        os.close(pipe)
    assert worker.look() is None
    ending = Ending(7, by_signal=False)
    worker.end(ending)
    worker.end(Ending(8, by_signal=False))
    assert select.select([worker.pidfd], [], [], 0)[0]
    before = worker.ending
    assert (before, worker.look(), worker.ending) == (None, ending, ending)
    assert worker.reap(at_end=True) is None
