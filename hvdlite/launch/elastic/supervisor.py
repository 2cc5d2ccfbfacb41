"""The launcher's loop over an elastic job: workers die, leave and join, and the job goes on.

The registrar decides who belongs to which epoch; this loop tells it who has ended, and does what it
asks for. A worker that dies is an event: its group is killed at once, because its children (those
of a DataLoader, for example) would live on; it is reaped, and its slot gets another worker later.
The job is over when no worker of the last epoch runs. It has succeeded if they all ended well.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from hvdlite.launch.description import counted
from hvdlite.launch.elastic.actions import (
    Entered,
    EpochBegun,
    EpochFormed,
    Event,
    Evict,
    Failed,
    Leaving,
    Raised,
    Refused,
    Warn,
    Went,
)
from hvdlite.launch.elastic.discovery import Discovery
from hvdlite.launch.elastic.fleet import Fleet
from hvdlite.launch.elastic.registrar import Registrar
from hvdlite.launch.loop import GRACE, Stop
from hvdlite.launch.output.report import Failure
from hvdlite.launch.process.ending import Ending
from hvdlite.launch.process.inbox import PASSED_ON
from hvdlite.launch.process.starts import Start
from hvdlite.launch.process.stopped import StoppedWatch
from hvdlite.launch.supervisor import AnyRank, Desk, Supervisor

_RECENT = 60.0  # seconds before a failure in which another one may belong to the same story


@dataclass(frozen=True)
class Timing:
    """The user's times, in seconds."""

    heartbeat: float  # how long a worker may be stopped until it is evicted
    drain: float  # how long a worker that has to leave may take


class ElasticSupervisor(Supervisor):
    """Runs one elastic job, in the launcher. Used by one thread, which also starts the workers."""

    _noun = "worker"

    def __init__(
        self,
        desk: Desk,
        fleet: Fleet,
        registrar: Registrar,
        discovery: Discovery,
        timing: Timing,
        min_np: int,
    ) -> None:
        """Make a supervisor without workers; all arguments are borrowed."""
        super().__init__(desk)
        self._fleet = fleet
        self._registrar = registrar
        self._discovery = discovery
        self._timing = timing
        self._min_np = min_np
        self._members: tuple[int, ...] = ()  # the workers of the last epoch, in rank order
        self._trained: set[int] = set()  # workers that run and were members of an epoch
        self._went_at: dict[int, float] = {}  # by worker that has gone lately: the first sign of it
        self._formed = False  # whether the first epoch was formed
        self._ended_well: dict[int, bool] = {}  # by worker that has ended since the last epoch
        self._drains: set[int] = set()  # workers that shall leave at the next boundary
        self._leaves: set[int] = set()  # workers that the registrar has told to leave
        self._killed: dict[int, str] = {}  # by worker that was killed: why, for the report
        self._raised: dict[int, str] = {}  # by worker that is ending because of it: what it raised
        self._kill_at: dict[int, float] = {}  # by worker: when it has taken too long to end
        self._drained: set[str] = set()  # hosts whose agents got a signal
        self._stopped = StoppedWatch(timing.heartbeat)
        self._over = False
        self.on(registrar.fd, self._take_events)
        self.on(discovery.fd, self._take_hosts)

    @property
    def members(self) -> tuple[int, ...]:
        """The workers of the last epoch, in rank order."""
        return self._members

    def run_first(self, first: Sequence[Start], starter: Callable[[Start], None]) -> None:
        """Start the first workers and run the job to its end; see `Supervisor.run_first`."""
        self._members = tuple(start.worker for start in first)
        self._trained.update(self._members)
        super().run_first(first, starter)

    def start(self, start: Start) -> None:
        """Start one worker, of whom the registrar is told first."""
        self._registrar.expect(start.worker, self.host_name(start.host), start.joiner)
        super().start(start)
        if start.joiner:
            self.note(f"worker {start.worker} starts on {self.host_name(start.host)}")

    def host_name(self, host: str) -> str:
        """Name a host as reports do: this machine by its own name, whatever the list says."""
        return socket.gethostname() if self._discovery.here(host) else host

    def expects(self) -> bool:
        """Return whether the job waits for workers that come later."""
        return not self._over

    def due(self, now: float) -> Sequence[Start]:
        """Return the workers to start now."""
        return self._fleet.due(now)

    def not_started(self, start: Start, error: OSError) -> None:
        """Note that a worker could not be started here."""
        self._registrar.ended(start.worker, f"could not be started: {error}", False)
        self._fleet.ended(start.worker, time.monotonic(), died=True, blames=True)

    def tick(self, now: float) -> float | None:
        """Do what is due: start, evict, kill and reap workers; end a job that has too few slots."""
        times = [super().tick(now)]
        if self._stop is None:
            self._kill_late(now)
            shortage = self._fleet.shortage(now)
            if shortage is not None:
                self._fail(shortage)
            times += [self._fleet.wake_at(now), *self._kill_at.values()]
        return min((when for when in times if when is not None), default=None)

    def _kill_late(self, now: float) -> None:
        due = {number for number, when in self._kill_at.items() if when <= now}
        for worker in [one for one in self._workers if one.number in due]:
            self._console.say(f"worker {worker.number} has not ended in time, and is killed")
            if worker.number in self._raised:
                late = f"did not end within {self._timing.drain:g} s"
                self._killed[worker.number] = f"{self._raised[worker.number]}, and {late}"
            worker.signal_group(signal.SIGKILL)
        for number in due:
            del self._kill_at[number]

    def found_stopped(self, number: int) -> None:
        """Evict a worker that has been stopped for the heartbeat."""
        why = f"stopped (SIGSTOP?) for {self._timing.heartbeat:g} s"
        self._registrar.evict(number, why)

    def ended(self, worker: AnyRank, ending: Ending) -> None:
        """Note how a worker ended; the job goes on without it if it can."""
        number, now = worker.number, time.monotonic()
        if not ending.well:
            worker.signal_group(signal.SIGKILL)
        killed, raised = self._killed.pop(number, ""), self._raised.pop(number, "")
        if raised and (killed or self._told):  # It failed before, with the status that Python has.
            ending = Ending(1, by_signal=False, why=killed or raised)
        elif killed:
            ending = replace(ending, why=killed)
        self._take_events()  # A moment ago it may have become a member, or have been told to leave.
        leaves = number in self._leaves
        if ending.stopped:
            self._asked.add(number)
        well = ending.well or leaves or number in self._drains
        if not (well or self._told):
            self.note(f"worker {number} (host {worker.host}): {died_of(ending)}")
        self._registrar.ended(number, died_of(ending), well)
        # It said goodbye before it ended, so the next epoch may have been formed without it.
        finished = ending.well and number in self._trained and not leaves
        asked = ending.by_signal and ending.status == signal.SIGTERM
        self._fleet.ended(
            number,
            now,
            died=not (finished or leaves or number in self._drains),
            blames=not (well or asked),
        )
        caused = bool(raised) and not self._signalled
        failure = None if well or (self._told and not caused) else self._note_recent(worker, ending)
        self.retire(worker, ending.well)
        self._kill_at.pop(number, None)
        self._ended_well[number] = well
        self._trained.discard(number)
        if finished:
            self._fleet.stop_growing()
        self._judge(failure)

    def _note_recent(self, worker: AnyRank, ending: Ending) -> Failure:
        """Note a failure, and forget those of another story."""
        failure = self._note_failure(worker, ending)
        self._failures = [one for one in self._failures if one.at > failure.at - _RECENT]
        self._went_at = {n: at for n, at in self._went_at.items() if at > failure.at - _RECENT}
        return failure

    def _judge(self, failure: Failure | None) -> None:
        """Decide whether the job is over, after one of the last epoch's workers has ended."""
        running = [number for number in self._members if number not in self._ended_well]
        if failure is not None and not self._formed and len(running) < self._min_np:
            self._end_after(failure)  # No other worker can join before the first epoch.
        elif not running and self._stop is None:
            self._conclude_epoch()

    def _stop_politely(self, number: int, host: str) -> None:
        self._registrar.stops()
        super()._stop_politely(number, host)

    def _all_well(self) -> bool:
        return all(self._ended_well.get(number, False) for number in self._members)

    def _conclude_epoch(self) -> None:
        self._over = True
        if all(number in self._leaves for number in self._members):
            self._fail("all workers have left: their hosts were taken away")
            return
        self._lost = not all(self._ended_well[number] for number in self._members)
        if super().goes_on():  # Workers that waited to join are not needed any more.
            now = time.monotonic()
            self._stop = Stop(now, now + GRACE)

    def _fail(self, reason: str) -> None:
        if not self._signalled:  # Otherwise the user has ended the job.
            self._console.say(reason)
        self._lost = self._over = True
        if self._stop is None:
            now = time.monotonic()
            self._stop = Stop(now, now + GRACE)

    def _take_events(self) -> None:
        for event in self._registrar.take():
            self._follow(event)

    def _follow(self, event: Event) -> None:
        """Do what the registrar asks for."""
        if isinstance(event, EpochFormed):
            self._console.say(event.line)
            self.note(event.line)
        elif isinstance(event, EpochBegun):
            self._formed = True
            self._members = event.workers
            running = {one.number for one in self._workers}
            self._trained.update(running.intersection(event.workers))
            kept = running.union(event.workers)
            self._ended_well = {n: well for n, well in self._ended_well.items() if n in kept}
            self._leaves &= kept
            self._drains &= kept
            self._judge(None)
        elif isinstance(event, Evict):
            self._evict(event.worker, event.why)
        elif isinstance(event, Leaving):
            self._leaves.add(event.worker)
            self._fleet.leaving(event.worker)
            self._expect_end(event.worker)
        elif isinstance(event, Raised):
            if self._runs(event.worker):
                self._raised[event.worker] = event.what
            self._expect_end(event.worker)
        elif isinstance(event, Went):
            self._went_at[event.worker] = event.at
        elif isinstance(event, Refused):
            self._console.say(f"worker {event.worker} cannot join: {event.reason}")
            self.note(f"worker {event.worker} cannot join: {event.reason}")
            self._expect_end(event.worker)
        elif isinstance(event, Entered):
            self._fleet.entered()
        elif isinstance(event, Warn):
            self._console.say(event.text)
        elif isinstance(event, Failed):
            self._fail(event.reason)

    def _runs(self, number: int) -> bool:
        return any(one.number == number and one.ending is None for one in self._workers)

    def _evict(self, number: int, why: str) -> None:
        for worker in self._workers:
            if worker.number == number and worker.ending is None:
                self._console.say(f"worker {number} (host {worker.host}) is killed: {why}")
                self._killed[number] = f"evicted: {why}"
                worker.signal_group(signal.SIGKILL)
                self._fleet.lost(self._fleet.host_of(number), time.monotonic())

    def _expect_end(self, number: int) -> None:
        """Kill a worker that does not end by itself in the user's drain timeout."""
        if self._runs(number):
            self._kill_at.setdefault(number, time.monotonic() + self._timing.drain)

    def _take_hosts(self) -> None:
        now = time.monotonic()
        for news in self._discovery.take():
            if news.warning:
                self._console.say(f"{news.warning}; the hosts stay as they were")
            if news.hosts is not None:
                leaving = self._fleet.offer(news.hosts, now)
                for name in self.hosts_wanted():
                    self._fleet.reach(name, self._agents is not None and self._agents.serves(name))
                for number in leaving:
                    slots = news.hosts.get(self._fleet.host_of(number), 0)
                    left = (
                        f"has {counted(slots, 'slot')} now" if slots else "is not listed any more"
                    )
                    self._drain([number], f"its host {left}")

    def hosts_used(self) -> Collection[str]:
        """Return the hosts on which workers run."""
        return self._fleet.used

    def hosts_wanted(self) -> dict[str, float]:
        """Return the other hosts that may have workers, and from when on; none at the end."""
        if self._over or self._stop is not None:
            return {}
        wanted = self._fleet.wanted.items()
        return {name: when for name, when in wanted if not self._discovery.here(name)}

    def host_ready(self, name: str) -> None:
        """Note that workers can be started on a host."""
        self._drained.discard(name)
        self._fleet.reach(name, True)

    def host_lost(self, name: str, why: str) -> None:
        """Put a host away whose connection is lost; its workers' ends come one by one."""
        self._fleet.reach(name, False)
        if why and not (self._over or self._stop is not None):
            self._console.say(f"host {name} takes no part now: {why}")
            self._fleet.lost(name, time.monotonic())

    def host_signalled(self, name: str, number: int) -> None:
        """Have the workers of a host leave, because its agent got a signal; end them at another."""
        if number == PASSED_ON:
            super().host_signalled(name, number)
        elif name not in self._drained:
            self._drained.add(name)
            signal_name = signal.Signals(number).name
            self._console.say(f"host {name} is taken away ({signal_name} to its agent)")
            self._drain(self._fleet.drain(name), "its host is taken away")
            if self._agents is not None:
                self._agents.excuse(name)
        else:
            for worker in self._workers:
                if worker.host == name and worker.ending is None:
                    worker.signal_group(signal.SIGTERM)
                    self._kill_at[worker.number] = time.monotonic() + GRACE

    def _drain(self, workers: Iterable[int], why: str) -> None:
        for number in workers:
            self._drains.add(number)
            self._registrar.drain(number, why)
            self._expect_end(number)

    def suspects(self) -> Sequence[Failure]:
        """Return the failures; the registrar says who went first, as in the lines about epochs."""
        went_at = self._went_at
        return [replace(one, at=went_at.get(one.rank, one.at)) for one in self._failures]

    @property
    def strangers(self) -> bool:
        """Whether all workers have ended well, and none has asked for a first epoch."""
        return not self._formed and bool(self._workers) and self._all_well()

    def conclude(self) -> int:
        """Show the report, wait for the console, and return the exit status of the launcher."""
        self._take_events()
        return super().conclude()


def died_of(ending: Ending) -> str:
    """Say how a worker ended, for the line of the next epoch."""
    return str(ending).replace("killed by", "died of") if ending.by_signal else str(ending)
