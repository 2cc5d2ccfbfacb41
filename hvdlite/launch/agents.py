"""The agents of a job, which start and end its processes on other hosts.

`Agents` connects to hosts, also to those that are listed later, tells the loop what their agents
say, and gives up those that are silent. When a job starts, `greet` decides which hosts take part: a
host that a script or a cluster's software lists may be dead, or busy, and the job does not wait for
it much longer than for the others, if these are enough.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import hvdlite
from hvdlite.launch.channels import AbsentError, LaunchError, RemoteLauncher, last_line
from hvdlite.launch.hosts import BackOff, Start
from hvdlite.launch.messages import (
    Frame,
    FrameChannel,
    FrameReader,
    Kind,
    NoFrameError,
    data_frame,
    frame,
    watch_for,
)
from hvdlite.launch.output import StreamReader
from hvdlite.launch.process import LIVE, RESULT, STDERR, STDOUT, Ending
from hvdlite.rendezvous.address import interface_address, interface_addresses, route_to
from hvdlite.rendezvous.deadline import is_never

ALIVE_SECONDS = 3.0  # between messages that tell an agent that the launcher is alive
_LATE_SECONDS = 5.0  # after enough hosts have come; as many as these took, if that is longer
_LONGEST_GOODBYE = 5.0  # seconds that agents may take to end what is left
_LOOK_SECONDS = 1.0  # between looks at a host that cannot be reached yet
_LOST = 255  # status of a process when the connection to its host is lost; ssh uses it, too
_LONGEST_FRAME = 4 << 20  # the most bytes of a frame that an agent sends
_SINKS = {Kind.OUT: STDOUT, Kind.ERR: STDERR, Kind.RESULT: RESULT, Kind.LIVE: LIVE}


@dataclass(frozen=True)
class Pulse:
    """How launcher and agents watch each other. Times are in seconds."""

    heartbeat: float  # how long an agent may be silent; both sides speak four times in this time
    launcher_silence: float  # how long an agent may hear nothing before it ends its processes
    grace: float  # how long these then have, from SIGTERM to SIGKILL


class Owner(Protocol):
    """The loop that has the agents: what it offers them, and what they tell it."""

    @property
    def streams(self) -> StreamReader: ...  # of what the workers write

    # `on` watches a descriptor that can be read. A host is ready while processes can be started
    # there; a worker has started when its process id is known.
    def on(self, fd: int, call: Callable[[], None]) -> None: ...
    def host_ready(self, name: str) -> None: ...
    def host_lost(self, name: str, why: str) -> None: ...
    def host_signalled(self, name: str, number: int) -> None: ...
    def worker_started(self, worker: RemoteWorker) -> None: ...
    def ended(self, worker: RemoteWorker, ending: Ending) -> None: ...


class Agents(contextlib.AbstractContextManager["Agents"]):
    """All other hosts of a job; a context manager. Used by the loop's thread."""

    def __init__(self, remote_launcher: RemoteLauncher, pulse: Pulse, interrupted_fd: int) -> None:
        self.hosts: dict[str, RemoteHost] = {}
        self._remote_launcher = remote_launcher
        self._pulse = pulse
        self._interrupted_fd = interrupted_fd
        self._owner: Owner | None = None  # between `attach` and `settle`
        self._part_of: Callable[[RemoteHost], dict[str, Any]] | None = None  # from `begin` on
        self._stdin: bytes | None = None
        self._selector = selectors.DefaultSelector()
        self._listens = True  # whether what the agents say is read
        self._alive_at = 0.0
        self._ticked_at = -math.inf
        self._awake_since = -math.inf  # when `tick` was last called after a long pause
        self._failures: dict[str, BackOff] = {}

    # Before the loop.

    def greet(
        self, names: Sequence[str], enough: Callable[[Collection[str]], bool]
    ) -> dict[str, str]:
        """Connect to hosts and wait until their agents have sent their hello, or enough of them.

        Returns, by name, why each host that does not come is given up; `tick` connects to it again.
        """
        hosts = [self._connect(name) for name in names]
        return self._await(hosts, enough, lambda host: bool(host.hello), "answered")

    @property
    def present(self) -> list[RemoteHost]:
        return [host for host in self.hosts.values() if host.hello]

    def begin(self, part_of: Callable[[RemoteHost], dict[str, Any]], stdin: bytes | None) -> None:
        """Give agents that have answered their part, and wait until they can start processes."""
        self._part_of, self._stdin = part_of, stdin
        hosts = self.present
        for host in hosts:
            self._begin(host)
        names = {host.name for host in hosts}
        self._await(hosts, names.issubset, lambda host: host.ready, "prepared its part")

    def _begin(self, host: RemoteHost) -> None:
        """Give an agent its part of the job; it then checks whether it can start processes."""
        if self._part_of is None:
            return
        if self._stdin is not None:
            host.frames.send(frame(Kind.STDIN, body=self._stdin))
        host.frames.send(
            data_frame(Kind.PART, 0, {**self._part_of(host), "pulse": asdict(self._pulse)})
        )

    def _await(
        self,
        hosts: Sequence[RemoteHost],
        enough: Callable[[Collection[str]], bool],
        come: Callable[[RemoteHost], bool],
        what: str,
    ) -> dict[str, str]:
        """Wait until all these hosts have come, or enough and the rest is late.

        Returns, by name, why each host was given up; those that are late may still come.

        Raises:
            AbsentError: a host that is needed cannot be reached, or takes too long.
            LaunchError: the job cannot run on a host, or one has another version of hvdlite.
            KeyboardInterrupt: a byte has come at `interrupted_fd`.
        """
        begun = time.monotonic()
        deadline = connect_deadline(self._remote_launcher)
        leave_at: float | None = None
        left = {host.name: host for host in hosts}
        missed: dict[str, str] = {}
        while waiting := [name for name, host in left.items() if not come(host)]:
            now = time.monotonic()
            if leave_at is None and enough([name for name in left if name not in waiting]):
                leave_at = min(deadline, now + max(_LATE_SECONDS, now - begun))
            if leave_at is not None and now >= leave_at:
                break
            if now >= deadline:
                raise AbsentError(f"host {', '.join(waiting)} has not {what} in time")
            until = deadline if leave_at is None else leave_at
            keep_alive(left.values())
            for host, error in self._exchange(min(until - now, ALIVE_SECONDS), interruptible=True):
                if host.name in left and not isinstance(error, AbsentError):
                    raise error
                self._give_up(host)
                missed[host.name] = str(error)
                left.pop(host.name, None)
                if not enough(list(left)):
                    raise error
        return missed

    # What the agents say.

    def _exchange(
        self, seconds: float, interruptible: bool = False
    ) -> list[tuple[RemoteHost, LaunchError]]:
        """Send and receive what can be; return the hosts whose connection has ended, and why."""
        watch_for(
            self._selector, self._interrupted_fd, selectors.EVENT_READ if interruptible else 0
        )
        self._watch()
        ended = []
        for key, _ in self._selector.select(seconds):
            host: RemoteHost | None = key.data
            if host is None:
                raise KeyboardInterrupt
            if host.frames.gone:  # The other one of its descriptors has told that.
                continue
            try:
                for message in host.receive():
                    self._take(host, message)
            except (LaunchError, NoFrameError) as error:
                why = host.disturbed(error) if isinstance(error, NoFrameError) else error
                host.frames.gone = True
                self._end_workers(host, str(why))
                ended.append((host, why))
        return ended

    def _watch(self) -> None:
        for host in self.hosts.values():
            host.frames.watch(self._selector, self._listens, host)

    def _take(self, host: RemoteHost, message: Frame) -> None:
        owner, kind = self._owner, message.kind
        worker = host.workers.get(message.number)
        if kind == Kind.HELLO:
            host.greeted(message.data())
            self._begin(host)
        elif kind == Kind.REFUSED:
            why = message.body.decode(errors="replace")
            raise LaunchError(f"cannot start on host {host.name}: {why}")
        elif kind == Kind.READY:
            host.ready = True
            self._failures.pop(host.name, None)
            if owner is not None:
                owner.host_ready(host.name)
        elif kind == Kind.CAUGHT:
            # An agent that goes on after its processes, to learn how the job ends, gets signals.
            number = int(message.data())
            if owner is not None and host.ready:
                owner.host_signalled(host.name, number)
            elif not host.closing:
                name = signal.Signals(number).name
                raise LaunchError(f"host {host.name} got {name} before the ranks ran")
        elif kind == Kind.DONE:
            host.closed_well = True
            self._end_workers(host, "its agent has not told how it ended")
        elif worker is not None and owner is not None:
            self._take_about(worker, message, owner)

    def _take_about(self, worker: RemoteWorker, message: Frame, owner: Owner) -> None:
        if message.kind in _SINKS:
            owner.streams.feed(worker.number, _SINKS[message.kind], message.body)
        elif message.kind == Kind.STARTED:
            worker.pid = int(message.data())
            owner.worker_started(worker)
        elif message.kind == Kind.ENDED:
            ending = message.data()
            if not isinstance(ending, list) or len(ending) != 3:
                raise NoFrameError(repr(ending))
            status, by_signal, oom_killed = ending
            self._end_worker(worker, Ending(status, by_signal, oom_killed=oom_killed))

    def _end_workers(self, host: RemoteHost, why: str) -> None:
        host.over = True
        for worker in list(host.workers.values()):
            self._end_worker(worker, Ending(_LOST, by_signal=False, why=why), not host.closed_well)

    def _end_worker(self, worker: RemoteWorker, ending: Ending, lost: bool = False) -> None:
        if worker.ending is None:
            worker.ending, worker.lost = ending, lost
            if self._owner is not None:
                self._owner.ended(worker, ending)

    # While the loop runs.

    def attach(self, owner: Owner) -> None:
        """Pass, from now on, what the agents say to the loop."""
        self._owner = owner
        owner.on(self._selector.fileno(), self._turn)
        for host in self.hosts.values():
            if host.ready:
                owner.host_ready(host.name)

    def _turn(self) -> None:
        for host, error in self._exchange(0.0):
            self._drop(host, str(error))

    def serves(self, name: str) -> bool:
        return name in self.hosts and self.hosts[name].ready and not self.hosts[name].closing

    def _connect(self, name: str) -> RemoteHost:
        host = RemoteHost(name, self._remote_launcher)
        self.hosts[name] = host
        return host

    def _drop(self, host: RemoteHost, why: str) -> None:
        self._give_up(host)
        self._tell_lost(host.name, "" if host.closing else why)

    def _tell_lost(self, name: str, why: str) -> None:
        if self._owner is not None:
            self._owner.host_lost(name, why)

    def _give_up(self, host: RemoteHost) -> None:
        """End the connection to a host, until `tick` makes another one after a while."""
        del self.hosts[host.name]
        self._failures.setdefault(host.name, BackOff()).failed(time.monotonic())
        host.frames.gone = True
        host.frames.watch(self._selector, False, None)
        host.close()

    def tick(
        self, now: float, wanted: Mapping[str, float], used: Collection[str], listens: bool
    ) -> float | None:
        """Connect to new hosts, give silent ones up, and close those that are not wanted.

        `wanted` has the hosts on which processes may be started later, and from when on; `listens`
        says whether to read what the agents say. Returns when to call this again; None if only
        events can change anything.
        """
        failed = self._failures
        later = {n: max(w, failed[n].ready_at if n in failed else 0.0) for n, w in wanted.items()}
        for name, when in later.items():
            if name not in self.hosts and when <= now and self._remote_launcher.reachable(name):
                try:
                    self._connect(name)
                except OSError as error:  # Nothing can be started here now.
                    failed.setdefault(name, BackOff()).failed(now)
                    self._tell_lost(name, str(error))
        heartbeat = self._pulse.heartbeat
        if now > self._ticked_at + heartbeat / 2 or not (listens and self._listens):
            # This process was stopped, had no core or waited for a slow console: it reads before it
            # calls others silent.
            self._awake_since = now
        self._ticked_at = now
        speaks = now >= self._alive_at
        if speaks:
            self._alive_at = now + heartbeat / 4
        since = now - heartbeat
        for host in list(self.hosts.values()):
            if speaks and host.hello:
                host.frames.send(frame(Kind.ALIVE))
            silent = host.ready and not host.over and host.frames.heard_at < since
            if silent and self._awake_since < since:
                host.cut(f"it was silent for {heartbeat:g} s")
            elif not host.ready and now > host.deadline:
                self._drop(host, "it has not answered in time")
            if host.name not in wanted and host.name not in used and host.ready:
                host.finish()
        self._listens = listens
        self._watch()
        times = [when for when in later.values() if when > now]
        if any(name not in self.hosts and when <= now for name, when in later.items()):
            times.append(now + _LOOK_SECONDS)
        return min([*times, *([self._alive_at] if self.hosts else [])], default=None)

    def excuse(self, name: str) -> None:
        """Let the agent of a host end well before the job does, once no process runs there."""
        if name in self.hosts:
            self.hosts[name].frames.send(data_frame(Kind.OUTCOME, 0, [0, ""]))

    # After the loop.

    def settle(self) -> None:
        """Have all agents kill what is left of the job on their hosts, and wait for their end."""
        self._owner = None
        hosts = [host for host in self.hosts.values() if host.ready]
        for host in self.hosts.values():
            host.finish()
        for host in hosts:
            host.frames.send(data_frame(Kind.SIGNAL, 0, int(signal.SIGKILL)))
        for _ in range(2):
            self._exchange_until(lambda: all(host.over for host in hosts))
            for host in hosts:
                if not host.over:
                    host.cut("")

    def _exchange_until(self, done: Callable[[], bool]) -> None:
        """Send and receive until then, at most for some seconds."""
        self._listens = True
        deadline = time.monotonic() + _LONGEST_GOODBYE
        while not done() and (left := deadline - time.monotonic()) > 0:
            self._exchange(left)

    def conclude(self, status: int, why: str = "") -> None:
        """Tell the agents how the job has ended; those that wait for it end with this status."""
        for host in self.hosts.values():
            host.frames.send(data_frame(Kind.OUTCOME, 0, [status, why]))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """End all agents; what is left on their hosts ends with them."""
        if error is not None:
            interrupted = isinstance(error, KeyboardInterrupt)
            self.conclude(130 if interrupted else 1, "" if interrupted else str(error))
        for host in self.hosts.values():
            host.finish()
        hosts = [host for host in self.hosts.values() if host.ready]
        self._exchange_until(lambda: all(host.frames.gone for host in hosts))
        for host in self.hosts.values():
            host.close()
        self._selector.close()


def keep_alive(hosts: Iterable[RemoteHost]) -> None:
    """Tell agents that have answered that the launcher is alive, while it waits for others."""
    for host in hosts:
        if host.hello:
            host.frames.send(frame(Kind.ALIVE))


def rendezvous_address(hosts: Sequence[RemoteHost], interfaces: Sequence[str]) -> str | None:
    """Choose the address of the store: the one from which this host reaches the other hosts.

    Returns "host:0", or None for a fresh Unix socket when there is no other host.
    """
    if not hosts:
        return None
    if interfaces:
        return f"{interface_address(interfaces)}:0"
    routes = {host.name: route_to(host.address()) for host in hosts}
    addresses = set(routes.values())
    if len(addresses) > 1:
        names = {address: name for name, address in interface_addresses().items()}
        ways = ", ".join(
            f"{host} by {address} ({names.get(address, '?')})" for host, address in routes.items()
        )
        raise LaunchError(
            f"the hosts are reached by different network interfaces: {ways}; choose one that all "
            "hosts share with --network-interfaces"
        )
    return f"{addresses.pop()}:0"


class RemoteHost:
    """The connection to the agent on one other host, and the processes there."""

    # The loop's thread makes it: the process of a channel dies with the thread that started it.

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

    def launch(
        self, start: Start, environment: Mapping[str, str], more: Sequence[int]
    ) -> RemoteWorker:
        """Have the agent start a process, with these sinks besides STDOUT and STDERR."""
        worker = RemoteWorker(start.worker, self, more)
        self.workers[worker.number] = worker
        self.frames.send(data_frame(Kind.START, worker.number, dict(environment)))
        return worker

    def finish(self) -> None:
        """Tell the agent to end when its processes have, because no other is wanted there."""
        if not self.closing:
            self.closing = True
            self.frames.send(frame(Kind.CLOSE))

    def cut(self, why: str) -> None:
        """Give the connection up; its processes then count as lost."""
        self._cut_because = why
        self._channel.cut()

    def close(self) -> None:
        """End the channel; this may take seconds."""
        if not self.closed_well:
            self._channel.cut()
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
        self._host.frames.send(data_frame(Kind.SIGNAL, self.number, int(number)))

    def reap(self, at_end: bool = False) -> str | None:
        """Have the agent end what the process has left; complain at the job's end if it cannot."""
        self._host.frames.send(frame(Kind.FINISH, self.number))
        self._host.workers.pop(self.number, None)
        if not at_end or (self.ending is not None and not self.lost):
            return None
        return (
            f"rank {self.number} on {self.host} may still run: the connection is lost; it ends "
            "when the agent there notices"
        )
