"""The membership thread by itself, without a registrar."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hvdlite import _core
from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.connection import Connection
from hvdlite.rendezvous.environment import WorkerEnvironment
from hvdlite.rendezvous.membership import MembershipThread
from unit.elastic.job_model import forget_epochs


def test_training_thread_is_told_when_the_membership_thread_fails() -> None:
    def follow(
        connection: Connection,
        epoch: int,
        pending: _core.PendingOperations,
        rank_of: Sequence[int],
        resumes: bool,
    ) -> _core.Engine | None:
        raise OSError("no memory for a segment")

    worker = WorkerEnvironment(elastic=True, joiner=True)
    member = MembershipThread(worker, {}, follow, stay=lambda: None)
    member._connect = lambda message, members: Connection()  # type: ignore[method-assign]
    member._inbox.put(
        {"kind": "epoch", "epoch": 1, "members": [[0, {}]], "mode": "boundary", "reason": ""}
    )
    member._thread.start()
    member._thread.join(10)
    forget_epochs()
    assert not member._thread.is_alive()
    assert member._over is not None  # else the next line would wait for ever
    with pytest.raises(BootstrapError, match="its membership thread failed: OSError.*no memory"):
        member.enter(restored=False)
