"""Other hosts, as the launcher sees them: an ssh each, with an agent behind it.

A remote rank looks to the supervisor like a local one: pipes with its output, and a descriptor that
can be read once it has ended. A thread per host fills them. It stops reading ssh while a pipe is
full, so that a slow console slows the ranks of other hosts down, too.
"""

from __future__ import annotations

import math
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import hvdlite
from hvdlite.bootstrap.deadline import is_never
from hvdlite.launch.process import shim
from hvdlite.launch.process.ending import Ending
from hvdlite.launch.process.placement import Placement
from hvdlite.launch.process.sinks import RESULT, STDERR, STDOUT
from hvdlite.launch.remote.messages import Frame, FrameReader, Kind, NoFrameError, data_frame, frame
from hvdlite.launch.remote.ssh import SshOptions, explain, last_line, ssh_command

_ALIVE_SECONDS = 3.0  # between the words that tell an agent that the launcher is there
_LONGEST_GOODBYE = 5.0  # seconds that an agent may take to end what is left
_LONGEST_FRAME = 4 << 20  # bytes that an agent sends at once
_LONGEST_SLEEP = 3600.0
_LOST = 255  # status of a rank whose host was lost, as ssh's
_SINKS = {Kind.OUT: STDOUT, Kind.ERR: STDERR, Kind.RESULT: RESULT}


class LaunchError(OSError):
    """A host cannot take part; the message says which, why, and what to do."""


def _disturbed(error: NoFrameError) -> str:
    return f"something besides hvdlite's agent writes to its stdout there: {error}"


class RemoteWorker:
    """One rank on another host. The host's thread feeds it, the supervisor's reads it."""

    def __init__(self, placement: Placement, remote: RemoteHost, with_result: bool) -> None:
        self.placement = placement
        self.pid = 0  # on its own host
        self.ending: Ending | None = None
        self.pidfd = os.eventfd(0, os.EFD_CLOEXEC)
        self._remote = remote
        self._read: dict[int, int] = {}
        self._write: dict[int, int] = {}
        for sink in (STDOUT, STDERR, *((RESULT,) if with_result else ())):
            self._read[sink], self._write[sink] = os.pipe2(os.O_CLOEXEC)

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
        """The process group that has to die with the launcher: ssh's."""
        return self._remote.pid

    @property
    def lingers(self) -> bool:
        """Say whether its agent has not said yet that nothing is left."""
        return not self._remote.over

    def take_pipes(self) -> dict[int, int]:
        """Hand over the read ends of its output, by sink; whoever takes them owns them."""
        pipes, self._read = self._read, {}
        return pipes

    def look(self) -> Ending | None:
        """Say how it ended, None while it runs."""
        return self.ending

    def signal_group(self, number: int) -> None:
        """Have the agent send a signal to the rank and its children."""
        self._remote.send(data_frame(Kind.SIGNAL, self.rank, int(number)))

    def reap(self) -> str | None:
        """End the connection to the host; say so if the agent did not confirm the end."""
        for pipe in self.take_pipes().values():
            os.close(pipe)
        confirmed = self._remote.close()
        os.close(self.pidfd)
        if confirmed:
            return None
        return (
            f"rank {self.rank} on {self.host} may still run: the connection is lost; it ends when "
            "the agent there notices, within half a minute"
        )

    def write(self, sink: int, data: bytes) -> None:
        """Pass output on; blocks while the pipe is full. (The host's thread.)"""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._write[sink], view) :]
        except OSError:
            pass  # The supervisor does not read any more.

    def end(self, ending: Ending) -> None:
        """Note the end, and wake the supervisor. (The host's thread.)"""
        if self.ending is None:
            self.ending = ending
            os.eventfd_write(self.pidfd, 1)

    def close_output(self) -> None:
        """Nothing more comes, from what the rank left running neither. (The host's thread.)"""
        for pipe in self._write.values():
            os.close(pipe)
        self._write = {}


class RemoteHost:
    """One other host: its ssh, and the ranks there.

    Until `serve` starts the thread, everything happens in the launcher's own; then `send`, `over`
    and `close` may be called from there.
    """

    def __init__(self, name: str, options: SshOptions) -> None:
        """Start ssh; it dies with this process."""
        self.name = name
        self.hello: dict[str, Any] = {}
        self.workers: dict[int, RemoteWorker] = {}
        self.over = False
        self._options = options
        self._reader = FrameReader(after_greeting=True, longest=_LONGEST_FRAME)
        self._frames: list[Frame] = []
        self._complaints = os.memfd_create("hvdlite-ssh-stderr", os.MFD_CLOEXEC)
        own = [sys.executable, "-I", "-S", shim.__file__, str(os.getpid())]
        self._ssh = subprocess.Popen(
            [*own, *ssh_command(name, options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            start_new_session=True,
            bufsize=0,
        )
        assert self._ssh.stdin is not None and self._ssh.stdout is not None
        self._stdin, self._stdout = self._ssh.stdin.fileno(), self._ssh.stdout.fileno()
        self._sending = threading.Lock()
        self._thread = threading.Thread(
            target=self._serve, name=f"hvdlite-host-{name}", daemon=True
        )
        self._closed_well = False
        self._closed: bool | None = None

    @property
    def pid(self) -> int:
        """The process id, and group, of ssh."""
        return self._ssh.pid

    def fileno(self) -> int:
        """Give the descriptor that can be read when the agent says something."""
        return self._stdout

    def receive(self) -> None:
        """Take what the agent said; see `greeted` and `started`.

        Raises:
            LaunchError: ssh failed, or the agent refuses.
        """
        data = os.read(self._stdout, 1 << 18)
        if not data:
            raise LaunchError(explain(self.name, self._stderr(), self._reap(), self._options))
        try:
            for message in self._reader.feed(data):
                self._take_before_start(message)
        except NoFrameError as error:
            raise LaunchError(f"cannot start on host {self.name}: {_disturbed(error)}") from None

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
        else:
            if message.kind == Kind.STARTED:
                self.workers[message.rank].pid = int(message.data())
            self._frames.append(message)

    @property
    def started(self) -> bool:
        """Say whether all its ranks run."""
        return all(worker.pid for worker in self.workers.values())

    def start(
        self, part: dict[str, Any], placements: Sequence[Placement], stdin: bytes | None
    ) -> None:
        """Have the agent start its ranks."""
        for placement in placements:
            self.workers[placement.rank] = RemoteWorker(placement, self, stdin is not None)
        if stdin is not None:
            self.send(frame(Kind.STDIN, body=stdin))
        self.send(data_frame(Kind.START, 0, part))

    def serve(self) -> None:
        """Feed the workers from now on."""
        self._thread.start()

    def send(self, data: bytes) -> None:
        """Write to the agent, if it is still there."""
        with self._sending:
            try:
                view = memoryview(data)
                while view and self._closed is None:
                    view = view[os.write(self._stdin, view) :]
            except OSError:
                pass  # ssh has ended; its stdout says so, too.

    def _serve(self) -> None:
        """Pass on what the agent says; whatever ends that, the job hears that ranks are lost."""
        why = "the launcher's thread for this host failed"
        try:
            self._pass_on()
            why = self._why_lost()
        except NoFrameError as error:
            why = _disturbed(error)
        finally:
            for worker in self.workers.values():
                worker.end(Ending(_LOST, by_signal=False, why=why))
                worker.close_output()
            self.over = True

    def _pass_on(self) -> None:
        for message in self._frames:
            self._take(message)
        while not self.over:
            try:
                data = os.read(self._stdout, 1 << 18)
            except OSError:
                data = b""
            if not data:
                break
            for message in self._reader.feed(data):
                self._take(message)

    def _take(self, message: Frame) -> None:
        worker = self.workers.get(message.rank)
        if message.kind == Kind.DONE:
            self._closed_well = self.over = True
        elif worker is None:
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
        said = last_line(self._stderr())
        return f"lost the connection to its host{': ' if said else ''}{said}"

    def _stderr(self) -> str:
        return os.pread(self._complaints, 1 << 16, 0).decode(errors="replace")

    def close(self) -> bool:
        """Hang up; say whether the agent had confirmed that nothing is left on its host."""
        if self._closed is not None:
            return self._closed
        if self._thread.ident is not None:
            self._thread.join(_LONGEST_GOODBYE)
        with self._sending:  # Nobody writes to a descriptor that may be another one's soon.
            self._closed = self._closed_well
        for pipe in (self._ssh.stdin, self._ssh.stdout):
            if pipe is not None and not self._thread.is_alive():
                pipe.close()
        if not self._closed_well:
            self._ssh.kill()
        self._reap()
        os.close(self._complaints)
        return self._closed

    def _reap(self) -> int:
        """Wait for ssh, which has nothing more to say, and return its status."""
        try:
            return self._ssh.wait(_LONGEST_GOODBYE)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            return self._ssh.wait()


class RemoteHosts:
    """All other hosts of a job, as a context manager."""

    def __init__(self, names: Sequence[str], options: SshOptions, interrupted_fd: int) -> None:
        """Start ssh to all; a byte at `interrupted_fd` ends the waiting."""
        self.hosts: list[RemoteHost] = []
        self._options = options
        self._interrupted_fd = interrupted_fd
        self._stopping = threading.Event()
        self._alive = threading.Thread(target=self._stay_alive, name="hvdlite-alive", daemon=True)
        for name in names:
            self.hosts.append(RemoteHost(name, options))

    def greet(self) -> None:
        """Wait until every host's agent has said what its host is like.

        Raises:
            LaunchError: a host cannot be reached, or has another version.
            KeyboardInterrupt: a signal came meanwhile.
        """
        self._wait_for(lambda host: bool(host.hello), "answered")

    def wait_until_started(self) -> None:
        """Wait until every rank on another host runs; raises as `greet` does."""
        self._wait_for(lambda host: host.started, "started its ranks")
        for host in self.hosts:
            host.serve()
        if self.hosts:
            self._alive.start()

    def _wait_for(self, there: Callable[[RemoteHost], bool], what: str) -> None:
        seconds = self._options.connect_seconds
        deadline = math.inf if is_never(seconds) else time.monotonic() + seconds + 5
        with selectors.DefaultSelector() as selector:
            selector.register(self._interrupted_fd, selectors.EVENT_READ, None)
            for host in self.hosts:
                selector.register(host.fileno(), selectors.EVENT_READ, host)
            while waiting := [host for host in self.hosts if not there(host)]:
                left = max(0.0, deadline - time.monotonic())
                ready = selector.select(min(left, _LONGEST_SLEEP))
                if not ready and left <= _LONGEST_SLEEP:
                    names = ", ".join(host.name for host in waiting)
                    raise LaunchError(f"host {names} has not {what} in time")
                for key, _ in ready:
                    if key.data is None:
                        raise KeyboardInterrupt
                    key.data.receive()

    def _stay_alive(self) -> None:
        while not self._stopping.wait(_ALIVE_SECONDS):
            for host in self.hosts:
                host.send(frame(Kind.ALIVE))

    def __enter__(self) -> RemoteHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for host in self.hosts:
            host.close()
        if self._alive.ident is not None:
            self._alive.join()  # With ssh gone, none of its writes can block any more.
