"""The launcher's side of one process on another host.

To the supervisor it looks like a local one: it has pipes with its output, and a descriptor that
becomes readable when the process has ended. The thread of its host (`remote.host`) writes to them
what the agent sends. The thread stops reading from the channel while a pipe is full, so that a slow
console also slows down the processes of other hosts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Protocol

from hvdlite.launch.hosts import Placement
from hvdlite.launch.process import LIVE, RESULT, STDERR, STDOUT, Ending
from hvdlite.launch.remote.messages import Kind, data_frame, frame

LOST = 255  # status of a process when the connection to its host is lost; ssh uses it, too


class ItsHost(Protocol):
    """What a process needs of its host; see `host.RemoteHost`."""

    name: str
    over: bool  # whether nothing more comes from the agent

    def send(self, data: bytes) -> None:
        """Queue a message to the agent."""

    def forget(self, number: int) -> None:
        """Take no more messages about a process."""


class RemoteWorker:
    """One process on another host."""

    # The host's thread calls `write` and `end`, and so does the supervisor's thread, which calls
    # everything else. It owns the write ends of its pipes, and `pidfd`, an eventfd.

    def __init__(
        self, number: int, placement: Placement, host: ItsHost, more: Sequence[int]
    ) -> None:
        """Make the pipes of a process, for the sinks STDOUT, STDERR and `more`."""
        self.placement = placement
        self.number = number
        self.pid = 0  # its process id on its own host; 0 until the agent has told it
        self.ending: Ending | None = None  # as `look` has found it
        self.pidfd = os.eventfd(0, os.EFD_CLOEXEC)
        self._host = host
        self._told: Ending | None = None  # how it ended, as the host's thread says
        self._lost = False
        self._lock = threading.Lock()  # held while the write ends are used
        self._read: dict[int, int] = {}
        self._write: dict[int, int] = {}
        for sink in (STDOUT, STDERR, *more):
            self._read[sink], self._write[sink] = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._write[sink], sink != LIVE)  # Samples make nobody wait.

    @property
    def rank(self) -> int:
        """The rank in the job."""
        return self.placement.rank

    @property
    def host(self) -> str:
        """The name of the host, for messages."""
        return self._host.name

    @property
    def lingers(self) -> bool:
        """Whether the agent has not reported yet that nothing of the job is left on its host."""
        return not self._host.over

    def take_pipes(self) -> dict[int, int]:
        """Hand over the read ends of its output, by sink; the caller owns them."""
        pipes, self._read = self._read, {}
        return pipes

    def look(self) -> Ending | None:
        """Return how the process ended; None while it runs."""
        # Nobody takes it for ended before the supervisor, which calls this, handles its end.
        self.ending = self._told
        return self.ending

    def send_signal(self, number: int) -> None:
        """Have the agent send a signal to the process; SIGKILL goes to its children, too."""
        self._host.send(data_frame(Kind.SIGNAL, self.number, int(number)))

    def reap(self, at_end: bool = False) -> str | None:
        """Have the agent end what the process has left; complain at the job's end if it cannot."""
        self._host.send(frame(Kind.FINISH, self.number))
        self._host.forget(self.number)
        for pipe in self.take_pipes().values():
            os.close(pipe)
        with self._lock:  # A thread that waits for room in a pipe does not: nobody reads it.
            for pipe in self._write.values():
                os.close(pipe)
            self._write = {}
            os.close(self.pidfd)
            self.pidfd = -1
        if not at_end or (self._told is not None and not self._lost):
            return None
        return (
            f"rank {self.number} on {self.host} may still run: the connection is lost; it ends "
            "when the agent there notices"
        )

    def write(self, sink: int, data: bytes) -> None:
        """Pass output on; this blocks while the pipe is full, or drops what is for a view."""
        view = memoryview(data)
        with self._lock:
            try:
                while view and sink in self._write:
                    view = view[os.write(self._write[sink], view) :]
            except OSError:
                pass  # The supervisor has closed the read end, or samples found no room.

    def end(self, ending: Ending, lost: bool = False) -> None:
        """Note how the process ended, and wake the supervisor; later calls do nothing."""
        # `lost` says whether this is a guess, because the connection to its host is lost.
        with self._lock:
            if self._told is None and self.pidfd >= 0:
                self._told, self._lost = ending, lost
                os.eventfd_write(self.pidfd, 1)


def more_sinks(with_result: bool, live: bool) -> list[int]:
    """List the sinks of a process besides STDOUT and STDERR."""
    # `with_result` says whether it returns a result to `hvdlite.run`.
    # `live` says whether there is a view of the job.
    return [RESULT] * with_result + [LIVE] * live
