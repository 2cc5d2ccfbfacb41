"""The steward thread by itself, without a registrar."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hvdlite import _core
from hvdlite.bootstrap.connect import Connection
from hvdlite.bootstrap.environment import WorkerEnvironment
from hvdlite.elastic import epochs
from hvdlite.elastic.steward import Steward
from hvdlite.errors import BootstrapError


def test_training_thread_is_told_when_the_steward_fails() -> None:
    def follow(
        connection: Connection,
        epoch: int,
        lobby: _core.Lobby,
        rank_of: Sequence[int],
        resumes: bool,
    ) -> _core.Engine | None:
        raise OSError("no memory for a segment")

    steward = Steward(WorkerEnvironment(elastic=True, joiner=True), {}, follow)
    steward._connect = lambda message, members: Connection()  # type: ignore[method-assign]
    steward._inbox.put(
        {"kind": "epoch", "epoch": 1, "members": [[0, {}]], "mode": "boundary", "reason": ""}
    )
    steward._thread.start()
    steward._thread.join(10)
    epochs.forget()
    assert not steward._thread.is_alive()
    assert steward._over is not None  # else the next line would wait for ever
    with pytest.raises(BootstrapError, match="its steward failed: OSError.*no memory"):
        steward.enter(restored=False)
