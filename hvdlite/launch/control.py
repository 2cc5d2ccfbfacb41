"""What a kind of job decides (`Policy`), and what it can have done to the job (`Control`)."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from hvdlite.launch.agents import Agents
from hvdlite.launch.console import Console
from hvdlite.launch.hosts import Start
from hvdlite.launch.loop import GRACE, JobLoop, SignalInbox, Stop
from hvdlite.launch.process import Ending, Worker
from hvdlite.launch.remote_host import RemoteWorker
from hvdlite.launch.report import Failure
from hvdlite.launch.view import View

AnyRank: TypeAlias = Worker | RemoteWorker


@dataclass(frozen=True)
class Desk:
    """What a supervisor works with; all of it is borrowed."""

    console: Console  # shows the output
    inbox: SignalInbox  # receives signals to the launcher
    job_id: bytes  # the public number of the job, 16 bytes
    agents: Agents | None = None  # start and end ranks on other hosts; None in a job that has none
    timestamps: bool = False  # whether the time stands before each line
    reports: bool = True  # whether to show a report of the first failure
    grace: float = GRACE  # seconds from a signal to the launcher until its ranks are killed
    view: View | None = None  # takes the ranks' samples of themselves, and what happens to them


class Control(JobLoop[AnyRank]):
    """The part of the supervisor that a policy sees. Used by the loop's thread."""

    def __init__(self, desk: Desk) -> None:
        """Make the part for a job without processes."""
        super().__init__(desk.job_id)
        self._console = desk.console
        self._view = desk.view
        self.agents = desk.agents
        self.grace = desk.grace
        self.lost = False  # the job has failed
        self.signalled = 0  # the signal to the launcher that ends the job; 0 without one
        # These processes have to end: when each is killed, and how many seconds it got.
        self._kill_at: dict[int, tuple[float, float]] = {}
        self._killed: dict[int, str] = {}  # The report says why each was killed.
        self._raised: dict[int, str] = {}  # These end because of what they raised.

    @property
    def workers(self) -> Sequence[AnyRank]:
        """The processes that were started, without those that were released."""
        return self._workers

    @property
    def ending(self) -> bool:
        """Whether the job ends, so that nothing is started any more."""
        return self._stop is not None

    @property
    def told(self) -> bool:
        """Whether the ranks were told to end, so that it is not a failure when they do."""
        return self._stop is not None and self._stop.terminated

    def runs(self, number: int) -> AnyRank | None:
        """Return a process that runs."""
        return next(
            (one for one in self._workers if one.number == number and one.ending is None), None
        )

    def say(self, text: str) -> None:
        """Print a line of the launcher."""
        self._console.say(text)

    def note(self, text: str) -> None:
        """Tell the view, if there is one, what has happened to a rank."""
        if self._view is not None:
            self._view.note("worker", -1, text)

    def expect_end(self, number: int, seconds: float, raised: str = "") -> None:
        """Kill a process that does not end in time; `raised` is why it ends, for the report."""
        if self.runs(number) is None:
            return
        if raised:
            self._raised[number] = raised
        at = (time.monotonic() + seconds, seconds)
        self._kill_at[number] = min(self._kill_at.get(number, at), at)

    def kill(self, worker: AnyRank, why: str) -> None:
        """Kill a process; `why` is for the report."""
        self._killed[worker.number] = why
        worker.send_signal(signal.SIGKILL)

    def end_in(self, seconds: float = 0.0, grace: float = GRACE) -> None:
        """End all processes, unless that has been decided already."""
        if self._stop is None:
            at = time.monotonic() + seconds
            self._stop = Stop(at, at + grace)

    def call_off(self) -> None:
        """End nothing: all processes that `end_in` would end have ended."""
        if self._stop is not None and self._stop.status is None and not self.lost:
            self._stop = None

    def finish(self, well: bool) -> None:
        """End what still runs of a job that is over."""
        self.lost = not well
        if super().goes_on():
            self.end_in()

    def fail(self, reason: str) -> None:
        """End a job that cannot go on."""
        if not self.signalled:  # Otherwise the user has ended the job.
            self.say(reason)
        self.lost = True
        self.end_in()

    def _kill_late(self, now: float) -> None:
        for number, (at, seconds) in list(self._kill_at.items()):
            if at > now:
                continue
            del self._kill_at[number]
            for worker in [one for one in self._workers if one.number == number]:
                self.say(f"worker {number} has not ended in time, and is killed")
                raised = self._raised.get(number)
                if raised:
                    self._killed[number] = f"{raised}, and did not end within {seconds:g} s"
                worker.send_signal(signal.SIGKILL)


class Next(Enum):
    """What follows from the end of a process."""

    GO_ON = auto()  # it has not failed
    RECOVER = auto()  # it has failed, and the job goes on; `Policy.due` may say what starts instead
    FAIL = auto()  # it has failed, and so has the job


class Policy:
    """What one kind of job decides; the answers here are those of a job that starts nothing later.

    The supervisor calls all methods, and `attach` first.
    """

    noun = "rank"  # what the numbers of processes count
    recovers = False  # whether the job may go on without a process that has ended
    story = math.inf  # seconds before a failure in which an earlier one may be its cause
    job: Control

    def attach(self, job: Control) -> None:
        """Take the supervisor, which is borrowed."""
        self.job = job

    def begin(self, first: Sequence[Start]) -> None:
        """Take the processes with which the job starts."""

    def starting(self, start: Start) -> str:
        """Note that a process is about to be started; return what to tell of a joiner."""
        return ""

    def not_started(self, start: Start, error: OSError) -> None:
        """Note that a later process could not be started here."""

    def ended(self, worker: AnyRank, ending: Ending, excused: bool) -> Next:
        """Decide what follows from the end of a process; `excused` if it was told to end."""
        raise NotImplementedError

    def judge(self) -> None:
        """Decide whether the job is over, after the end of a process."""

    def tick(self, now: float) -> float | None:
        """Do what is due; return when to call this again, or None if only events matter."""
        return None

    def due(self, now: float) -> Sequence[Start]:
        """Return the processes to start now, besides the first ones."""
        return ()

    def expects(self) -> bool:
        """Return whether the job goes on although no process runs."""
        return False

    def left(self) -> None:
        """Note that no process runs any more, but perhaps children of one."""

    def signalled(self) -> None:
        """Note that the user has asked the job to stop."""

    def spares(self, number: int) -> bool:
        """Return whether a process gets such a signal of the user later, from this policy."""
        return False

    def hosts(self) -> Mapping[str, float]:
        """Return the other hosts on which processes may start later, and from when on."""
        return {}

    def host_ready(self, name: str) -> None:
        """Note that processes can be started on a host."""

    def host_lost(self, name: str, why: str) -> None:
        """Note that none can; the ends of its processes come one by one. `why` is "" at the end."""

    def taken_away(self, name: str) -> bool:
        """Have the processes of a host leave; return False if the whole job has to stop instead."""
        return False

    def noun_of(self, number: int) -> str:
        """Name what a number counts."""
        return self.noun

    def label(self, number: int) -> str:
        """Name what a number counts before a line of its output."""
        return str(number)

    def host_name(self, host: str) -> str:
        """Name a host in messages."""
        return host

    def suspects(self, failures: Sequence[Failure]) -> Sequence[Failure]:
        """Return the failures among which the one is that the others followed from."""
        return failures

    def remark(self, root: Failure) -> str:
        """Return what the report of a failure says besides."""
        return ""

    def all_well(self) -> bool:
        """Return whether no process has failed."""
        return all(one.ending is not None and one.ending.well for one in self.job.workers)
