"""How the tasks of a job learn that a rank of another task has failed.

Every task has a *line*, which is a connection to rank 0's task, the *hub*. A task whose rank is
done says so on its line and closes it. A line that is closed without a word is the alarm: that
task's rank failed, or the task was killed. The hub then closes all lines, so all tasks get the
alarm, and end their ranks, even those that do not call hvdlite at all.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from hvdlite.rendezvous.acceptor import Acceptor
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.dial import reach
from hvdlite.rendezvous.handshake import Job, Role, ServerHandshake

_DONE = b"d"


class Hub:
    """Rank 0's side; a part of the loop of its task."""

    # The other tasks connect to `listener`, which the hub owns.
    # The owner of `selector` calls the key's data for each event, and `expire` regularly.
    # `rang` is called once, when a rank of another task has failed.

    def __init__(
        self,
        listener: socket.socket,
        job: Job,
        size: int,
        selector: selectors.BaseSelector,
        rang: Callable[[], None],
    ) -> None:
        self._selector = selector
        self._rang = rang
        self._lines: dict[int, socket.socket] = {}
        self._expected = set(range(1, size))
        self._over = False
        self._acceptor = Acceptor(listener, job, size, selector, self._welcome)

    @property
    def waits(self) -> bool:
        """Whether ranks of other tasks run, so that this task has to stay."""
        return bool(self._expected) and not self._over

    def done(self) -> None:
        """Note that this task's rank is done; the hub waits for the others."""

    def ring(self) -> None:
        """Tell all tasks that this task's rank has failed."""
        self._over = True
        for line in self._lines.values():
            self._drop(line)
        self._lines.clear()

    def expire(self) -> None:
        """Drop strangers that take too long."""
        self._acceptor.expire()

    def close(self) -> None:
        """Close everything."""
        self.ring()
        self._acceptor.close()

    def _welcome(self, line: socket.socket, handshake: ServerHandshake) -> None:
        rank = handshake.rank
        if self._over or handshake.role != Role.CONTROL or rank not in self._expected:
            line.close()
            return
        line.setblocking(False)
        self._lines[rank] = line
        self._selector.register(line, selectors.EVENT_READ, lambda: self._hear(rank))

    def _hear(self, rank: int) -> None:
        line = self._lines.pop(rank)
        said = _received(line)
        self._drop(line)
        if said == _DONE:
            self._expected.discard(rank)
        elif not self._over:
            self.ring()
            self._rang()

    def _drop(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        line.close()


class Line:
    """The side of every other rank; a part of the loop of its task."""

    # `rang` is called once, when a rank of another task has failed.
    # `deadline` limits the time until the hub answers.
    # Raises BootstrapError if the hub cannot be reached.

    waits = False  # Only the hub has to stay for the others.

    def __init__(
        self,
        address: str,
        job: Job,
        rank: int,
        selector: selectors.BaseSelector,
        rang: Callable[[], None],
        deadline: Deadline,
    ) -> None:
        self._selector = selector
        self._rang = rang
        self._line, _ = reach("rank 0's task", address, job, rank, Role.CONTROL, deadline)
        self._open = True
        selector.register(self._line, selectors.EVENT_READ, self._hear)

    def done(self) -> None:
        """Tell the hub that this task's rank is done."""
        if self._open:
            try:
                self._line.send(_DONE)
            except OSError:
                pass  # The hub has gone, because a rank has failed.
            self.close()

    def ring(self) -> None:
        """Tell all tasks that this task's rank has failed."""
        self.close()

    def expire(self) -> None:
        """Do nothing: no stranger connects here."""

    def close(self) -> None:
        """Close the line; without `done` before, this is the alarm."""
        if self._open:
            self._open = False
            self._selector.unregister(self._line)
            self._line.close()

    def _hear(self) -> None:
        self.close()
        self._rang()


def _received(line: socket.socket) -> bytes:
    try:
        return line.recv(len(_DONE))
    except OSError:
        return b""
