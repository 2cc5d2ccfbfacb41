"""The agents of a job, which start and end its processes on other hosts.

`Agents` connects to hosts, also to those that are listed later, tells the loop what their agents
say, and gives up those that are silent. When a job starts, `await_hosts` decides which hosts take
part: a host that a script or a cluster's software lists may be dead, or busy, and the job does not
wait for it much longer than for the others, if these are enough.
"""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from hvdlite.launch.channels import AbsentError, LaunchError, RemoteLauncher
from hvdlite.launch.hosts import BackOff
from hvdlite.launch.messages import Kind, data_frame, frame
from hvdlite.launch.remote_host import RemoteHost, connect_deadline
from hvdlite.rendezvous.address import interface_address, interface_addresses

ALIVE_SECONDS = 3.0  # between messages that tell an agent that the launcher is alive
_LATE_SECONDS = 5.0  # after enough hosts have come; as many as these took, if that is longer
_LOOK_SECONDS = 1.0  # between looks at a host that cannot be reached yet


@dataclass(frozen=True)
class Pulse:
    """How launcher and agents watch each other. Times are in seconds."""

    heartbeat: float  # how long an agent may be silent; both sides speak four times in this time
    launcher_silence: float  # how long an agent may hear nothing before it ends its processes
    grace: float  # how long these then have, from SIGTERM to SIGKILL


class Owner(Protocol):
    """The loop that has the agents: what it offers them, and what they tell it."""

    # `on` watches a descriptor that can be read, and `off` ends that. A host is ready while
    # processes can be started there; a worker has started when its process id is known.
    def on(self, fd: int, call: Callable[[], None]) -> None: ...
    def off(self, fd: int) -> None: ...
    def host_ready(self, name: str) -> None: ...
    def host_lost(self, name: str, why: str) -> None: ...
    def host_signalled(self, name: str, number: int) -> None: ...
    def worker_started(self, number: int) -> None: ...


class Agents:
    """All other hosts of a job; a context manager. Used by the loop's thread."""

    def __init__(self, remote_launcher: RemoteLauncher, pulse: Pulse, interrupted_fd: int) -> None:
        self.hosts: dict[str, RemoteHost] = {}
        self._remote_launcher = remote_launcher
        self._pulse = pulse
        self._interrupted_fd = interrupted_fd
        self._owner: Owner  # from `attach` on
        self._part_of: Callable[[RemoteHost], dict[str, Any]] = lambda host: {}
        self._stdin: bytes | None = None
        self._alive_at = 0.0
        self._ticked_at = math.inf
        self._awake_since = -math.inf  # when `tick` was last called after a long pause
        self._failures: dict[str, BackOff] = {}

    def greet(
        self, names: Sequence[str], enough: Callable[[Collection[str]], bool]
    ) -> dict[str, str]:
        """Connect to hosts and wait until their agents have sent their hello, or enough of them.

        Returns, by name, why each host that does not come is given up; `tick` connects to it again.
        """
        for name in names:
            self._connect(name)
        hosts = list(self.hosts.values())
        missed = await_hosts(hosts, enough, self._remote_launcher, self._interrupted_fd)
        for name in missed:
            self._give_up(self.hosts[name])
        return missed

    @property
    def present(self) -> list[RemoteHost]:
        return [host for host in self.hosts.values() if host.hello]

    def begin(self, part_of: Callable[[RemoteHost], dict[str, Any]], stdin: bytes | None) -> None:
        """Give agents that have answered their part, and wait until they can start processes."""
        self._part_of, self._stdin = part_of, stdin
        hosts = self.present
        names = {host.name for host in hosts}
        for host in hosts:
            self._begin(host)
        await_hosts(
            hosts,
            names.issubset,
            self._remote_launcher,
            self._interrupted_fd,
            lambda host: host.ready,
            "prepared its part",
        )

    def _begin(self, host: RemoteHost) -> None:
        host.begin({**self._part_of(host), "pulse": asdict(self._pulse)}, self._stdin)

    def attach(self, owner: Owner) -> None:
        """Pass, from now on, what the agents say to the loop."""
        self._owner = owner
        for host in self.hosts.values():
            if host.ready:
                self._serve(host)
            else:
                self._watch(host)

    def serves(self, name: str) -> bool:
        return name in self.hosts and self.hosts[name].serves

    def _connect(self, name: str) -> RemoteHost:
        host = RemoteHost(name, self._remote_launcher)
        self.hosts[name] = host
        return host

    def _serve(self, host: RemoteHost) -> None:
        self._failures.pop(host.name, None)
        host.serve()
        self._owner.on(host.fd, lambda: self._take(host))
        self._owner.host_ready(host.name)

    def _take(self, host: RemoteHost) -> None:
        for kind, number in host.take():
            if kind == Kind.STARTED:
                self._owner.worker_started(number)
            elif kind == Kind.CAUGHT:
                self._owner.host_signalled(host.name, number)
            elif kind == Kind.DONE:
                self._owner.off(host.fd)
                self._drop(host, host.lost_because)
                return

    def _drop(self, host: RemoteHost, why: str) -> None:
        self._give_up(host)
        self._owner.host_lost(host.name, "" if host.closing else why)

    def _give_up(self, host: RemoteHost) -> None:
        """End the connection to a host, until `tick` makes another one after a while."""
        del self.hosts[host.name]
        self._failures.setdefault(host.name, BackOff()).failed(time.monotonic())
        host.close()

    def _watch(self, host: RemoteHost) -> None:
        self._owner.on(host.fileno(), partial(self._receive, host))

    def _receive(self, host: RemoteHost) -> None:
        """Receive from an agent that cannot start processes yet."""
        greeted = bool(host.hello)
        try:
            host.receive()
            if host.hello and not greeted:
                self._begin(host)
        except LaunchError as error:
            self._owner.off(host.fileno())
            self._drop(host, str(error))
            return
        if host.ready:
            self._owner.off(host.fileno())
            self._serve(host)

    def tick(self, now: float, wanted: Mapping[str, float], used: Collection[str]) -> float | None:
        """Connect to new hosts, give silent ones up, and close those that are not wanted.

        `wanted` has the hosts on which processes may be started later, and from when on. Returns
        when to call this again; None if only events can change anything.
        """
        failed = self._failures
        later = {n: max(w, failed[n].ready_at if n in failed else 0.0) for n, w in wanted.items()}
        for name, when in later.items():
            if name not in self.hosts and when <= now and self._remote_launcher.reachable(name):
                try:
                    self._watch(self._connect(name))
                except OSError as error:  # Nothing can be started here now.
                    failed.setdefault(name, BackOff()).failed(now)
                    self._owner.host_lost(name, str(error))
        heartbeat = self._pulse.heartbeat
        if now > self._ticked_at + heartbeat / 2:
            # This process was stopped, or had no core, and reads before it calls others silent.
            self._awake_since = now
        self._ticked_at = now
        speaks = now >= self._alive_at
        if speaks:
            self._alive_at = now + heartbeat / 4
        for host in list(self.hosts.values()):
            if speaks and host.hello:
                host.send(frame(Kind.ALIVE))
            since = now - heartbeat
            if self._awake_since < since and host.silent(since):
                host.cut(f"it was silent for {heartbeat:g} s")
            elif not host.serves and now > host.deadline:
                self._owner.off(host.fileno())
                self._drop(host, "it has not answered in time")
            if host.name not in wanted and host.name not in used and host.serves:
                host.finish()
        times = [when for when in later.values() if when > now]
        if any(name not in self.hosts and when <= now for name, when in later.items()):
            times.append(now + _LOOK_SECONDS)
        return min([*times, *([self._alive_at] if self.hosts else [])], default=None)

    def excuse(self, name: str) -> None:
        """Let the agent of a host end well before the job does, once no process runs there."""
        if name in self.hosts:
            self.hosts[name].send(data_frame(Kind.OUTCOME, 0, [0, ""]))

    def settle(self) -> None:
        """Have all agents kill what is left of the job on their hosts, and wait for their end."""
        for host in self.hosts.values():
            host.finish()
            host.kill()
        for host in self.hosts.values():
            host.settle()

    def conclude(self, status: int, why: str = "") -> None:
        """Tell the agents how the job has ended; those that wait for it end with this status."""
        for host in self.hosts.values():
            host.send(data_frame(Kind.OUTCOME, 0, [status, why]))

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """End all agents; what is left on their hosts ends with them."""
        if error is not None:
            interrupted = isinstance(error, KeyboardInterrupt)
            self.conclude(130 if interrupted else 1, "" if interrupted else str(error))
        for host in self.hosts.values():
            host.finish()
        for host in self.hosts.values():
            host.close()


def await_hosts(
    hosts: Sequence[RemoteHost],
    enough: Callable[[Collection[str]], bool],
    remote_launcher: RemoteLauncher,
    interrupted_fd: int,
    come: Callable[[RemoteHost], bool] = lambda host: bool(host.hello),
    what: str = "answered",
) -> dict[str, str]:
    """Receive from the agents until all have come, or enough and the rest is late.

    Returns, by name, why each host cannot be reached; those that are late may still come.

    Raises:
        AbsentError: a host that is needed cannot be reached, or takes too long.
        LaunchError: the job cannot run on a host, or one has another version of hvdlite.
        KeyboardInterrupt: a byte has come at `interrupted_fd`.
    """
    begun = time.monotonic()
    deadline = connect_deadline(remote_launcher)
    leave_at: float | None = None
    left = {host.name: host for host in hosts}
    missed: dict[str, str] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(interrupted_fd, selectors.EVENT_READ, None)
        for host in hosts:
            selector.register(host.fileno(), selectors.EVENT_READ, host)
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
            for key, _ in selector.select(min(until - now, ALIVE_SECONDS)):
                if key.data is None:
                    raise KeyboardInterrupt
                try:
                    key.data.receive()
                except AbsentError as error:
                    selector.unregister(key.data.fileno())
                    del left[key.data.name]
                    missed[key.data.name] = str(error)
                    if not enough(list(left)):
                        raise
    return missed


def keep_alive(hosts: Iterable[RemoteHost]) -> None:
    """Tell agents that have answered that the launcher is alive, while it waits for others."""
    for host in hosts:
        if host.hello:
            host.send(frame(Kind.ALIVE))


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


def route_to(address: str) -> str:
    """Return this host's address on the route to another one; connecting UDP sends no packet."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect((address, 9))
        return str(asked.getsockname()[0])
