"""The launcher's side of one other host: its agent's channel, two threads, and its processes.

One thread reads, and one writes, so that a write to a stuck channel holds nobody else up. To the
supervisor a process there looks like a local one: it has pipes with its output, and a descriptor
that becomes readable when the process has ended. The reading thread writes to them what the agent
sends, and stops reading while a pipe is full, so that a slow console also slows these processes.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import hvdlite
from hvdlite.launch.channels import AbsentError, LaunchError, RemoteLauncher, last_line
from hvdlite.launch.hosts import Start
from hvdlite.launch.messages import Frame, FrameReader, Kind, NoFrameError, data_frame, frame
from hvdlite.launch.process import LIVE, RESULT, STDERR, STDOUT, Ending
from hvdlite.rendezvous.deadline import is_never

LOST = 255  # status of a process when the connection to its host is lost; ssh uses it, too
_LONGEST_GOODBYE = 5.0  # seconds that an agent may take to end what is left
_LONGEST_FLUSH = 1.0  # seconds to write what is queued to an agent that is given up
_LONGEST_FRAME = 4 << 20  # the most bytes of a frame that an agent sends
_SINKS = {Kind.OUT: STDOUT, Kind.ERR: STDERR, Kind.RESULT: RESULT, Kind.LIVE: LIVE}


class RemoteHost:
    """The connection to the agent on one other host, and the processes there.

    The loop's thread makes it, because the process of a channel dies with the thread that started
    it, and calls all methods; the host's thread reads what the agent sends once `serve` was called.
    """

    def __init__(self, name: str, remote_launcher: RemoteLauncher) -> None:
        self.name = name
        # The agent's description of its host; empty until it arrives.
        self.hello: dict[str, Any] = {}
        self.ready = False  # whether the agent can start processes
        self.serves = False  # whether the host's thread runs
        self.over = False  # whether nothing more comes from the agent's processes
        self.closing = False  # whether the agent was told that nothing more is started there
        self.busy = False  # whether the host's thread waits for a slow console, not for the agent
        self.workers: dict[int, RemoteWorker] = {}  # the processes of this host, by number
        self.heard_at = time.monotonic()  # the monotonic time of the agent's last message
        # Until when it has to be ready, a monotonic time.
        self.deadline = connect_deadline(remote_launcher)
        # Why the connection has ended.
        self.lost_because = "its agent sent something that is not a message"
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable when `take` has events
        self._remote_launcher = remote_launcher
        self._channel = remote_launcher.open(name)
        self._reader = FrameReader(after_greeting=True, longest=_LONGEST_FRAME)
        self._early: list[Frame] = []  # came before the host's thread ran
        self._events: deque[tuple[Kind, int]] = deque()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._cut_because = ""
        self._closed_well = False
        self._closed = False
        self._settled = threading.Event()  # set when `over` is
        self._thread = threading.Thread(
            target=self._serve, name=f"hvdlite-from-{name}", daemon=True
        )
        self._writer = threading.Thread(
            target=self._write_outbox, name=f"hvdlite-to-{name}", daemon=True
        )
        self._writer.start()

    def fileno(self) -> int:
        return self._channel.read_fd

    def address(self) -> str:
        return self._remote_launcher.host_address(self.name, self.hello)

    # Before the host's thread runs.

    def receive(self) -> None:
        """Read and handle messages of an agent that cannot start processes yet."""
        data = self._read()
        if not data:
            status = self._channel.end()
            raise AbsentError(
                self._remote_launcher.explain(self.name, self._channel.said(), status)
            )
        try:
            for message in self._reader.feed(data):
                self._take_before_start(message)
        except NoFrameError as error:
            raise LaunchError(f"cannot start on host {self.name}: {_disturbed(error)}") from None

    def _read(self) -> bytes:
        try:
            return os.read(self._channel.read_fd, 1 << 18)
        except OSError:
            return b""

    def _take_before_start(self, message: Frame) -> None:
        if message.kind == Kind.HELLO:
            self.hello = message.data()
            if self.hello["version"] != hvdlite.__version__:
                raise LaunchError(
                    f"host {self.name} has hvdlite {self.hello['version']}, this launcher is "
                    f"{hvdlite.__version__}; install the same version on every host"
                )
        elif message.kind == Kind.REFUSED:
            why = message.body.decode(errors="replace")
            raise LaunchError(f"cannot start on host {self.name}: {why}")
        elif message.kind == Kind.CAUGHT:
            number = signal.Signals(int(message.data())).name
            raise LaunchError(f"host {self.name} got {number} before the ranks ran")
        elif message.kind == Kind.READY:
            self.ready = True
        elif message.kind != Kind.ALIVE:
            self._early.append(message)

    def begin(self, part: Mapping[str, Any], stdin: bytes | None) -> None:
        """Give the agent its part of the job; it then checks whether it can start processes."""
        if stdin is not None:
            self.send(frame(Kind.STDIN, body=stdin))
        self.send(data_frame(Kind.PART, 0, dict(part)))

    def serve(self) -> None:
        self.serves = True
        self.heard_at = time.monotonic()
        self._thread.start()

    # What the launcher says.

    def send(self, data: bytes) -> None:
        """Queue a message; the writer's thread writes it, if the connection still exists."""
        self._outbox.put(data)

    def _write_outbox(self) -> None:
        while (data := self._outbox.get()) is not None:
            view = memoryview(data)
            # If the channel is broken, the host's thread notices when it reads.
            with contextlib.suppress(OSError):
                while view:
                    view = view[os.write(self._channel.write_fd, view) :]

    def launch(
        self, start: Start, environment: Mapping[str, str], more: Sequence[int]
    ) -> RemoteWorker:
        """Have the agent start a process, with these sinks besides STDOUT and STDERR."""
        worker = RemoteWorker(start.worker, self, more)
        self.workers[worker.number] = worker
        self.send(data_frame(Kind.START, worker.number, dict(environment)))
        if self.over:  # The host's thread may have ended before it could see this process.
            worker.end(Ending(LOST, by_signal=False, why="lost the connection to its host"), True)
        return worker

    def forget(self, number: int) -> None:
        self.workers.pop(number, None)

    def finish(self) -> None:
        """Tell the agent to end when its processes have, because no other is wanted there."""
        if not self.closing:
            self.closing = True
            self.send(frame(Kind.CLOSE))

    def kill(self) -> None:
        """Tell the agent, after `finish`, to kill what is left there."""
        if self.serves:
            self.send(data_frame(Kind.SIGNAL, 0, int(signal.SIGKILL)))

    # What the agent says, on the host's thread.

    def _serve(self) -> None:
        """Pass the agent's messages on until the connection ends; then all processes have ended."""
        # A process that has not ended by then is reported as lost.
        why = "the launcher's thread for this host failed"
        try:
            for message in self._early:
                self._take(message)
            # An agent that goes on after its processes, to learn how the job ends, may get signals.
            while data := self._read():
                for message in self._reader.feed(data):
                    self._take(message)
            said = self._cut_because or last_line(self._channel.said())
            why = "lost the connection to its host" + (f": {said}" if said else "")
            self.lost_because = why
        except NoFrameError as error:
            why = _disturbed(error)
        finally:
            self._end_workers(why)
            self._tell(Kind.DONE, 0)

    def _take(self, message: Frame) -> None:
        self.busy = True
        worker = self.workers.get(message.number)
        if message.kind == Kind.DONE:
            self._closed_well = True
            self._end_workers("its agent has not told how it ended")
        elif message.kind == Kind.CAUGHT:
            self._tell(Kind.CAUGHT, int(message.data()))
        elif worker is not None and not self.over:
            self._take_about(worker, message)
        self.heard_at = time.monotonic()
        self.busy = False

    def _take_about(self, worker: RemoteWorker, message: Frame) -> None:
        if message.kind in _SINKS:
            worker.write(_SINKS[message.kind], message.body)
        elif message.kind == Kind.STARTED:
            worker.pid = int(message.data())
            self._tell(Kind.STARTED, worker.number)
        elif message.kind == Kind.ENDED:
            ending = message.data()
            if not isinstance(ending, list) or len(ending) != 3:
                raise NoFrameError(repr(ending))
            status, by_signal, oom_killed = ending
            worker.end(Ending(status, by_signal, oom_killed=oom_killed))

    def _end_workers(self, why: str) -> None:
        for worker in list(self.workers.values()):
            worker.end(Ending(LOST, by_signal=False, why=why), lost=not self._closed_well)
        self.over = True
        self._settled.set()

    def _tell(self, kind: Kind, number: int) -> None:
        self._events.append((kind, number))
        os.eventfd_write(self.fd, 1)

    # What the loop asks for.

    def take(self) -> list[tuple[Kind, int]]:
        """Return what happened since the last call, in order.

        STARTED comes with the number of a process, CAUGHT with that of a signal, and DONE when the
        connection has ended.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        return [self._events.popleft() for _ in range(len(self._events))]

    def silent(self, since: float) -> bool:
        return self.serves and not self.over and not self.busy and self.heard_at < since

    def cut(self, why: str) -> None:
        """Give the connection up; its processes then count as lost."""
        self._cut_because = why
        self._channel.cut()

    def settle(self) -> None:
        """Wait until the agent has ended what is left there, at most for seconds."""
        if self.serves and not self._settled.wait(_LONGEST_GOODBYE):
            self._channel.cut()
            self._settled.wait(_LONGEST_GOODBYE)

    def close(self) -> None:
        """End the channel, once the agent has ended what is left there; at most after seconds."""
        if self._closed:
            return
        self._closed = True
        self._outbox.put(None)
        if self.serves:
            self._thread.join(_LONGEST_GOODBYE)
        if not self._closed_well:
            self._writer.join(_LONGEST_FLUSH)  # What was sent last may tell why the job ends.
            self._channel.cut()
        self._writer.join(_LONGEST_GOODBYE)
        if not (self._thread.is_alive() or self._writer.is_alive()):
            self._channel.hang_up()
            os.close(self.fd)
        self._channel.end()


def connect_deadline(remote_launcher: RemoteLauncher) -> float:
    """Return until when a host that is connected to now has to answer; monotonic, in seconds."""
    seconds = remote_launcher.connect_seconds
    return math.inf if is_never(seconds) else time.monotonic() + seconds + 5


def _disturbed(error: NoFrameError) -> str:
    return f"something besides hvdlite's agent writes to its stdout there: {error}; redirect it"


class RemoteWorker:
    """One process on another host, with the public methods of `process.Worker`."""

    # The host's thread calls `write` and `end`, and so does the supervisor's thread, which calls
    # everything else. It owns the write ends of its pipes, and `pidfd`, an eventfd.

    def __init__(self, number: int, host: RemoteHost, more: Sequence[int]) -> None:
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
    def host(self) -> str:
        return self._host.name

    @property
    def lingers(self) -> bool:
        """Whether the agent has not reported yet that nothing of the job is left on its host."""
        return not self._host.over

    def take_pipes(self) -> dict[int, int]:
        pipes, self._read = self._read, {}
        return pipes

    def look(self) -> Ending | None:
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
        # It fails if the supervisor has closed the read end, or samples find no room.
        with self._lock, contextlib.suppress(OSError):
            while view and sink in self._write:
                view = view[os.write(self._write[sink], view) :]

    def end(self, ending: Ending, lost: bool = False) -> None:
        """Note how the process ended, and wake the supervisor; later calls do nothing."""
        # `lost` says whether this is a guess, because the connection to its host is lost.
        with self._lock:
            if self._told is None and self.pidfd >= 0:
                self._told, self._lost = ending, lost
                os.eventfd_write(self.pidfd, 1)
