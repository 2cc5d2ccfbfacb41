"""The launcher's side of the agents of an elastic job, which start and end workers on other hosts.

`AgentHost` is one connection: a line, a thread that reads, and a thread that writes, so that a
write to a stuck line stops nobody else's recovery. `Agents` has all of them: it connects to hosts
that are listed anew, and gives up those that are silent.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from hvdlite.launch.elastic.first_meeting import meet
from hvdlite.launch.elastic.fleet import FIRST_WAIT, LONGEST_WAIT, Start
from hvdlite.launch.process.ending import Ending
from hvdlite.launch.process.placement import Placement
from hvdlite.launch.remote.meeting import placement_numbers
from hvdlite.launch.remote.messages import Frame, Kind, data_frame, frame
from hvdlite.launch.remote.remote import (
    LOST,
    LaunchError,
    RemoteHost,
    RemoteWorker,
    connect_deadline,
    wait_for_hosts,
)
from hvdlite.launch.remote.ways import Way

_LONGEST_GOODBYE = 5.0  # seconds that an agent may take to end what is left


class AgentWorker(RemoteWorker):
    """One worker of an elastic job on another host."""

    def __init__(
        self, number: int, placement: Placement, host: AgentHost, more: Sequence[int]
    ) -> None:
        super().__init__(placement, host, more)
        self.number = number
        self._agent = host
        self._ends = threading.Lock()

    @property
    def group(self) -> int:
        """No group on this host dies with this worker: the connection serves others, too."""
        return 0

    @property
    def lingers(self) -> bool:
        """False: what this worker leaves is ended by the agent."""
        return False

    def signal_group(self, number: int) -> None:
        """Tell the agent to send a signal to this worker and its children."""
        self._agent.send(data_frame(Kind.SIGNAL, self.number, int(number)))

    def write(self, sink: int, data: bytes) -> None:
        """Pass output on, unless the worker has ended; this blocks while the pipe is full."""
        if self.ending is None:
            super().write(sink, data)

    def end(self, ending: Ending) -> None:
        """Note how the worker ended, after all its output; later calls do nothing."""
        with self._ends:
            if self.ending is None:
                self.close_output()
                super().end(ending)

    def reap(self) -> str | None:
        """Close this worker's pipes; the connection stays."""
        if self.ending is None:
            return f"worker {self.number} on {self.host} may still run"
        self._agent.workers.pop(self.number, None)
        for pipe in self.take_pipes().values():
            os.close(pipe)
        os.close(self.pidfd)
        return None


class AgentHost(RemoteHost):
    """The connection to the agent on one other host.

    The loop's thread makes it, because the process of a line dies with the thread that started it,
    and calls all methods; the host's thread reads what the agent sends once `serve` was called.

    Attributes:
        ready: whether the agent can start workers.
        serves: whether the host's thread runs.
        heard_at: the monotonic time of the agent's last message.
        deadline: until when it has to be ready, a monotonic time.
        finishing: whether the agent was told to end.
        busy: whether the host's thread waits for a slow console, and so cannot hear the agent.
        lost_because: why the connection has ended.
        fd: readable when `take` has events.
    """

    def __init__(self, name: str, way: Way) -> None:
        """Begin to connect to the agent."""
        super().__init__(name, way)
        self.ready = False
        self.serves = False
        self.heard_at = time.monotonic()
        self.deadline = connect_deadline(way)
        self.busy = False
        self.finishing = False
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events: deque[tuple[Kind, int]] = deque()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._cut_because = ""
        self.lost_because = "its agent sent something that is not a message"
        self._writer = threading.Thread(
            target=self._write_outbox, name=f"hvdlite-to-{name}", daemon=True
        )
        self._writer.start()

    def send(self, data: bytes) -> None:
        """Queue a message; the writer's thread writes it."""
        self._outbox.put(data)

    def _write_outbox(self) -> None:
        while (data := self._outbox.get()) is not None:
            super().send(data)

    def begin(self, part: Mapping[str, Any], stdin: bytes | None) -> None:
        """Give the agent its part of the job; it then checks whether it can start workers."""
        if stdin is not None:
            self.send(frame(Kind.STDIN, body=stdin))
        self.send(data_frame(Kind.START, 0, dict(part)))

    def _take_before_start(self, message: Frame) -> None:
        if message.kind == Kind.READY:
            self.ready = True
        elif message.kind != Kind.ALIVE:
            super()._take_before_start(message)

    def launch(
        self, start: Start, environment: Mapping[str, str], more: Sequence[int]
    ) -> AgentWorker:
        """Have the agent start a worker, with these sinks besides STDOUT and STDERR."""
        worker = AgentWorker(start.worker, start.placement, self, more)
        self.workers[worker.number] = worker
        placement = [start.placement.rank, *placement_numbers(start.placement)]
        own = {"environment": dict(environment), "placement": placement}
        self.send(data_frame(Kind.LAUNCH, worker.number, own))
        if self.over:  # The host's thread may have ended before it could see this worker.
            worker.end(Ending(LOST, by_signal=False, why="lost the connection to its host"))
        return worker

    def serve(self) -> None:
        """Start the host's thread."""
        self.serves = True
        self.heard_at = time.monotonic()
        super().serve()

    def _take(self, message: Frame) -> None:
        """Handle a message, on the host's thread."""
        if message.kind in (Kind.STOPPED, Kind.DRAIN):
            self._tell(message.kind, message.rank)
        elif message.kind == Kind.STARTED and message.rank in self.workers:
            self.workers[message.rank].pid = int(message.data())
        self.busy = True
        super()._take(message)
        self.heard_at = time.monotonic()
        self.busy = False

    def _serve(self) -> None:
        try:
            super()._serve()
        finally:
            self._tell(Kind.DONE, 0)

    def _tell(self, kind: Kind, worker: int) -> None:
        self._events.append((kind, worker))
        os.eventfd_write(self.fd, 1)

    def take(self) -> list[tuple[Kind, int]]:
        """Return the events since the last call: STOPPED, DRAIN, and DONE when the host is gone."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        return [self._events.popleft() for _ in range(len(self._events))]

    def finish(self) -> None:
        """Tell the agent to end, because no worker is wanted there any more."""
        if not self.finishing:
            self.finishing = True
            self.send(frame(Kind.FINISH))

    def silent(self, since: float) -> bool:
        """Return whether the agent has said nothing since then."""
        return self.serves and not self.over and not self.busy and self.heard_at < since

    def cut(self, why: str) -> None:
        """Give the connection up; its workers then count as lost."""
        self._cut_because = why
        self._line.cut()

    def _why_lost(self) -> str:
        cut = self._cut_because
        said = super()._why_lost()
        self.lost_because = f"lost the connection to its host: {cut}" if cut else said
        return self.lost_because

    def close(self) -> bool:
        """Wait until the agent has ended what is left there, at most for seconds; end the line."""
        if self._closed is not None:
            return self._closed
        if self.serves:
            self._thread.join(_LONGEST_GOODBYE)
        if not self._closed_well:
            self._line.cut()
        self._outbox.put(None)
        self._writer.join(_LONGEST_GOODBYE)
        closed = super().close()
        os.close(self.fd)
        return closed


class Owner(Protocol):
    """The loop that has the agents: what it offers them, and what they tell it."""

    def on(self, fd: int, call: Callable[[], None]) -> None:
        """Call `call` whenever the descriptor can be read."""

    def off(self, fd: int) -> None:
        """Stop that."""

    def host_ready(self, name: str) -> None:
        """Note that workers can be started on a host."""

    def host_lost(self, name: str, why: str) -> None:
        """Note that no workers can be started on a host any more."""

    def host_drains(self, name: str) -> None:
        """Note that a host is taken away, as its agent says."""

    def worker_stopped(self, worker: int) -> None:
        """Note that a worker has been stopped for the heartbeat."""


class Agents:
    """All other hosts of an elastic job; a context manager. Used by the loop's thread."""

    def __init__(self, way: Way, heartbeat: float, interrupted_fd: int) -> None:
        """Make it without hosts.

        Args:
            way: how the agents are reached.
            heartbeat: how long an agent may be silent, in seconds.
            interrupted_fd: readable when the user wants to stop.
        """
        self.hosts: dict[str, AgentHost] = {}
        self._way = way
        self._heartbeat = heartbeat
        self._interrupted_fd = interrupted_fd
        self._owner: Owner | None = None
        self._part_of: Callable[[AgentHost], dict[str, Any]] = lambda host: {}
        self._stdin: bytes | None = None
        self._alive_at = 0.0
        self._ticked_at = math.inf
        self._awake_since = -math.inf  # when `tick` was last called after a long pause
        self._failures: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}

    def greet(
        self, names: Sequence[str], enough: Callable[[Collection[str]], bool]
    ) -> dict[str, str]:
        """Connect to hosts and wait until their agents have sent their hello, or enough of them.

        Args:
            names: the names of the hosts.
            enough: returns whether the job can start with these other hosts.

        Returns:
            By name, why each host that does not come is given up; `tick` connects to it again.

        Raises:
            LaunchError: a host that is needed does not come, or one has another version of hvdlite.
            KeyboardInterrupt: the user wants to stop.
        """
        for name in names:
            self._connect(name)
        hosts = list(self.hosts.values())
        missed = meet(hosts, enough, self._way, self._interrupted_fd)
        for name in missed:
            self._give_up(self.hosts[name])
        return missed

    @property
    def present(self) -> list[AgentHost]:
        """The hosts whose agents have answered."""
        return [host for host in self.hosts.values() if host.hello]

    def begin(self, part_of: Callable[[AgentHost], dict[str, Any]], stdin: bytes | None) -> None:
        """Give agents that have answered their part, and wait until they can start workers.

        Args:
            part_of: returns a host's part, which also later hosts get.
            stdin: the bytes that every worker reads from its stdin, if any.

        Raises:
            LaunchError: the job cannot run on a host.
            KeyboardInterrupt: the user wants to stop.
        """
        self._part_of, self._stdin = part_of, stdin
        hosts = self.present
        for host in hosts:
            host.begin(part_of(host), stdin)
        what = "prepared its part"
        wait_for_hosts(hosts, lambda host: host.ready, what, self._way, self._interrupted_fd)

    def attach(self, owner: Owner) -> None:
        """Pass, from now on, what the agents say to the loop."""
        self._owner = owner
        for host in self.hosts.values():
            if host.ready:
                self._serve(host, owner)
            else:
                self._watch(host, owner)

    def serves(self, name: str) -> bool:
        """Return whether workers can be started on a host."""
        return name in self.hosts and self.hosts[name].serves

    def _connect(self, name: str) -> AgentHost:
        host = AgentHost(name, self._way)
        self.hosts[name] = host
        return host

    def _serve(self, host: AgentHost, owner: Owner) -> None:
        self._failures.pop(host.name, None)
        host.serve()
        owner.on(host.fd, lambda: self._take(host, owner))
        owner.host_ready(host.name)

    def _take(self, host: AgentHost, owner: Owner) -> None:
        for kind, worker in host.take():
            if kind == Kind.STOPPED:
                owner.worker_stopped(worker)
            elif kind == Kind.DRAIN:
                owner.host_drains(host.name)
            elif kind == Kind.DONE:
                owner.off(host.fd)
                self._drop(host, owner, host.lost_because)
                return

    def _drop(self, host: AgentHost, owner: Owner, why: str) -> None:
        """Take a host out whose connection has ended, or has to."""
        self._give_up(host)
        owner.host_lost(host.name, "" if host.finishing else why)

    def _give_up(self, host: AgentHost) -> None:
        """End the connection to a host, until `tick` makes another one after a while."""
        del self.hosts[host.name]
        failures = self._failures[host.name] = self._failures.get(host.name, 0) + 1
        wait = min(FIRST_WAIT * 2 ** min(failures - 1, 10), LONGEST_WAIT)
        self._retry_at[host.name] = time.monotonic() + wait
        host.close()

    def _watch(self, host: AgentHost, owner: Owner) -> None:
        owner.on(host.fileno(), partial(self._receive, host, owner))

    def _receive(self, host: AgentHost, owner: Owner) -> None:
        """Receive from an agent that has not started a worker yet."""
        greeted = bool(host.hello)
        try:
            host.receive()
            if host.hello and not greeted:
                host.begin(self._part_of(host), self._stdin)
        except LaunchError as error:
            owner.off(host.fileno())
            self._drop(host, owner, str(error))
            return
        if host.ready:
            owner.off(host.fileno())
            self._serve(host, owner)

    def tick(self, now: float, wanted: Mapping[str, float], used: Collection[str]) -> float | None:
        """Connect to new hosts, give silent ones up, and finish those that are not wanted.

        Args:
            now: the monotonic time.
            wanted: the listed hosts, and from when on each may have workers.
            used: the hosts on which workers run.

        Returns:
            When to call this again; None if only events can change anything.
        """
        owner = self._owner
        assert owner is not None
        for name, when in wanted.items():
            if name not in self.hosts and max(when, self._retry_at.get(name, 0.0)) <= now:
                self._watch(self._connect(name), owner)
        if now > self._ticked_at + self._heartbeat / 2:
            # This process was stopped, or had no core, and reads before it calls others silent.
            self._awake_since = now
        self._ticked_at = now
        speaks = now >= self._alive_at
        if speaks:
            self._alive_at = now + self._heartbeat / 4
        for host in list(self.hosts.values()):
            self._look_after(host, owner, now, speaks)
            if host.name not in wanted and host.name not in used and host.serves:
                host.finish()
        later = [max(when, self._retry_at.get(name, 0.0)) for name, when in wanted.items()]
        times = [when for when in later if when > now]
        return min([*times, *([self._alive_at] if self.hosts else [])], default=None)

    def _look_after(self, host: AgentHost, owner: Owner, now: float, speaks: bool) -> None:
        if speaks and host.hello:
            host.send(frame(Kind.ALIVE))
        since = now - self._heartbeat
        if self._awake_since < since and host.silent(since):
            host.cut(f"it was silent for {self._heartbeat:g} s")
        elif not host.serves and now > host.deadline:
            owner.off(host.fileno())
            self._drop(host, owner, "it has not answered in time")

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        """End all agents; what is left on their hosts ends with them."""
        for host in self.hosts.values():
            host.finish()
        for host in self.hosts.values():
            host.close()
