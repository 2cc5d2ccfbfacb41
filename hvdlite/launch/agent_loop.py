"""The agent's loop over one host's ranks, and its connection to the launcher."""

from __future__ import annotations

import math
import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from hvdlite.launch.loop import JobLoop
from hvdlite.launch.output.streams import Stream, StreamReader
from hvdlite.launch.process.ending import Ending
from hvdlite.launch.process.inbox import SignalInbox
from hvdlite.launch.process.local import Worker, start_worker
from hvdlite.launch.process.placement import Placement
from hvdlite.launch.process.resources import oom_kills
from hvdlite.launch.process.sinks import LIVE, RESULT, STDERR, STDOUT
from hvdlite.launch.remote.messages import GREETING, Frame, FrameReader, Kind, data_frame, frame

SILENCE = 30.0  # seconds without a message from the launcher until it counts as gone
_TICK_SECONDS = 1.0
_CAPACITY = 4 << 20  # bytes that wait for ssh; while there are more, no output is read
# srun passes on whole lines alone, so this ends each message with one.
_NEW_LINE = frame(Kind.ALIVE, body=b"\n")
_KINDS = {STDOUT: Kind.OUT, STDERR: Kind.ERR, RESULT: Kind.RESULT, LIVE: Kind.LIVE}
GONE = 1  # status of a stop because the launcher is gone; no program reads it


class Link:
    """The connection to the launcher, usually over stdin and stdout; writing never blocks.

    Attributes:
        read_fd: the descriptor of what the launcher sends.
        write_fd: the descriptor of what is sent to the launcher; it may be the same one.
        heard_at: the monotonic time of the launcher's last message.
        gone: whether the connection has ended.
        outcome: the status of the job, and why it did not start; None while it is not over.
    """

    def __init__(self, read_fd: int = 0, write_fd: int = 1) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        self._reader = FrameReader()
        self.outcome: tuple[int, str] | None = None
        self._out = bytearray(GREETING)
        self.heard_at = time.monotonic()
        self.gone = False

    @property
    def lost(self) -> bool:
        """Whether the launcher, or the connection to it, is gone."""
        return self.gone or time.monotonic() - self.heard_at > SILENCE

    @property
    def waiting(self) -> int:
        """The number of bytes that ssh has not taken yet."""
        return len(self._out)

    def send(self, data: bytes) -> None:
        """Queue a frame and write what can be written; drop the frame if the launcher is gone."""
        if self.gone:
            return
        self._out += data + _NEW_LINE
        self.flush()

    def flush(self) -> None:
        """Write what can be written now."""
        try:
            while self._out and not self.gone:
                del self._out[: os.write(self.write_fd, memoryview(self._out)[: 1 << 18])]
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True

    def wait(self, seconds: float) -> None:
        """Sleep until there is something to receive or room to write."""
        if not self.gone:
            select.select([self.read_fd], [self.write_fd] if self._out else [], [], seconds)
        self.flush()

    def hears_launcher(self, seconds: float) -> bool:
        """Return whether the launcher has said something, or has gone, within these seconds."""
        self.flush()
        self.heard_at = time.monotonic()
        return self.gone or bool(select.select([self.read_fd], [], [], seconds)[0])

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived but for the outcome; set `gone` at the end."""
        try:
            data = os.read(self.read_fd, 1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.gone = True
        self.heard_at = time.monotonic()
        frames = []
        for one in self._reader.feed(data):
            if one.kind == Kind.OUTCOME:
                status, why = one.data()
                self.outcome = int(status), str(why)
            else:
                frames.append(one)
        return frames


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


def tell_signals(link: Link, inbox: SignalInbox) -> None:
    """Tell the launcher which signals have arrived here."""
    for number in inbox.take():
        link.send(data_frame(Kind.CAUGHT, 0, number))


class Agent(JobLoop[Worker]):
    """The loop over one host's ranks of a job. Used by one thread.

    Attributes:
        silence: seconds without a message from the launcher until it counts as gone.
        period: seconds between two looks at the clock.
    """

    silence = SILENCE
    period = _TICK_SECONDS

    def __init__(
        self, link: Link, job_id: bytes, mark: str | None = None, inbox: SignalInbox | None = None
    ) -> None:
        """Make a loop without ranks.

        Args:
            link: the connection to the launcher; borrowed.
            job_id: the public number of the job.
            mark: see `JobLoop`.
            inbox: receives signals to the agent, which the launcher is told; borrowed.
        """
        super().__init__(job_id, mark)
        self._link = link
        self._forwarder = _Forwarder(self, link)
        self._oom_kills = oom_kills()
        self._listens = True
        self._watches_room = False
        self.on(link.read_fd, self._obey)
        if inbox is not None:
            self.on(inbox.fd, lambda: tell_signals(link, inbox))

    @property
    def streams(self) -> StreamReader:
        """The reader of the ranks' output, which sends it to the launcher."""
        return self._forwarder

    def start(
        self, placement: Placement, part: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        """Start one rank, and send its process id to the launcher."""
        worker = start_worker(
            placement, part["command"], environment, stdin=part["stdin"], live=part["live"]
        )
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
        silent = now - self._link.heard_at > self.silence
        if (self._link.gone or silent) and self._listens:
            self._link.gone = True
            self._listens = False
            self._stop_listening()
            self.launcher_gone()
        self._watch_room(bool(self._link.waiting) and not self._link.gone)
        return now + self.period

    def launcher_gone(self) -> None:
        """End the ranks, because nobody wants their results any more."""
        self.stop_now(GONE)

    def _stop_listening(self) -> None:
        self._watch_room(False)
        self.selector.unregister(self._link.read_fd)

    def _watch_room(self, wanted: bool) -> None:
        """Watch the link for room while `wanted`: while frames are queued."""
        if wanted == self._watches_room:
            return
        self._watches_room = wanted
        link = self._link
        if link.write_fd == link.read_fd:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
            self.selector.modify(link.read_fd, events, self._obey)
        elif wanted:
            self.selector.register(link.write_fd, selectors.EVENT_WRITE, link.flush)
        else:
            self.selector.unregister(link.write_fd)

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
