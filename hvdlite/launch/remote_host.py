"""The launcher's side of one other host: the channel to its agent, and the host's processes.

To the supervisor a process there looks like a local one. `agents` receives what the agents say.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import hvdlite
from hvdlite.launch.channels import AbsentError, LaunchError, RemoteLauncher, last_line
from hvdlite.launch.hosts import Start
from hvdlite.launch.messages import (
    Frame,
    FrameChannel,
    FrameReader,
    Kind,
    NoFrameError,
    data_frame,
    frame,
)
from hvdlite.launch.process import STDERR, STDOUT, Ending
from hvdlite.rendezvous.deadline import is_never

_LONGEST_FLUSH = 1.0  # seconds to write what is queued to an agent that is given up
_LONGEST_FRAME = 4 << 20  # the most bytes of a frame that an agent sends


class RemoteHost:
    """The connection to the agent on one other host, and the processes there.

    The loop's thread makes it, because the process of a channel dies with the thread that started
    it, and calls all methods.
    """

    def __init__(self, name: str, remote_launcher: RemoteLauncher) -> None:
        self.name = name
        # The agent's description of its host; empty until it arrives.
        self.hello: dict[str, Any] = {}
        self.ready = False  # whether the agent can start processes
        self.over = False  # whether nothing more comes from the agent's processes
        self.closing = False  # whether the agent was told that nothing more is started there
        self.closed_well = False  # whether the agent has said that nothing is left there
        self.workers: dict[int, RemoteWorker] = {}  # the processes of this host, by number
        # Until when it has to be ready, a monotonic time.
        self.deadline = connect_deadline(remote_launcher)
        self._remote_launcher = remote_launcher
        self._channel = remote_launcher.open(name)
        self.frames = FrameChannel(
            self._channel.read_fd,
            self._channel.write_fd,
            FrameReader(after_greeting=True, longest=_LONGEST_FRAME),
        )
        self._cut_because = ""

    def address(self) -> str:
        return self._remote_launcher.host_address(self.name, self.hello)

    def receive(self) -> list[Frame]:
        """Return what the agent has said.

        Raises:
            AbsentError: the connection has ended before the agent was ready.
            LaunchError: it has ended later.
            NoFrameError: something that is not a message has come; see `disturbed`.
        """
        self.frames.flush()
        messages = self.frames.receive()
        if not self.frames.gone:
            return messages
        if not self.ready:
            status = self._channel.end()
            raise AbsentError(
                self._remote_launcher.explain(self.name, self._channel.said(), status)
            )
        said = self._cut_because or last_line(self._channel.said())
        raise LaunchError("lost the connection to its host" + (f": {said}" if said else ""))

    def disturbed(self, error: NoFrameError) -> LaunchError:
        why = f"something besides hvdlite's agent writes to its stdout there: {error}; redirect it"
        return LaunchError(why if self.ready else f"cannot start on host {self.name}: {why}")

    def greeted(self, hello: dict[str, Any]) -> None:
        """Note the agent's description of its host; LaunchError for another version of hvdlite."""
        self.hello = hello
        if hello["version"] != hvdlite.__version__:
            raise LaunchError(
                f"host {self.name} has hvdlite {hello['version']}, this launcher is "
                f"{hvdlite.__version__}; install the same version on every host"
            )

    def send(self, data: bytes) -> None:
        """Queue a message, if the connection still exists."""
        self.frames.send(data)

    def begin(self, part: Mapping[str, Any], stdin: bytes | None) -> None:
        """Give the agent its part of the job; it then checks whether it can start processes."""
        if stdin is not None:
            self.send(frame(Kind.STDIN, body=stdin))
        self.send(data_frame(Kind.PART, 0, dict(part)))

    def launch(
        self, start: Start, environment: Mapping[str, str], more: Sequence[int]
    ) -> RemoteWorker:
        """Have the agent start a process, with these sinks besides STDOUT and STDERR."""
        worker = RemoteWorker(start.worker, self, more)
        self.workers[worker.number] = worker
        self.send(data_frame(Kind.START, worker.number, dict(environment)))
        return worker

    def finish(self) -> None:
        """Tell the agent to end when its processes have, because no other is wanted there."""
        if not self.closing:
            self.closing = True
            self.send(frame(Kind.CLOSE))

    def cut(self, why: str) -> None:
        """Give the connection up; its processes then count as lost."""
        self._cut_because = why
        self._channel.cut()

    def close(self) -> None:
        """End the channel; this may take seconds."""
        self.frames.drain(_LONGEST_FLUSH)  # What was sent last may tell why the job ends.
        if not self.closed_well:
            self._channel.cut()
        self._channel.hang_up()
        self._channel.end()


def connect_deadline(remote_launcher: RemoteLauncher) -> float:
    """Return until when a host that is connected to now has to answer; monotonic, in seconds."""
    seconds = remote_launcher.connect_seconds
    return math.inf if is_never(seconds) else time.monotonic() + seconds + 5


class RemoteWorker:
    """One process on another host, with the public methods of `process.Worker`."""

    def __init__(self, number: int, host: RemoteHost, more: Sequence[int]) -> None:
        self.number = number
        self.pid = 0  # its process id on its own host; 0 until the agent has told it
        self.ending: Ending | None = None
        self.lost = False  # whether its end is a guess, because the connection is lost
        self._host = host
        self._sinks = (STDOUT, STDERR, *more)

    @property
    def host(self) -> str:
        return self._host.name

    @property
    def lingers(self) -> bool:
        """Whether the agent has not reported yet that nothing of the job is left on its host."""
        return not self._host.over

    def take_pipes(self) -> dict[int, None]:
        """Return the sinks of its output, which comes without pipes."""
        return dict.fromkeys(self._sinks)

    def send_signal(self, number: int) -> None:
        """Have the agent send a signal to the process; SIGKILL goes to its children, too."""
        self._host.send(data_frame(Kind.SIGNAL, self.number, int(number)))

    def reap(self, at_end: bool = False) -> str | None:
        """Have the agent end what the process has left; complain at the job's end if it cannot."""
        self._host.send(frame(Kind.FINISH, self.number))
        self._host.workers.pop(self.number, None)
        if not at_end or (self.ending is not None and not self.lost):
            return None
        return (
            f"rank {self.number} on {self.host} may still run: the connection is lost; it ends "
            "when the agent there notices"
        )
