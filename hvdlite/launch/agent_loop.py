"""The agent's loop over the processes of one host, and its connection to the launcher.

The launcher has the agent start, signal and finish one process at a time. Both say four times in a
heartbeat that they are there. If the launcher says nothing for long, the agent ends its processes.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import selectors
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from hvdlite.launch.hosts import Placement
from hvdlite.launch.loop import PASSED_ON, JobLoop, SignalInbox, Stop
from hvdlite.launch.output import Stream, StreamReader
from hvdlite.launch.process import LIVE, RESULT, STDERR, STDOUT, Ending, Worker, start_worker
from hvdlite.launch.remote.messages import GREETING, Frame, FrameReader, Kind, data_frame, frame
from hvdlite.launch.resources import oom_kills
from hvdlite.rendezvous.descriptors import explained, room_for_processes

SILENCE = 30.0  # seconds without a message from the launcher until it counts as gone
_TICK_SECONDS = 1.0
_CAPACITY = 4 << 20  # bytes that wait for ssh; while there are more, no output is read
# srun passes on whole lines alone, so this ends each message with one.
_NEW_LINE = frame(Kind.ALIVE, body=b"\n")
_KINDS = {STDOUT: Kind.OUT, STDERR: Kind.ERR, RESULT: Kind.RESULT, LIVE: Kind.LIVE}
# An agent may end while others go on, maybe on the same machine under another name. So it ends its
# own processes alone, which have this variable.
_MARK = "HVDLITE_AGENT_ID"
_CANNOT_START = 126  # status of a process that could not be started, as a shell's
_GONE = 1  # status of a stop because the launcher is gone; no program reads it


class LauncherChannel:
    """The connection to the launcher, usually over stdin and stdout; writing never blocks."""

    # `read_fd` is the descriptor of what the launcher sends.
    # `write_fd` is the descriptor of what is sent to the launcher; it may be the same one.

    def __init__(self, read_fd: int = 0, write_fd: int = 1) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        self._reader = FrameReader()
        # The status of the job, and why it did not start; None while it is not over.
        self.outcome: tuple[int, str] | None = None
        self._out = bytearray(GREETING)
        self.heard_at = time.monotonic()  # the monotonic time of the launcher's last message
        self.gone = False  # whether the connection has ended

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
    """Sends the output of the processes to the launcher."""

    def __init__(self, agent: Agent, channel: LauncherChannel) -> None:
        super().__init__(agent.selector)
        self._channel = channel

    def took(self, stream: Stream, block: bytes) -> None:
        self._channel.send(frame(_KINDS[stream.sink], stream.rank, block))

    @property
    def full(self) -> bool:
        return self._channel.waiting > _CAPACITY and not self._channel.gone


def tell_signals(channel: LauncherChannel, inbox: SignalInbox) -> None:
    """Tell the launcher which signals have arrived here."""
    for number in inbox.take():
        channel.send(data_frame(Kind.CAUGHT, 0, number))


class Agent(JobLoop[Worker]):
    """The loop over one host's processes of a job. Used by one thread."""

    def __init__(
        self,
        channel: LauncherChannel,
        part: Mapping[str, Any],
        environment: Mapping[str, str],
        inbox: SignalInbox,
    ) -> None:
        """Make a loop without processes."""
        # `channel` is the connection to the launcher; borrowed.
        # `inbox` receives signals to the agent, which the launcher is told; borrowed.
        own = secrets.token_hex(16)
        super().__init__(bytes.fromhex(part["job_id"]), f"{_MARK}={own}")
        pulse = part["pulse"]
        self._heartbeat = float(pulse["heartbeat"])
        self._patience = float(pulse["patience"])
        self._grace = float(pulse["grace"])
        self._silence = SILENCE  # until the first ALIVE: before it the launcher waits for others
        self._alive_at = 0.0
        self._channel = channel
        self._part = part
        self._environment = {**environment, _MARK: own}
        self._forwarder = _Forwarder(self, channel)
        self._oom_kills = oom_kills()
        self._listens = True
        self._watches_room = False
        self._closing = False  # the launcher starts nothing here any more
        self._asked = False  # the launcher has asked processes to end, and will say when to kill
        self.on(channel.read_fd, self._obey)
        self.on(inbox.fd, lambda: tell_signals(channel, inbox))

    @property
    def streams(self) -> StreamReader:
        """The reader of the processes' output, which sends it to the launcher."""
        return self._forwarder

    def goes_on(self) -> bool:
        """Return whether the launcher may still want processes here."""
        return super().goes_on() or not (self._closing or self._stop is not None)

    def ended(self, worker: Worker, ending: Ending) -> None:
        """Tell the launcher how a process ended; the launcher decides what follows."""
        oom_killed = oom_kills() > self._oom_kills
        body = [ending.status, ending.by_signal, oom_killed]
        self._channel.send(data_frame(Kind.ENDED, worker.number, body))

    def complain(self, text: str) -> None:
        """Report to stderr that something could not be ended."""
        print(f"hvdlite-run: {text}", file=sys.stderr)

    def tick(self, now: float) -> float | None:
        """Write queued frames, say that this host is alive, and look after launcher and workers."""
        self._channel.flush()
        silent = now - self._channel.heard_at > self._silence
        if (self._channel.gone or silent) and self._listens:
            self._channel.gone = True
            self._listens = False
            self._watch_room(False)
            self.selector.unregister(self._channel.read_fd)
            self.stop_now(_GONE, grace=self._grace)
        if now >= self._alive_at:
            self._alive_at = now + self._heartbeat / 4
            self._channel.send(frame(Kind.ALIVE))
        self._watch_room(bool(self._channel.waiting) and not self._channel.gone)
        return min(now + _TICK_SECONDS, self._alive_at)

    def _watch_room(self, wanted: bool) -> None:
        """Watch the channel for room while `wanted`: while frames are queued."""
        if wanted == self._watches_room:
            return
        self._watches_room = wanted
        channel = self._channel
        if channel.write_fd == channel.read_fd:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
            self.selector.modify(channel.read_fd, events, self._obey)
        elif wanted:
            self.selector.register(channel.write_fd, selectors.EVENT_WRITE, channel.flush)
        else:
            self.selector.unregister(channel.write_fd)

    def _obey(self) -> None:
        for command in self._channel.receive():
            workers = [one for one in self._workers if one.number == command.number]
            if command.kind == Kind.ALIVE:
                self._silence = self._patience
            elif command.kind == Kind.START:
                self._start(command)
            elif command.kind == Kind.SIGNAL:
                self._signal_one(workers, int(command.data()))
            elif command.kind == Kind.FINISH:
                for worker in workers:
                    if worker.ending is not None:
                        self.retire(worker, well=False)
            elif command.kind == Kind.CLOSE:
                self._closing = True

    def _start(self, command: Frame) -> None:
        own, part = command.data(), self._part
        room_for_processes(len(self._workers) + 1)
        try:
            worker = start_worker(
                Placement(*own["placement"]),
                part["command"],
                {**self._environment, **own["environment"], **part.get("own", {})},
                stdin=part["stdin"],
                number=command.number,
                live=part["live"],
            )
        except OSError as error:
            text = f"hvdlite-run: cannot start here: {explained(error)}\n"
            self._channel.send(frame(Kind.ERR, command.number, text.encode()))
            body = [_CANNOT_START, False, False]
            self._channel.send(data_frame(Kind.ENDED, command.number, body))
            return
        self.watch(worker)
        for sink, pipe in worker.take_pipes().items():
            self.streams.open(worker.number, pipe, sink)
        self._channel.send(data_frame(Kind.STARTED, worker.number, worker.pid))

    def _signal_one(self, workers: list[Worker], number: int) -> None:
        """Send a signal to a process; after CLOSE, SIGKILL ends all there."""
        for worker in workers:
            worker.send_signal(number)
        self._asked |= number not in (signal.SIGKILL, PASSED_ON)
        if number == signal.SIGKILL and self._closing:
            self.stop_now(0, signal.SIGKILL, grace=0.0)

    def _clear_leftovers(self) -> None:
        if self._stop is None and self._asked and self._workers:
            # The launcher has asked all of them to end, and kills what is left after its grace.
            self._stop = Stop(time.monotonic(), math.inf)
        super()._clear_leftovers()
