"""The launcher's side of other hosts: for each, a line to its agent (see `ways`).

To the supervisor, a rank of another host looks like a local one: it has pipes with its output, and
a descriptor that becomes readable when the rank has ended. A thread for each host writes to them
what the agent sends. The thread stops reading from the line while a pipe is full, so that a slow
console also slows down the ranks of other hosts.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import hvdlite
from hvdlite.launch.process.ending import Ending
from hvdlite.launch.process.inbox import SignalInbox
from hvdlite.launch.process.placement import Placement
from hvdlite.launch.process.sinks import LIVE, RESULT, STDERR, STDOUT
from hvdlite.launch.remote.messages import Frame, FrameReader, Kind, NoFrameError, data_frame, frame
from hvdlite.launch.remote.ways import Way, last_line
from hvdlite.rendezvous.deadline import is_never

ALIVE_SECONDS = 3.0  # between messages that tell an agent that the launcher is alive
_LONGEST_GOODBYE = 5.0  # seconds that an agent may take to end what is left
_LONGEST_FRAME = 4 << 20  # the most bytes of a frame that an agent sends
_LONGEST_SLEEP = 3600.0
LOST = 255  # status of a rank when the connection to its host is lost; ssh uses it, too
_SINKS = {Kind.OUT: STDOUT, Kind.ERR: STDERR, Kind.RESULT: RESULT, Kind.LIVE: LIVE}


class LaunchError(OSError):
    """The job cannot run on a host; the message says which host, why, and what to do."""


class AbsentError(LaunchError):
    """A host cannot be reached, or has not answered in time."""


def _disturbed(error: NoFrameError) -> str:
    return f"something besides hvdlite's agent writes to its stdout there: {error}"


class RemoteWorker:
    """One rank on another host.

    The host's thread calls `write`, `end` and `close_output`; the supervisor's thread calls
    everything else. It owns the write ends of its pipes, and `pidfd`, an eventfd.
    """

    def __init__(self, placement: Placement, remote: RemoteHost, more: Sequence[int]) -> None:
        """Make the pipes of a rank.

        Args:
            placement: the rank and where it runs.
            remote: its host.
            more: the sinks besides STDOUT and STDERR: RESULT, LIVE.
        """
        self.placement = placement
        self.number = placement.rank
        self.pid = 0  # on its own host
        self.ending: Ending | None = None
        self.pidfd = os.eventfd(0, os.EFD_CLOEXEC)
        self._remote = remote
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
        return self._remote.name

    @property
    def group(self) -> int:
        """The process group that has to die with the launcher: that of the line; 0 without one."""
        return self._remote.group

    @property
    def lingers(self) -> bool:
        """Whether the agent has not reported yet that nothing of the job is left on its host."""
        return not self._remote.over

    def take_pipes(self) -> dict[int, int]:
        """Hand over the read ends of its output, by sink; the caller owns them."""
        pipes, self._read = self._read, {}
        return pipes

    def look(self) -> Ending | None:
        """Return how the rank ended; None while it runs."""
        return self.ending

    def signal_group(self, number: int) -> None:
        """Tell the agent to send a signal to the rank and its children."""
        self._remote.send(data_frame(Kind.SIGNAL, self.rank, int(number)))

    def reap(self) -> str | None:
        """Wait for the agent to confirm that nothing is left there; complain if it does not."""
        for pipe in self.take_pipes().values():
            os.close(pipe)
        confirmed = self._remote.confirmed()
        os.close(self.pidfd)
        if confirmed:
            return None
        return (
            f"rank {self.rank} on {self.host} may still run: the connection is lost; it ends when "
            "the agent there notices, within half a minute"
        )

    def write(self, sink: int, data: bytes) -> None:
        """Pass output on; this blocks while the pipe is full, or drops what is for a view."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._write[sink], view) :]
        except OSError:
            pass  # The supervisor has closed the read end, or samples found no room.

    def end(self, ending: Ending) -> None:
        """Note how the rank ended, and wake the supervisor; later calls do nothing."""
        if self.ending is None:
            self.ending = ending
            os.eventfd_write(self.pidfd, 1)

    def close_output(self) -> None:
        """Close the pipes: neither the rank nor a process that it left will write any more."""
        for pipe in self._write.values():
            os.close(pipe)
        self._write = {}


def more_sinks(with_result: bool, live: bool) -> list[int]:
    """List the sinks of a rank besides STDOUT and STDERR.

    Args:
        with_result: whether it returns a result to `hvdlite.run`.
        live: whether there is a view of the job.
    """
    return [RESULT] * with_result + [LIVE] * live


class RemoteHost:
    """One other host: the line to its agent, and its ranks.

    Until `serve` starts the host's thread, only the launcher's thread uses this object. Afterwards
    the launcher's threads use only `send`, `over` and `close`.

    Attributes:
        hello: the agent's description of its host; empty until it arrives.
        workers: the ranks of this host, by rank.
        over: whether nothing more comes from the agent.
    """

    def __init__(self, name: str, way: Way, tell: Callable[[str, int], None] | None = None) -> None:
        """Begin to connect to the host's agent.

        Args:
            name: the name of the host.
            way: how its agent is reached.
            tell: takes the name of the host, and a signal that its agent got.
        """
        self.name = name
        self._tell_signal = tell
        self.hello: dict[str, Any] = {}
        self.workers: dict[int, RemoteWorker] = {}
        self.over = False
        self._way = way
        self._reader = FrameReader(after_greeting=True, longest=_LONGEST_FRAME)
        self._frames: list[Frame] = []
        self._line = way.open(name)
        self._sending = threading.Lock()
        self._thread = threading.Thread(
            target=self._serve, name=f"hvdlite-host-{name}", daemon=True
        )
        self._closed_well = False
        self._settled = threading.Event()  # whether nothing more comes from the agent's ranks
        self._closed: bool | None = None

    @property
    def group(self) -> int:
        """The process group here that has to die with the launcher; 0 if there is none."""
        return self._line.pid or 0

    def fileno(self) -> int:
        """Return the descriptor that is readable when the agent has sent something."""
        return self._line.read_fd

    def address(self) -> str:
        """Return the host's IP address, once its agent has said hello."""
        return self._way.address(self.name, self.hello)

    def receive(self) -> None:
        """Read and handle messages of the agent; they change `hello` and `started`.

        Raises:
            AbsentError: the host cannot be reached.
            LaunchError: the agent refuses, or it has another version of hvdlite.
        """
        data = self._read()
        if not data:
            status = self._line.end()
            raise AbsentError(self._way.explain(self.name, self._line.said(), status))
        try:
            for message in self._reader.feed(data):
                self._take_before_start(message)
        except NoFrameError as error:
            raise LaunchError(f"cannot start on host {self.name}: {_disturbed(error)}") from None

    def _read(self) -> bytes:
        """Read what the agent has sent; nothing if the line is broken."""
        try:
            return os.read(self._line.read_fd, 1 << 18)
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
        else:
            if message.kind == Kind.STARTED:
                self.workers[message.rank].pid = int(message.data())
            self._frames.append(message)

    @property
    def started(self) -> bool:
        """Whether all ranks of this host run."""
        return all(worker.pid for worker in self.workers.values())

    def start(
        self, part: dict[str, Any], placements: Sequence[Placement], stdin: bytes | None
    ) -> None:
        """Tell the agent to start its ranks.

        Args:
            part: this host's part of the job; see `_Run._start_remote`.
            placements: the placements of this host's ranks.
            stdin: the bytes that every rank reads from its stdin, if any.
        """
        for placement in placements:
            self.workers[placement.rank] = RemoteWorker(
                placement, self, more_sinks(stdin is not None, part["live"])
            )
        if stdin is not None:
            self.send(frame(Kind.STDIN, body=stdin))
        self.send(data_frame(Kind.START, 0, part))

    def serve(self) -> None:
        """Start the thread that passes the agent's messages to the workers."""
        self._thread.start()

    def send(self, data: bytes) -> None:
        """Write to the agent, if the connection still exists."""
        with self._sending:
            try:
                view = memoryview(data)
                while view and self._closed is None:
                    view = view[os.write(self._line.write_fd, view) :]
            except OSError:
                pass  # The line is broken, which the host's thread notices when it reads.

    def _serve(self) -> None:
        """Pass the agent's messages on until the connection ends; then all ranks have ended.

        A rank that has not ended by then is reported as lost.
        """
        why = "the launcher's thread for this host failed"
        try:
            self._pass_on()
            why = self._why_lost()
        except NoFrameError as error:
            why = _disturbed(error)
        finally:
            self._end_workers(why)

    def _end_workers(self, why: str) -> None:
        for worker in list(self.workers.values()):
            worker.end(Ending(LOST, by_signal=False, why=why))
            worker.close_output()
        self.over = True
        self._settled.set()

    def _pass_on(self) -> None:
        for message in self._frames:
            self._take(message)
        # An agent that goes on after its ranks, to learn how the job ends, may still get signals.
        while data := self._read():
            for message in self._reader.feed(data):
                self._take(message)

    def _take(self, message: Frame) -> None:
        worker = self.workers.get(message.rank)
        if message.kind == Kind.DONE:
            self._closed_well = True
            self._end_workers("its agent has not told how it ended")
        elif message.kind == Kind.CAUGHT:
            if self._tell_signal is not None:
                self._tell_signal(self.name, int(message.data()))
        elif worker is None or self.over:
            return
        elif message.kind == Kind.ENDED:
            ending = message.data()
            if not isinstance(ending, list) or len(ending) != 3:
                raise NoFrameError(repr(ending))
            status, by_signal, oom_killed = ending
            worker.end(Ending(status, by_signal, oom_killed=oom_killed))
        elif message.kind in _SINKS:
            worker.write(_SINKS[message.kind], message.body)

    def _why_lost(self) -> str:
        said = last_line(self._line.said())
        return f"lost the connection to its host{': ' if said else ''}{said}"

    def confirmed(self) -> bool:
        """Wait until nothing of the job is left on the host; return whether the agent said so."""
        if self._thread.ident is not None and not self._settled.wait(_LONGEST_GOODBYE):
            self._line.cut()
            self._settled.wait(_LONGEST_GOODBYE)
        return self._closed_well

    def close(self) -> bool:
        """Close the connection; return whether the agent confirmed that nothing is left there."""
        if self._closed is not None:
            return self._closed
        if self._thread.ident is not None:
            self._thread.join(_LONGEST_GOODBYE)
        with self._sending:  # After this no thread writes to the descriptor, which is closed next.
            self._closed = self._closed_well
        if not self._thread.is_alive():
            self._line.hang_up()
        if not self._closed_well:
            self._line.cut()
        self._line.end()
        return self._closed


class RemoteHosts:
    """All other hosts of a job, as a context manager."""

    def __init__(self, names: Sequence[str], way: Way, inbox: SignalInbox) -> None:
        """Begin to connect to all hosts; a signal in the inbox ends the waits below."""
        self.hosts: list[RemoteHost] = []
        self._way = way
        self._interrupted_fd = inbox.fd
        self._stopping = threading.Event()
        self._alive = threading.Thread(target=self._stay_alive, name="hvdlite-alive", daemon=True)
        for name in names:
            self.hosts.append(RemoteHost(name, way, inbox.tell))

    def greet(self) -> None:
        """Wait until the agent of every host has sent its hello.

        Raises:
            LaunchError: a host cannot be reached, or has another version of hvdlite.
            KeyboardInterrupt: a signal arrived meanwhile.
        """
        self._wait_for(lambda host: bool(host.hello), "answered")

    def wait_until_started(self) -> None:
        """Wait until every rank on another host runs; raise as `greet` does."""
        self._wait_for(lambda host: host.started, "started its ranks")
        for host in self.hosts:
            host.serve()
        if self.hosts:
            self._alive.start()

    def _wait_for(self, there: Callable[[RemoteHost], bool], what: str) -> None:
        wait_for_hosts(self.hosts, there, what, self._way, self._interrupted_fd)

    def _stay_alive(self) -> None:
        while not self._stopping.wait(ALIVE_SECONDS):
            for host in self.hosts:
                host.send(frame(Kind.ALIVE))

    def conclude(self, status: int, why: str = "") -> None:
        """Tell the agents how the job has ended; those that wait for it end with this status."""
        for host in self.hosts:
            host.send(data_frame(Kind.OUTCOME, 0, [status, why]))

    def __enter__(self) -> RemoteHosts:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            interrupted = isinstance(error, KeyboardInterrupt)
            self.conclude(130 if interrupted else 1, "" if interrupted else str(error))
        self._stopping.set()
        for host in self.hosts:
            host.close()
        if self._alive.ident is not None:
            self._alive.join()  # It ends soon: with the lines gone, its writes cannot block.


AnyHost = TypeVar("AnyHost", bound=RemoteHost)


def connect_deadline(way: Way) -> float:
    """Return until when a host that is connected to now has to answer; monotonic, in seconds."""
    seconds = way.connect_seconds
    return math.inf if is_never(seconds) else time.monotonic() + seconds + 5


def wait_for_hosts(
    hosts: Sequence[AnyHost],
    there: Callable[[AnyHost], bool],
    what: str,
    way: Way,
    interrupted_fd: int,
) -> None:
    """Receive from the agents until `there(host)` is true for all hosts.

    Args:
        hosts: the hosts, whose threads do not run yet.
        there: whether a host has come as far as it should.
        what: what the host then has done, for the message.
        way: it says how long a host may take.
        interrupted_fd: a byte there ends the wait.

    Raises:
        LaunchError: a host cannot take part, or takes too long.
        KeyboardInterrupt: there was such a byte.
    """
    deadline = connect_deadline(way)
    with selectors.DefaultSelector() as selector:
        selector.register(interrupted_fd, selectors.EVENT_READ, None)
        for host in hosts:
            selector.register(host.fileno(), selectors.EVENT_READ, host)
        while waiting := [host for host in hosts if not there(host)]:
            left = max(0.0, deadline - time.monotonic())
            ready = selector.select(min(left, _LONGEST_SLEEP))
            if not ready and left <= _LONGEST_SLEEP:
                names = ", ".join(host.name for host in waiting)
                raise LaunchError(f"host {names} has not {what} in time")
            for key, _ in ready:
                if key.data is None:
                    raise KeyboardInterrupt
                key.data.receive()
