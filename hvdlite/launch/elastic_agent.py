"""The agent's loop in an elastic job: workers start and end one by one, as the launcher asks.

Both sides send a message every quarter of the heartbeat. If the launcher is silent for twenty
heartbeats, the agent kills its workers: the launcher has given them up, or is dead. SIGTERM to the
agent means that this host is taken away; the launcher then lets its workers leave.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Mapping
from typing import Any

from hvdlite.launch.agent_loop import GONE, Agent, Link
from hvdlite.launch.process.ending import Ending
from hvdlite.launch.process.inbox import SignalInbox
from hvdlite.launch.process.local import Worker, start_worker
from hvdlite.launch.process.placement import Placement
from hvdlite.launch.process.resources import oom_kills
from hvdlite.launch.process.stopped import StoppedWatch
from hvdlite.launch.remote.messages import Frame, Kind, data_frame, frame
from hvdlite.rendezvous.registrar_client import PATIENCE

# An agent may end while others go on, maybe on the same machine under another name. So it ends its
# own workers alone, which have this variable.
_MARK = "HVDLITE_AGENT_ID"
_CANNOT_START = 126  # status of a worker that could not be started, as a shell's


class ElasticAgent(Agent):
    """The loop over one host's workers of an elastic job. Used by one thread."""

    def __init__(
        self,
        link: Link,
        part: Mapping[str, Any],
        environment: Mapping[str, str],
        inbox: SignalInbox,
    ) -> None:
        """Make a loop without workers.

        Args:
            link: the connection to the launcher; borrowed.
            part: this host's part of the job, with `heartbeat`, in seconds.
            environment: the variables that all workers here share.
            inbox: receives signals to the agent; borrowed.
        """
        own = secrets.token_hex(16)
        super().__init__(link, bytes.fromhex(part["job_id"]), f"{_MARK}={own}")
        heartbeat = float(part["heartbeat"])
        self._heartbeat = heartbeat
        self.period = heartbeat / 4
        self._part = part
        self._environment = {**environment, _MARK: own}
        self._inbox = inbox
        self._stopped = StoppedWatch(heartbeat)
        self._alive_at = 0.0
        self._finished = False
        self._drains = False
        self.on(inbox.fd, self._take_signals)

    def goes_on(self) -> bool:
        """Return whether the launcher may still want workers here."""
        return super().goes_on() or not (self._finished or self._stop is not None)

    def tick(self, now: float) -> float | None:
        """Say that this host is alive, and which workers are stopped; release ended workers."""
        if now >= self._alive_at:
            self._alive_at = now + self.period
            self._link.send(frame(Kind.ALIVE))
        running = {one.number: one.pid for one in self._workers if one.ending is None}
        for number in self._stopped.find(running, now):
            self._link.send(frame(Kind.STOPPED, number))
        times = [super().tick(now), self.release_due(now), self._alive_at, self._stopped.due]
        return min(when for when in times if when is not None)

    def ended(self, worker: Worker, ending: Ending) -> None:
        """Release a worker, and tell the launcher how it ended."""
        self.retire(worker, ending.well)
        oom_killed = oom_kills() > self._oom_kills
        body = [ending.status, ending.by_signal, oom_killed]
        self._link.send(data_frame(Kind.ENDED, worker.number, body))

    def launcher_gone(self) -> None:
        """Kill the workers at once: for the others they are dead already."""
        self.stop_now(GONE, signal.SIGKILL, grace=0.0)

    def _take_signals(self) -> None:
        for number in self._inbox.take():
            if number == signal.SIGTERM and not self._drains:
                self._drains = True
                self._link.send(frame(Kind.DRAIN))
            else:
                self.stop_now(128 + number, signal.SIGTERM)

    def _obey(self) -> None:
        for command in self._link.receive():
            if command.kind == Kind.ALIVE:  # Before the first one the launcher waits for others.
                self.silence = PATIENCE * self._heartbeat
            elif command.kind == Kind.LAUNCH:
                self._launch(command)
            elif command.kind == Kind.SIGNAL:
                number = int(command.data())
                for worker in self._workers:
                    if worker.number == command.rank:
                        worker.signal_group(number)
            elif command.kind == Kind.FINISH:
                self._finished = True
                if super().goes_on():
                    self.stop_now(0, signal.SIGKILL, grace=0.0)

    def _launch(self, command: Frame) -> None:
        own = command.data()
        try:
            worker = start_worker(
                Placement(*own["placement"]),
                self._part["command"],
                {**self._environment, **own["environment"]},
                stdin=self._part["stdin"],
                number=command.rank,
                live=self._part["live"],
            )
        except OSError as error:
            text = f"hvdlite-run: cannot start here: {error}\n"
            self._link.send(frame(Kind.ERR, command.rank, text.encode()))
            body = [_CANNOT_START, False, False]
            self._link.send(data_frame(Kind.ENDED, command.rank, body))
            return
        self.watch(worker)
        for sink, pipe in worker.take_pipes().items():
            self.streams.open(worker.number, pipe, sink)
        self._link.send(data_frame(Kind.STARTED, worker.number, worker.pid))
