"""An elastic job: its hosts may change, and workers die, leave and join while the job goes on.

`ElasticJob` finds the hosts, waits for slots, and starts the registrar, which takes the place of
the store. The registrar decides who belongs to which epoch; the job tells it who has ended, and
does what it asks for. A worker that dies is an event: its group is killed at once, because its
children (those of a DataLoader, for example) would live on; it is reaped, and its slot gets another
worker later. The job is over when no worker of the last epoch runs. It has succeeded if they all
ended well.
"""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvdlite.launch.agents import (
    ALIVE_SECONDS,
    Pulse,
    RemoteHost,
    keep_alive,
    rendezvous_address,
)
from hvdlite.launch.channels import LaunchError
from hvdlite.launch.console import Console
from hvdlite.launch.description import Description, Outcome, counted, threads_text
from hvdlite.launch.elastic import messages
from hvdlite.launch.elastic.discovery import Discovery, ScriptHosts, StaticHosts
from hvdlite.launch.elastic.registrar import Registrar
from hvdlite.launch.hosts import Host, HostProvider, Start, is_here, spread, threads_per_rank
from hvdlite.launch.job import Job
from hvdlite.launch.loop import AnyRank, SignalInbox
from hvdlite.launch.output import View
from hvdlite.launch.process import Ending
from hvdlite.launch.report import Failure
from hvdlite.launch.resources import available_cores
from hvdlite.launch.slots import Slots
from hvdlite.launch.supervisor import Next, Supervisor
from hvdlite.rendezvous.address import interface_address, route_to
from hvdlite.rendezvous.client import SILENT_HEARTBEATS
from hvdlite.rendezvous.deadline import is_never

_ANYWHERE = "192.0.2.1"  # an address that stands for any other network; nothing is sent to it
_START_TIMEOUT = 60.0  # seconds, as `hvd.init()` waits by default


class ElasticJob(Job):
    noun = "worker"
    recovers = True
    cause_seconds = 60.0

    def __init__(
        self, what: Description, console: Console, inbox: SignalInbox, view: View | None
    ) -> None:
        elastic = what.elastic
        assert elastic is not None
        elastic.check(what.ranks)
        super().__init__(what, console, inbox, view)
        # The epochs of such a job are those of its worlds.
        self.identity = replace(self.identity, epoch=0)
        self._elastic = elastic
        self._min_np = elastic.least(what.ranks)
        # The launcher has given silent workers up long before their agent kills them.
        heartbeat = elastic.elastic_heartbeat
        self.pulse = Pulse(heartbeat, SILENT_HEARTBEATS * heartbeat, grace=0.0)
        self._provider = self._choose_provider()
        self._slots = Slots(
            what.ranks,
            self._min_np,
            elastic.max_np,
            elastic.elastic_timeout,
            elastic.blacklist_cooldown_range,
        )
        self._discovery: Discovery
        self._registrar: Registrar
        self._threads_here = 1
        self._members: tuple[int, ...] = ()  # the workers of the last epoch, in rank order
        self._trained: set[int] = set()  # workers that run and were members of an epoch
        self._went_at: dict[int, float] = {}  # when the first sign came that a worker has gone
        self._formed = False  # whether the first epoch was formed
        self._ended_well: dict[int, bool] = {}  # These ended since the last epoch.
        self._drains: set[int] = set()  # workers that shall leave at the next boundary
        self._leaves: set[int] = set()  # workers that the registrar has told to leave
        self._goodbyes: set[int] = set()  # workers that have finished their work
        self._killed_after: dict[int, str] = {}  # of these, how each was killed
        self._over = False

    def _choose_provider(self) -> HostProvider:
        what, elastic = self.what, self._elastic
        if what.provider is not None:
            return what.provider
        if elastic.host_discovery_script is not None:
            return ScriptHosts(elastic.host_discovery_script, elastic.slots_per_host or 1)
        most = max(what.ranks, elastic.max_np or 0)
        hosts: Sequence[Host] = what.hosts or (Host("localhost", most),)
        spread(hosts, what.ranks)
        slots = sum(host.slots for host in hosts)
        if slots < (elastic.max_np or 0):
            self.console.say(
                f"--max-np {elastic.max_np} is more than the {slots} slots of the hosts, which "
                "limit the job"
            )
        return StaticHosts(hosts)

    def run(self) -> Outcome:
        asks = Discovery(
            self._provider,
            interrupt_fd=self.inbox.fd,
            is_here=self._is_here,
            start_timeout=self._start_timeout(),
        )
        with asks as self._discovery:
            return super().run()

    @property
    def _by_hand(self) -> bool:
        """Whether the user has named the hosts: then each has to come at first."""
        return self.what.provider is None and self._elastic.host_discovery_script is None

    def _is_here(self, name: str) -> bool:
        known = {host.name: host.here for host in self.what.hosts}.get(name)
        return self.what.provider is None and (is_here(name) if known is None else known)

    def _start_timeout(self) -> float:
        variables = self.what.environment
        given = variables.get("HVDLITE_START_TIMEOUT") or variables.get("HOROVOD_START_TIMEOUT")
        try:
            seconds = float(given or _START_TIMEOUT)
        except ValueError:
            return _START_TIMEOUT  # The workers refuse it, and name the variable.
        return 0.0 if is_never(seconds) else seconds

    def first(self) -> Sequence[Start]:
        """Wait until there are slots for the first workers, and all their hosts have answered."""
        discovery = self._discovery
        self._offer(discovery.first)
        waits = False
        while not (first := self._slots.due(time.monotonic())):
            if not waits:
                self.console.say("waiting for slots: there are too few to start")
                waits = True
            now = time.monotonic()
            shortage = self._slots.shortage(now)
            if shortage is not None:
                raise LaunchError(shortage)
            wake_at = self._slots.wake_at(now)
            left = ALIVE_SECONDS if wake_at is None else min(wake_at - now, ALIVE_SECONDS)
            keep_alive(self.agents.present)
            ready, _, _ = select.select([discovery.fd, self.inbox.fd], [], [], left)
            if self.inbox.fd in ready and self.inbox.take():
                raise KeyboardInterrupt
            for hosts in self._new_hosts():
                self._offer(hosts)
        self._members = tuple(start.worker for start in first)
        self._trained.update(self._members)
        return first

    def _offer(self, hosts: Mapping[str, int]) -> None:
        """Take hosts; those of whose agents nothing is heard are not needed now."""
        discovery, agents = self._discovery, self.agents
        others = [name for name in hosts if not discovery.here(name) and name not in agents.hosts]

        def enough(names: Collection[str]) -> bool:
            if self._by_hand:
                return set(others) <= set(names)
            slots = sum(n for name, n in hosts.items() if discovery.here(name) or name in names)
            return slots >= self._slots.fewest_first

        missed = agents.greet(others, enough)
        self._slots.offer(hosts, time.monotonic())
        present = [host.name for host in agents.present]
        for name in hosts:
            if not discovery.here(name):
                self._slots.reach(name, name in present)
        for name, why in missed.items():
            self.console.say(f"host {name} takes no part now: {why}")
        for name in agents.hosts:
            if name not in present:
                self.console.say(
                    f"host {name} has not answered yet; the job starts without it, and its ranks "
                    "join when it does"
                )

    def rendezvous(self) -> Registrar:
        elastic = self._elastic
        limits = messages.Limits(
            np=len(self.starts),
            min_np=self._min_np,
            max_np=elastic.max_np,
            elastic_timeout=elastic.elastic_timeout,
            reset_limit=elastic.reset_limit,
            heartbeat=elastic.elastic_heartbeat,
            silence=SILENT_HEARTBEATS * elastic.elastic_heartbeat,
            start_timeout=self._start_timeout(),
        )
        self._registrar = Registrar.start(self.identity, limits, self._address())
        return self._registrar

    def _address(self) -> str | None:
        """Choose where the registrar listens; None for a Unix socket, if no other host can come."""
        interfaces = self.what.interfaces
        if self.agents.present:
            return rendezvous_address(self.agents.present, interfaces)
        if self._by_hand:
            return None
        if interfaces:
            return f"{interface_address(interfaces)}:0"
        try:
            return f"{route_to(_ANYWHERE)}:0"
        except OSError:
            return None  # There is no network.

    def here(self, host: str) -> bool:
        return self._discovery.here(host)

    def part(self, host: RemoteHost) -> dict[str, Any]:
        # Raises LaunchError if the host cannot reach the registrar, which listens on a Unix socket.
        if self.address.startswith("unix:"):
            raise LaunchError(
                "the job began without a network; --network-interfaces names one for later hosts"
            )
        return super().part(host)

    def threads(self, host: str) -> int:
        if self.here(host):
            return self._threads_here
        cores = int(self.agents.hosts[host].hello["cores"])
        return threads_per_rank(cores, self._discovery.last.get(host, 1))

    def choose_threads(self) -> None:
        """Choose the threads of each worker here: a share of the cores for each slot."""
        slots_of = self._discovery.last
        here = sum(slots for name, slots in slots_of.items() if self.here(name))
        slots = max(1, min(here, self._elastic.max_np or here))
        self._threads_here = threads_per_rank(available_cores(), slots)
        if here:
            self.say_threads(threads_text(self._threads_here, available_cores(), slots))

    def variables(self, start: Start) -> Mapping[str, str]:
        return elastic_variables(start, self._elastic.elastic_heartbeat)

    def outcome(self) -> Outcome:
        self.take_events()
        return super().outcome()

    def met(self) -> bool:
        """Return False if all workers have ended well, and none has asked for a first epoch."""
        return self._formed or not self.supervisor.workers or not self.all_well()

    def order(self) -> tuple[int, ...]:
        return self._members

    # While the workers run.

    def attach(self, supervisor: Supervisor) -> None:
        super().attach(supervisor)
        supervisor.on(self._registrar.fd, self.take_events)
        supervisor.on(self._discovery.fd, self._take_hosts)

    def start(self, start: Start) -> None:
        host = self.host_name(start.host)
        self._registrar.expect(start.worker, host, start.joiner)
        if not start.joiner and start.worker not in self._members:
            self._members += (start.worker,)
        super().start(start)
        if start.joiner:
            self.supervisor.note(f"worker {start.worker} starts on {host}")

    def label(self, number: int) -> str:
        """Name a member by its rank, and another worker by its number."""
        self.take_events()  # It may have become a member a moment ago.
        if number in self._members:
            return str(self._members.index(number))
        return f"worker {number}"

    def host_name(self, host: str) -> str:
        """Name a host as reports do: this machine by its own name, whatever the list says."""
        return socket.gethostname() if self._discovery.here(host) else host

    def expects(self) -> bool:
        return not (self._over or self.supervisor.ending)

    def due(self, now: float) -> Sequence[Start]:
        starts = self._slots.due(now)
        for host in dict.fromkeys(one.host for one in starts):
            there = [str(one.worker) for one in starts if one.host == host]
            one = len(there) == 1
            who = f"worker{'' if one else 's'} {', '.join(there)} start{'s' if one else ''}"
            self.supervisor.say(f"{who} on {self.host_name(host)}")
        return starts

    def not_started(self, start: Start, error: OSError) -> None:
        self._registrar.ended(start.worker, f"could not be started: {error}", False)
        self._slots.ended(start.worker, time.monotonic(), died=True, blames=True)

    def tick(self, now: float) -> float | None:
        if self.supervisor.ending:
            return None
        shortage = self._slots.shortage(now)
        if shortage is not None:
            self._fail(shortage)
        return self._slots.wake_at(now)

    def ended(self, worker: AnyRank, ending: Ending, excused: bool) -> Next:
        number = worker.number
        self.take_events()  # A moment ago it may have become a member, or have been told to leave.
        leaves = number in self._leaves
        well = ending.well or leaves or number in self._drains
        if not (well or self.supervisor.told):
            self.supervisor.note(f"worker {number} (host {worker.host}): {died_of(ending)}")
        self._registrar.ended(number, died_of(ending), well)
        # It said goodbye before it ended, so the next epoch may have been formed without it.
        finished = ending.well and number in self._trained and not leaves
        asked = ending.by_signal and ending.status == signal.SIGTERM
        self._slots.ended(
            number,
            time.monotonic(),
            died=not (finished or leaves or number in self._drains),
            blames=not (well or asked),
        )
        self._ended_well[number] = well
        if number in self._goodbyes and ending.by_signal:
            self._killed_after[number] = f"worker {number} (host {worker.host}) {died_of(ending)}"
        self._trained.discard(number)
        if finished:
            self._slots.grows = False
        if well or excused:
            return Next.GO_ON
        # No other worker can join before the first epoch.
        too_few = not self._formed and len(self._running()) < self._min_np
        return Next.FAIL if too_few else Next.RECOVER

    def _running(self) -> list[int]:
        return [number for number in self._members if number not in self._ended_well]

    def judge(self) -> None:
        """Decide whether the job is over, after one of the last epoch's workers has ended."""
        if self._running() or self.supervisor.ending:
            return
        self._over = True
        if all(number in self._leaves for number in self._members):
            self._fail("all workers have left: their hosts were taken away")
        else:  # Workers that waited to join are not needed any more.
            well = self.all_well()
            for number in self._members if well else ():
                if number in self._killed_after:
                    self.supervisor.say(
                        f"{self._killed_after[number]} after its goodbye, when its work was done, "
                        "and others have ended well: the job has not failed"
                    )
            self.supervisor.finish(well)

    def signalled(self) -> None:
        self._registrar.stops()

    def all_well(self) -> bool:
        """Return whether all workers of the last epoch have ended well, or after a goodbye."""
        well = [number for number in self._members if self._ended_well.get(number, False)]
        return bool(well) and set(self._members) <= {*well, *self._killed_after}

    def _fail(self, reason: str) -> None:
        self._over = True
        again = "; start the job again from its checkpoint" if self._formed else ""
        self.supervisor.fail(reason + again)

    def take_events(self) -> None:
        for event in self._registrar.take():
            self._follow(event)

    def _follow(self, event: messages.Event) -> None:
        supervisor, drain_timeout = self.supervisor, self._elastic.drain_timeout
        match event:
            case messages.EpochFormed(line=line):
                supervisor.tell(line)
            case messages.EpochBegun(workers):
                self._begin_epoch(workers)
            case messages.Evict(number, why):
                worker = supervisor.runs(number)
                if worker is not None:
                    supervisor.say(f"worker {number} (host {worker.host}) is killed: {why}")
                    supervisor.kill(worker, f"evicted: {why}")
                    self._slots.lost(self._slots.host_of(number), time.monotonic())
            case messages.Leaving(number):
                self._leaves.add(number)
                self._slots.leaving(number)
                supervisor.expect_end(number, drain_timeout)
            case messages.Raised(number, what):
                supervisor.expect_end(number, drain_timeout, what)
            case messages.Went(number, at):
                self._went_at[number] = at
            case messages.Refused(number, reason):
                supervisor.tell(f"worker {number} cannot join: {reason}")
                supervisor.expect_end(number, drain_timeout)
            case messages.Replace():
                self._slots.replace_first()
            case messages.Goodbye(number):
                self._goodbyes.add(number)
            case messages.Entered():
                self._slots.entered()
            case messages.Warn(text):
                supervisor.say(text)
            case messages.Failed(reason):
                self._fail(reason)

    def _begin_epoch(self, members: tuple[int, ...]) -> None:
        self._formed = True
        self._members = members
        running = {one.number for one in self.supervisor.workers}
        self._trained.update(running.intersection(members))
        kept = running.union(members)
        self._ended_well = {n: well for n, well in self._ended_well.items() if n in kept}
        self._leaves &= kept
        self._drains &= kept
        self.judge()

    def _take_hosts(self) -> None:
        now = time.monotonic()
        for hosts in self._new_hosts():
            leaving = self._slots.offer(hosts, now)
            for name in self.hosts() if self.expects() else ():
                self._slots.reach(name, self.agents.serves(name))
            for number in leaving:
                slots = hosts.get(self._slots.host_of(number), 0)
                left = f"has {counted(slots, 'slot')} now" if slots else "is not listed any more"
                self._drain([number], f"its host {left}")

    def _new_hosts(self) -> Iterator[Mapping[str, int]]:
        """Give each answer of the provider that differs, and say why it fails if it does."""
        for news in self._discovery.take():
            if news.warning:
                self.console.say(f"{news.warning}; the hosts stay as they were")
            if news.hosts is not None:
                yield news.hosts

    def hosts(self) -> Mapping[str, float]:
        wanted = self._slots.wanted.items()
        return {name: when for name, when in wanted if not self._discovery.here(name)}

    def host_ready(self, name: str) -> None:
        self._slots.reach(name, True)

    def host_lost(self, name: str, why: str) -> None:
        self._slots.reach(name, False)
        if why and self.expects():
            self._slots.lost(name, time.monotonic())

    def taken_away(self, name: str) -> bool:
        self._drain(self._slots.drain(name), "its host is taken away")
        return True

    def _drain(self, workers: Iterable[int], why: str) -> None:
        for number in workers:
            self._drains.add(number)
            self._registrar.drain(number, why)
            self.supervisor.expect_end(number, self._elastic.drain_timeout)

    def suspects(self, failures: Sequence[Failure]) -> Sequence[Failure]:
        """Return the failures; the registrar says who went first, as in the lines about epochs."""
        return [replace(one, at=self._went_at.get(one.rank, one.at)) for one in failures]


def elastic_variables(start: Start, heartbeat: float) -> dict[str, str]:
    variables = {
        "HVDLITE_ELASTIC": "1",
        "HOROVOD_ELASTIC": "1",
        "HVDLITE_WORKER": str(start.worker),
        "HVDLITE_ELASTIC_HEARTBEAT": f"{heartbeat:g}",
    }
    if start.joiner:
        variables["HVDLITE_JOINER"] = "1"
    return variables


def died_of(ending: Ending) -> str:
    if not ending.by_signal:
        return str(ending)
    memory = " (the kernel's out-of-memory killer)" if ending.oom_killed else ""
    return str(ending).replace("killed by", "died of") + memory
