"""Agent: runs this host's ranks of a job; the launcher starts it over ssh.

The launcher runs `ssh host exec python -m hvdlite.launch.agent`. The agent reads its part of the
job from stdin, starts those ranks, and writes their output, and how each ended, to stdout. If stdin
ends, or brings nothing for `SILENCE` seconds, the launcher or the connection to it is gone: the
agent then ends its ranks and itself. ssh shows the launcher what the agent writes to stderr.
"""

from __future__ import annotations

import math
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import hvdlite
from hvdlite.bootstrap.deadline import Deadline
from hvdlite.bootstrap.handshake import Job
from hvdlite.bootstrap.store import StoreClient
from hvdlite.compat import on_path
from hvdlite.errors import BootstrapError
from hvdlite.launch.loop import JobLoop
from hvdlite.launch.output.streams import Stream, StreamReader
from hvdlite.launch.process.ending import Ending
from hvdlite.launch.process.local import Worker, start_worker
from hvdlite.launch.process.placement import Placement
from hvdlite.launch.process.resources import available_cores, oom_kills
from hvdlite.launch.process.sinks import RESULT, STDERR, STDOUT
from hvdlite.launch.remote.messages import GREETING, Frame, FrameReader, Kind, data_frame, frame
from hvdlite.launch.remote.ssh import SAFE_PATH

SILENCE = 30.0  # seconds without a message from the launcher until it counts as gone
_CHECK_SECONDS = 10.0  # how long the agent tries to reach the launcher's store
_TICK_SECONDS = 1.0
_CAPACITY = 4 << 20  # bytes that wait for ssh; while there are more, no output is read
_STDIN, _STDOUT = 0, 1
_KINDS = {STDOUT: Kind.OUT, STDERR: Kind.ERR, RESULT: Kind.RESULT}
_GONE = 1  # status of a stop because the launcher is gone; no program reads it
# Variables that belong to a host or a login, and not to the job.
_OWN_TO_HOST = frozenset(
    (
        "HOME",
        "HOSTNAME",
        "LOGNAME",
        "MAIL",
        "OLDPWD",
        "PWD",
        "SHELL",
        "SHLVL",
        "TMPDIR",
        "USER",
        "_",
    )
)
_OWN_TO_LOGIN = ("DBUS_", "DISPLAY", "SSH_", "XDG_")


class Link:
    """The connection to the launcher, over stdin and stdout; writing never blocks.

    Attributes:
        heard_at: the monotonic time of the launcher's last message.
        gone: whether the connection has ended.
    """

    def __init__(self) -> None:
        os.set_blocking(_STDIN, False)
        os.set_blocking(_STDOUT, False)
        self._reader = FrameReader()
        self._out = bytearray(GREETING)
        self.heard_at = time.monotonic()
        self.gone = False

    @property
    def waiting(self) -> int:
        """The number of bytes that ssh has not taken yet."""
        return len(self._out)

    def send(self, data: bytes) -> None:
        """Queue a frame and write what can be written; drop the frame if the launcher is gone."""
        if self.gone:
            return
        self._out += data
        self.flush()

    def flush(self) -> None:
        """Write what can be written now."""
        try:
            while self._out and not self.gone:
                del self._out[: os.write(_STDOUT, memoryview(self._out)[: 1 << 18])]
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True

    def wait(self, seconds: float) -> None:
        """Sleep until there is something to receive or room to write."""
        if not self.gone:
            select.select([_STDIN], [_STDOUT] if self._out else [], [], seconds)
        self.flush()

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived; set `gone` at the end of stdin."""
        try:
            data = os.read(_STDIN, 1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.gone = True
        self.heard_at = time.monotonic()
        return self._reader.feed(data)


class _Forwarder(StreamReader):
    """Sends the output of the ranks to the launcher."""

    def __init__(self, agent: Agent, link: Link) -> None:
        super().__init__(agent.selector)
        self._link = link

    def took(self, stream: Stream, block: bytes) -> None:
        self._link.send(frame(_KINDS[stream.sink], stream.rank, block))

    @property
    def full(self) -> bool:
        return self._link.waiting > _CAPACITY and not self._link.gone


class Agent(JobLoop[Worker]):
    """The loop over one host's ranks of a job. Used by one thread."""

    def __init__(self, link: Link, job_id: bytes) -> None:
        super().__init__(job_id)
        self._link = link
        self._forwarder = _Forwarder(self, link)
        self._oom_kills = oom_kills()
        self._listens = True
        self._watches_room = False
        self.on(_STDIN, self._obey)

    @property
    def streams(self) -> StreamReader:
        """The reader of the ranks' output, which sends it to the launcher."""
        return self._forwarder

    def start(
        self, placement: Placement, part: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        """Start one rank, and send its process id to the launcher."""
        worker = start_worker(placement, part["command"], environment, stdin=part["stdin"])
        self.watch(worker)
        for sink, pipe in worker.take_pipes().items():
            self._forwarder.open(worker.number, pipe, sink)
        self._link.send(data_frame(Kind.STARTED, placement.rank, worker.pid))

    def ended(self, worker: Worker, ending: Ending) -> None:
        """Tell the launcher how a rank ended; the launcher decides what follows."""
        oom_killed = oom_kills() > self._oom_kills
        self._link.send(
            data_frame(Kind.ENDED, worker.number, [ending.status, ending.by_signal, oom_killed])
        )

    def complain(self, text: str) -> None:
        """Report to stderr that something could not be ended."""
        print(f"hvdlite-run: {text}", file=sys.stderr)

    def tick(self, now: float) -> float | None:
        """Write queued frames, and end the ranks if the launcher is gone."""
        self._link.flush()
        silent = now - self._link.heard_at > SILENCE
        if (self._link.gone or silent) and self._listens:
            self._link.gone = True
            self._listens = False
            self.selector.unregister(_STDIN)
            self.stop_now(_GONE)
        self._watch_room(bool(self._link.waiting) and not self._link.gone)
        return now + _TICK_SECONDS

    def _watch_room(self, wanted: bool) -> None:
        """Watch stdout for room in ssh's pipe while `wanted`: while frames are queued."""
        if wanted != self._watches_room:
            self._watches_room = wanted
            if wanted:
                self.selector.register(_STDOUT, selectors.EVENT_WRITE, self._link.flush)
            else:
                self.selector.unregister(_STDOUT)

    def _obey(self) -> None:
        """Stop all ranks at the first message with a signal, since the launcher stops all or none.

        The launcher decides how long the ranks may take: it later sends SIGKILL, or is gone.
        """
        for command in self._link.receive():
            if command.kind != Kind.SIGNAL:
                continue
            number = int(command.data())
            stop = self._stop
            if number == signal.SIGKILL:
                self.stop_now(128 + number, number, grace=0.0)
            elif stop is None or stop.status is None or stop.number != number:
                self.stop_now(128 + number, number, grace=math.inf)


def _refuse(link: Link, why: str) -> int:
    link.send(frame(Kind.REFUSED, body=why.encode()))
    deadline = time.monotonic() + 2
    while link.waiting and not link.gone and time.monotonic() < deadline:
        link.wait(0.1)
    return 1


def environment_here(own: Mapping[str, str], sent: Mapping[str, str]) -> dict[str, str]:
    """Combine this login's environment with the user's, which the launcher sent.

    The user's variables win, except those that belong to a host or a login.
    """
    taken = {
        name: value
        for name, value in sent.items()
        if name not in _OWN_TO_HOST and not name.startswith(_OWN_TO_LOGIN)
    }
    return {**own, **taken}


def _check(part: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Check that the job can run here; without this check the ranks would fail less clearly.

    Raises:
        OSError: the folder or the program is missing, or the launcher's store cannot be reached.
    """
    try:
        os.chdir(part["folder"])
    except OSError as error:
        raise OSError(f"the folder {part['folder']} is missing: {error.strerror}") from None
    program = part["command"][0]
    if shutil.which(program, path=environment.get("PATH", os.defpath)) is None:
        raise OSError(f"the program {program!r} is not found")
    rank, own = next(iter(part["ranks"].items()))
    job = Job(bytes.fromhex(own["HVDLITE_TOKEN"]), bytes.fromhex(own["HVDLITE_JOB_ID"]), 0)
    address = own["HVDLITE_RENDEZVOUS"]
    try:
        StoreClient(address, job, int(rank), Deadline(_CHECK_SECONDS)).close()
    except BootstrapError as error:
        raise OSError(
            f"it cannot reach the launcher at {address} ({error}); does a firewall forbid it, or "
            "do the hosts share another network interface? --network-interfaces names it"
        ) from None


def _receive_part(link: Link) -> dict[str, Any] | None:
    """Wait for this host's part of the job; return None if the launcher goes away instead."""
    stdin: bytes | None = None
    while not link.gone and time.monotonic() - link.heard_at < SILENCE:
        link.wait(1.0)
        for command in link.receive():
            if command.kind == Kind.STDIN:
                stdin = command.body
            elif command.kind == Kind.START:
                return {**command.data(), "stdin": stdin}
    return None


def main() -> int:
    """Run the agent; return its exit status."""
    os.environ.pop(SAFE_PATH, None)  # It was set for this process; the ranks get the user's value.
    link = Link()
    hello = {
        "version": hvdlite.__version__,
        "hostname": socket.gethostname(),
        "cores": available_cores(),
        "ssh": os.environ.get("SSH_CONNECTION", ""),
    }
    link.send(data_frame(Kind.HELLO, 0, hello))
    part = _receive_part(link)
    if part is None:
        return 1
    environment = environment_here(os.environ, part["environment"])
    if part["compat"]:
        environment = on_path(environment)
    try:
        _check(part, environment)
    except OSError as error:
        return _refuse(link, str(error))
    agent = Agent(link, bytes.fromhex(part["job_id"]))
    starters: list[Callable[[], None]] = []
    for rank, own in part["ranks"].items():
        placement = Placement(int(rank), *part["slots"][rank])
        starters.append(partial(agent.start, placement, part, {**environment, **own}))
    try:
        agent.run(starters)
    except OSError as error:
        return _refuse(link, str(error))
    link.send(frame(Kind.DONE))
    # The rest of the output may have to wait for a slow console, but not for a dead link.
    while link.waiting and not link.gone and time.monotonic() - link.heard_at < SILENCE:
        link.wait(1.0)
        link.receive()
    return 0


if __name__ == "__main__":
    sys.exit(main())
