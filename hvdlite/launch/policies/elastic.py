"""The policy of an elastic job: workers die, leave and join, and the job goes on.

The registrar decides who belongs to which epoch; this policy tells it who has ended, and does what
it asks for. A worker that dies is an event: its group is killed at once, because its children
(those of a DataLoader, for example) would live on; it is reaped, and its slot gets another worker
later. The job is over when no worker of the last epoch runs. It has succeeded if they all ended
well.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hvdlite.launch.control import AnyRank, Control, Next, Policy
from hvdlite.launch.description import Elastic, counted
from hvdlite.launch.elastic.actions import (
    Entered,
    EpochBegun,
    EpochFormed,
    Event,
    Evict,
    Failed,
    Goodbye,
    Leaving,
    Raised,
    Refused,
    Replace,
    Warn,
    Went,
)
from hvdlite.launch.elastic.discovery import Discovery
from hvdlite.launch.elastic.registrar import Registrar
from hvdlite.launch.hosts import Start
from hvdlite.launch.policies.fleet import Fleet
from hvdlite.launch.process import Ending
from hvdlite.launch.report import Failure
from hvdlite.launch.resources import oom_kills


class ElasticMembership(Policy):
    """Has the registrar decide which workers go on, and a fleet which ones are started."""

    noun = "worker"
    recovers = True
    story = 60.0

    def __init__(
        self,
        elastic: Elastic,
        min_np: int,
        fleet: Fleet,
        registrar: Registrar,
        discovery: Discovery,
    ) -> None:
        """Make the policy of a job without workers; all arguments are borrowed."""
        self._drain_timeout = elastic.drain_timeout
        self._min_np = min_np
        self._fleet = fleet
        self._registrar = registrar
        self._discovery = discovery
        self.members: tuple[int, ...] = ()  # the workers of the last epoch, in rank order
        self._trained: set[int] = set()  # workers that run and were members of an epoch
        self._went_at: dict[int, float] = {}  # This was the first sign that it has gone.
        self._formed = False  # whether the first epoch was formed
        self._ended_well: dict[int, bool] = {}  # These ended since the last epoch.
        self._drains: set[int] = set()  # workers that shall leave at the next boundary
        self._leaves: set[int] = set()  # workers that the registrar has told to leave
        self._goodbyes: set[int] = set()  # workers that have finished their work
        self._killed_after: dict[int, str] = {}  # Of these, how each was killed.
        self._over = False
        self._oom_kills = oom_kills()

    def attach(self, job: Control) -> None:
        """Take the supervisor, and listen to registrar and discovery."""
        super().attach(job)
        job.on(self._registrar.fd, self.take_events)
        job.on(self._discovery.fd, self._take_hosts)

    def begin(self, first: Sequence[Start]) -> None:
        """Take the first workers, which are the members until an epoch is formed."""
        self.members = tuple(start.worker for start in first)
        self._trained.update(self.members)

    def starting(self, start: Start) -> str:
        """Tell the registrar of a worker before it starts."""
        host = self.host_name(start.host)
        self._registrar.expect(start.worker, host, start.joiner)
        if not start.joiner and start.worker not in self.members:
            self.members += (start.worker,)
        return f"worker {start.worker} starts on {host}"

    def label(self, number: int) -> str:
        """Name a member by its rank, and another worker by its number."""
        self.take_events()  # It may have become a member a moment ago.
        if number in self.members:
            return str(self.members.index(number))
        return f"worker {number}"

    def host_name(self, host: str) -> str:
        """Name a host as reports do: this machine by its own name, whatever the list says."""
        return socket.gethostname() if self._discovery.here(host) else host

    def expects(self) -> bool:
        """Return whether the job waits for workers that come later."""
        return not (self._over or self.job.ending)

    def due(self, now: float) -> Sequence[Start]:
        """Return the workers to start now."""
        starts = self._fleet.due(now)
        for host in dict.fromkeys(one.host for one in starts):
            there = [str(one.worker) for one in starts if one.host == host]
            who = (
                f"worker {there[0]} starts"
                if len(there) == 1
                else f"workers {', '.join(there)} start"
            )
            self.job.say(f"{who} on {self.host_name(host)}")
        return starts

    def not_started(self, start: Start, error: OSError) -> None:
        """Note that a worker could not be started here."""
        self._registrar.ended(start.worker, f"could not be started: {error}", False)
        self._fleet.ended(start.worker, time.monotonic(), died=True, blames=True)

    def tick(self, now: float) -> float | None:
        """End a job that has too few slots."""
        if self.job.ending:
            return None
        shortage = self._fleet.shortage(now)
        if shortage is not None:
            self._fail(shortage)
        return self._fleet.wake_at(now)

    def ended(self, worker: AnyRank, ending: Ending, excused: bool) -> Next:
        """Note how a worker ended; the job goes on without it if it can."""
        number = worker.number
        self.take_events()  # A moment ago it may have become a member, or have been told to leave.
        leaves = number in self._leaves
        well = ending.well or leaves or number in self._drains
        kills, self._oom_kills = self._oom_kills, oom_kills()
        if ending.by_signal and self._oom_kills > kills:
            ending = replace(ending, oom_killed=True)
        if not (well or self.job.told):
            self.job.note(f"worker {number} (host {worker.host}): {died_of(ending)}")
        self._registrar.ended(number, died_of(ending), well)
        # It said goodbye before it ended, so the next epoch may have been formed without it.
        finished = ending.well and number in self._trained and not leaves
        asked = ending.by_signal and ending.status == signal.SIGTERM
        self._fleet.ended(
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
            self._fleet.stop_growing()
        if well or excused:
            return Next.GO_ON
        # No other worker can join before the first epoch.
        too_few = not self._formed and len(self._running()) < self._min_np
        return Next.FAIL if too_few else Next.RECOVER

    def _running(self) -> list[int]:
        return [number for number in self.members if number not in self._ended_well]

    def judge(self) -> None:
        """Decide whether the job is over, after one of the last epoch's workers has ended."""
        if self._running() or self.job.ending:
            return
        self._over = True
        if all(number in self._leaves for number in self.members):
            self._fail("all workers have left: their hosts were taken away")
        else:  # Workers that waited to join are not needed any more.
            well = self.all_well()
            for number in self.members if well else ():
                if number in self._killed_after:
                    self.job.say(
                        f"{self._killed_after[number]} after its goodbye, when its work was done, "
                        "and others have ended well: the job has not failed"
                    )
            self.job.finish(well)

    def signalled(self) -> None:
        """Tell the registrar that the workers are asked to stop."""
        self._registrar.stops()

    def all_well(self) -> bool:
        """Return whether all workers of the last epoch have ended well, or after a goodbye."""
        well = [number for number in self.members if self._ended_well.get(number, False)]
        return bool(well) and set(self.members) <= {*well, *self._killed_after}

    def _fail(self, reason: str) -> None:
        self._over = True
        again = "; start the job again from its checkpoint" if self._formed else ""
        self.job.fail(reason + again)

    def take_events(self) -> None:
        """Do what the registrar has asked for since the last call."""
        for event in self._registrar.take():
            self._follow(event)

    def _follow(self, event: Event) -> None:
        """Do what the registrar asks for."""
        if isinstance(event, EpochFormed):
            self.job.say(event.line)
            self.job.note(event.line)
        elif isinstance(event, EpochBegun):
            self._formed = True
            self.members = event.workers
            running = {one.number for one in self.job.workers}
            self._trained.update(running.intersection(event.workers))
            kept = running.union(event.workers)
            self._ended_well = {n: well for n, well in self._ended_well.items() if n in kept}
            self._leaves &= kept
            self._drains &= kept
            self.judge()
        elif isinstance(event, Evict):
            worker = self.job.runs(event.worker)
            if worker is not None:
                self.job.say(f"worker {event.worker} (host {worker.host}) is killed: {event.why}")
                self.job.kill(worker, f"evicted: {event.why}")
                self._fleet.lost(self._fleet.host_of(event.worker), time.monotonic())
        elif isinstance(event, Leaving):
            self._leaves.add(event.worker)
            self._fleet.leaving(event.worker)
            self.job.expect_end(event.worker, self._drain_timeout)
        elif isinstance(event, Raised):
            self.job.expect_end(event.worker, self._drain_timeout, event.what)
        elif isinstance(event, Went):
            self._went_at[event.worker] = event.at
        elif isinstance(event, Refused):
            self.job.say(f"worker {event.worker} cannot join: {event.reason}")
            self.job.note(f"worker {event.worker} cannot join: {event.reason}")
            self.job.expect_end(event.worker, self._drain_timeout)
        elif isinstance(event, Replace):
            self._fleet.replace_first()
        elif isinstance(event, Goodbye):
            self._goodbyes.add(event.worker)
        elif isinstance(event, Entered):
            self._fleet.entered()
        elif isinstance(event, Warn):
            self.job.say(event.text)
        elif isinstance(event, Failed):
            self._fail(event.reason)

    def _take_hosts(self) -> None:
        now = time.monotonic()
        for news in self._discovery.take():
            if news.warning:
                self.job.say(f"{news.warning}; the hosts stay as they were")
            if news.hosts is not None:
                leaving = self._fleet.offer(news.hosts, now)
                for name in self.hosts() if self.expects() else ():
                    agents = self.job.agents
                    self._fleet.reach(name, agents is not None and agents.serves(name))
                for number in leaving:
                    slots = news.hosts.get(self._fleet.host_of(number), 0)
                    left = (
                        f"has {counted(slots, 'slot')} now" if slots else "is not listed any more"
                    )
                    self._drain([number], f"its host {left}")

    def hosts(self) -> Mapping[str, float]:
        """Return the other hosts that may have workers, and from when on."""
        wanted = self._fleet.wanted.items()
        return {name: when for name, when in wanted if not self._discovery.here(name)}

    def host_ready(self, name: str) -> None:
        """Note that workers can be started on a host."""
        self._fleet.reach(name, True)

    def host_lost(self, name: str, why: str) -> None:
        """Put a host away whose connection is lost."""
        self._fleet.reach(name, False)
        if why and self.expects():
            self._fleet.lost(name, time.monotonic())

    def taken_away(self, name: str) -> bool:
        """Have the workers of a host leave."""
        self._drain(self._fleet.drain(name), "its host is taken away")
        return True

    def _drain(self, workers: Iterable[int], why: str) -> None:
        for number in workers:
            self._drains.add(number)
            self._registrar.drain(number, why)
            self.job.expect_end(number, self._drain_timeout)

    def suspects(self, failures: Sequence[Failure]) -> Sequence[Failure]:
        """Return the failures; the registrar says who went first, as in the lines about epochs."""
        return [replace(one, at=self._went_at.get(one.rank, one.at)) for one in failures]

    @property
    def strangers(self) -> bool:
        """Whether all workers have ended well, and none has asked for a first epoch."""
        return not self._formed and bool(self.job.workers) and self.all_well()


def died_of(ending: Ending) -> str:
    """Say how a worker ended, for the line of the next epoch."""
    if not ending.by_signal:
        return str(ending)
    memory = " (the kernel's out-of-memory killer)" if ending.oom_killed else ""
    return str(ending).replace("killed by", "died of") + memory
