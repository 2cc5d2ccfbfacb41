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
from hvdlite.launch.process.local import Worker, start_worker
from hvdlite.launch.process.placement import Placement
from hvdlite.launch.process.resources import oom_kills
from hvdlite.launch.process.sinks import RESULT, STDERR, STDOUT
from hvdlite.launch.remote.messages import GREETING, Frame, FrameReader, Kind, data_frame, frame

SILENCE = 30.0  # seconds without a message from the launcher until it counts as gone
_TICK_SECONDS = 1.0
_CAPACITY = 4 << 20  # bytes that wait for ssh; while there are more, no output is read
_STDIN, _STDOUT = 0, 1
_KINDS = {STDOUT: Kind.OUT, STDERR: Kind.ERR, RESULT: Kind.RESULT}
GONE = 1  # status of a stop because the launcher is gone; no program reads it


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
    """The loop over one host's ranks of a job. Used by one thread.

    Attributes:
        silence: seconds without a message from the launcher until it counts as gone.
        period: seconds between two looks at the clock.
    """

    silence = SILENCE
    period = _TICK_SECONDS

    def __init__(self, link: Link, job_id: bytes, mark: str | None = None) -> None:
        super().__init__(job_id, mark)
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
        silent = now - self._link.heard_at > self.silence
        if (self._link.gone or silent) and self._listens:
            self._link.gone = True
            self._listens = False
            self.selector.unregister(_STDIN)
            self.launcher_gone()
        self._watch_room(bool(self._link.waiting) and not self._link.gone)
        return now + self.period

    def launcher_gone(self) -> None:
        """End the ranks, because nobody wants their results any more."""
        self.stop_now(GONE)

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
