"""The launcher's loop: it shows the output of all ranks, and ends the job as one.

There is one supervisor for all kinds of jobs. What differs is a `Policy`, which decides what
follows from the end of a process; the supervisor does it.

A failure goes like this. The first rank that fails starts a window (`Failure.window`). In this
window other ranks may still fail, and turn out to be the cause, or raise the error that hvdlite
gives them about the first one. Then all ranks get SIGTERM, and SIGKILL after `loop.GRACE`. The
report of the failure comes last. A signal to the launcher skips the window: the launcher passes the
signal on, and the ranks have the user's grace to save what they have.

A rank that ends with EXIT_STOPPED has not failed: it was asked to stop, and has saved what it has.
If no rank failed, that is then the status of the job.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto

from hvdlite.launch.agents import Agents, RemoteWorker
from hvdlite.launch.console import Console
from hvdlite.launch.description import counted
from hvdlite.launch.hosts import Start
from hvdlite.launch.loop import GRACE, PASSED_ON, AnyRank, JobLoop, SignalInbox, Stop
from hvdlite.launch.output import OutputPump, View
from hvdlite.launch.process import STDERR, STDOUT, Ending
from hvdlite.launch.report import Failure, describe, root_failure
from hvdlite.rendezvous.descriptors import explained
from hvdlite.rendezvous.environment import EXIT_STOPPED

_STATUS_OF_CLOSED_OUTPUT = 128 + signal.SIGPIPE
_HURRIED_DRAIN = 0.2  # seconds to write the rest of the output after a signal
_FIRST_NOTE = 2.0  # seconds after a signal until the launcher names the ranks that it waits for
_NOTE_SECONDS = 10.0  # seconds between later notes
_MOST_NAMED = 8  # a note lists at most so many ranks


class Next(Enum):
    GO_ON = auto()  # it has not failed
    RECOVER = auto()  # it has failed, and the job goes on; `Policy.due` may say what starts instead
    FAIL = auto()  # it has failed, and so has the job


class Policy:
    """What a kind of job decides; here for ranks of which the first failure ends the job.

    The supervisor calls all methods, and `attach` first.
    """

    noun = "rank"  # what the numbers of processes count
    recovers = False  # whether the job may go on without a process that has ended
    cause_seconds = math.inf  # before a failure, in which an earlier one may be its cause
    supervisor: Supervisor  # borrowed

    def attach(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor

    def start(self, start: Start) -> None:
        """Start a process, and pass it to `Supervisor.add`; OSError if it cannot start."""
        raise NotImplementedError

    def not_started(self, start: Start, error: OSError) -> None:
        """Note that a later process could not be started here."""

    def ended(self, worker: AnyRank, ending: Ending, excused: bool) -> Next:
        """Decide what follows from the end of a process; `excused` if it was told to end."""
        return Next.GO_ON if ending.well or excused else Next.FAIL

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
        return self.noun

    def label(self, number: int) -> str:
        """Name what a number counts before a line of its output."""
        return str(number)

    def host_name(self, host: str) -> str:
        return host

    def suspects(self, failures: Sequence[Failure]) -> Sequence[Failure]:
        """Return the failures among which the one is that the others followed from."""
        return failures

    def remark(self, root: Failure) -> str:
        """Return what the report of a failure says besides."""
        return ""

    def all_well(self) -> bool:
        return all(one.ending is not None and one.ending.well for one in self.supervisor.workers)


class Supervisor(JobLoop):
    """Runs one job, in the launcher, from its first rank to its last. Used by one thread.

    It borrows all it is given. `reports` says whether to show a report of the first failure.
    """

    streams: OutputPump

    def __init__(
        self,
        console: Console,
        inbox: SignalInbox,
        job_id: bytes,
        policy: Policy,
        agents: Agents | None = None,
        timestamps: bool = False,
        reports: bool = True,
        grace: float = GRACE,
        view: View | None = None,
    ) -> None:
        super().__init__(job_id)
        self._console, self._inbox = console, inbox
        self._policy = policy
        self._agents = agents
        self._reports = reports
        self._view = view
        self.streams = OutputPump(console, self.selector, timestamps, view, policy.label)
        self.grace = grace  # seconds from a signal to the launcher until its ranks are killed
        self.lost = False  # the job has failed
        self.signalled = 0  # the signal to the launcher that ends the job; 0 without one
        # These processes have to end: when each is killed, and how many seconds it got.
        self._kill_at: dict[int, tuple[float, float]] = {}
        self._killed: dict[int, str] = {}  # The report says why each was killed.
        self._raised: dict[int, str] = {}  # These end because of what they raised.
        self._unsaid: dict[int, str] = {}  # What to say of ranks without a process id.
        self._signalled_by: set[str] = set()  # hosts that got such a signal; "" is this one
        self._hurried = False  # the user did not want to wait: a second signal, or no grace
        self._note_at = 0.0  # monotonic time of the next note
        self._failures: list[Failure] = []
        self._asked: set[int] = set()  # who ended because they were asked to stop
        self._taken_away: set[str] = set()  # hosts whose agents got a signal
        self.on(inbox.fd, self._take_signals)
        self.on(console.wake_fd, self._console_changed)
        policy.attach(self)

    def add(
        self, worker: AnyRank, files: tuple[int, int] | None = None, said: str | None = None
    ) -> None:
        """Watch a rank and show its output; say `said` when its process, {} in it, is known.

        `files` has descriptors for copies of its stdout and stderr, which the supervisor then owns.
        """
        self.watch(worker)
        copies = dict(zip((STDOUT, STDERR), files or (), strict=False))
        for sink, pipe in worker.take_pipes().items():
            self.streams.open(worker.number, pipe, sink, copies.get(sink))
        if said is not None:
            self._unsaid[worker.number] = said
            if worker.pid:
                self.worker_started(worker)

    # What a policy asks.

    @property
    def ending(self) -> bool:
        """Whether the job ends, so that nothing is started any more."""
        return self._stop is not None

    @property
    def told(self) -> bool:
        """Whether the ranks were told to end, so that it is not a failure when they do."""
        return self._stop is not None and self._stop.terminated

    def runs(self, number: int) -> AnyRank | None:
        return next((one for one in self.running if one.number == number), None)

    def say(self, text: str) -> None:
        self._console.say(text)

    def note(self, text: str) -> None:
        """Tell the view, if there is one, what has happened to a rank."""
        if self._view is not None:
            self._view.note(text)

    def tell(self, text: str) -> None:
        """Say it, and tell the view."""
        self.say(text)
        self.note(text)

    def expect_end(self, number: int, seconds: float, raised: str = "") -> None:
        """Kill a process that does not end in time; `raised` is why it ends, for the report."""
        if self.runs(number) is None:
            return
        if raised:
            self._raised[number] = raised
        at = (time.monotonic() + seconds, seconds)
        self._kill_at[number] = min(self._kill_at.get(number, at), at)

    def kill(self, worker: AnyRank, why: str) -> None:
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
        if not self.signalled:  # Otherwise the user has ended the job.
            self.say(reason)
        self.lost = True
        self.end_in()

    # What the agents tell; see `agents.Owner`.

    def host_ready(self, name: str) -> None:
        self._taken_away.discard(name)
        self._policy.host_ready(name)

    def host_lost(self, name: str, why: str) -> None:
        """Say that a host is gone; the ends of its processes come one by one."""
        if why and self._policy.expects():
            self.say(f"host {name} takes no part now: {why}")
        self._policy.host_lost(name, why)

    def host_signalled(self, name: str, number: int) -> None:
        """Have the ranks of a host leave, or end them; otherwise the signal is one to all ranks."""
        if number != PASSED_ON and name in self._taken_away:
            for worker in [one for one in self.running if one.host == name]:
                worker.send_signal(signal.SIGTERM)
                self.expect_end(worker.number, GRACE)
        elif number != PASSED_ON and self._policy.taken_away(name):
            self._taken_away.add(name)
            self.say(f"host {name} is taken away ({_name(number)} to its agent)")
            if self._agents is not None:
                self._agents.excuse(name)
        else:
            self._take_signal(number, name)

    def worker_started(self, worker: AnyRank) -> None:
        """Say which process a rank is, if the user wants to know."""
        said = self._unsaid.pop(worker.number, None)
        if said is not None:
            where = f" on {worker.host}" if isinstance(worker, RemoteWorker) else ""
            self.say(said.replace("{}", f"pid {worker.pid}{where}", 1))

    def settle(self) -> None:
        if self._agents is not None:
            self._agents.settle()

    def ended(self, worker: AnyRank, ending: Ending) -> None:
        policy, number = self._policy, worker.number
        if policy.recovers and not ending.well:
            worker.send_signal(signal.SIGKILL)  # Its children would live on.
        killed, raised = self._killed.pop(number, ""), self._raised.pop(number, "")
        if raised and (killed or self.told):  # It failed before, with the status that Python has.
            ending = Ending(1, by_signal=False, why=killed or raised)
        elif killed:
            ending = replace(ending, why=killed)
        if ending.stopped:
            self._asked.add(number)
        excused = self.told and not (raised and not self.signalled)
        follows = policy.ended(worker, ending, excused)
        if follows is not Next.GO_ON:
            self._note_failure(worker, ending, follows)
        if policy.recovers:
            self.retire(worker, ending.well)
        self._kill_at.pop(number, None)
        policy.judge()

    def goes_on(self) -> bool:
        return super().goes_on() or self._policy.expects()

    def _clear_leftovers(self) -> None:
        self._policy.left()
        super()._clear_leftovers()

    def _note_failure(self, worker: AnyRank, ending: Ending, follows: Next) -> None:
        stderr = self.streams.last_words(worker.number)
        now = time.monotonic()
        failure = Failure(worker.number, worker.pid, ending, now, stderr, worker.host)
        self._failures.append(failure)
        if not self.lost:  # The job has survived earlier ones.
            since = now - self._policy.cause_seconds
            self._failures = [one for one in self._failures if one.at > since]
        if follows is not Next.FAIL:
            return
        self.lost = True
        at = failure.at + failure.window  # Until then its cause may come.
        if self._stop is None:
            self._stop = Stop(at, at + GRACE)
        elif self._stop.status is None and at < self._stop.terminate_at:
            self._stop.terminate_at, self._stop.kill_at = at, at + GRACE

    def _take_signals(self) -> None:
        for number in self._inbox.take():
            self._take_signal(number)

    def _take_signal(self, number: int, host: str = "") -> None:
        if number == PASSED_ON:
            self._signal(number)
            return
        if not self.signalled or self._stop is None:
            self.signalled = number
            self._stop_politely(number, host)
        elif host in self._signalled_by:
            self._hurried = True
            self._stop.kill_at = time.monotonic()
        # Batch systems signal all hosts at once, so each host's first signal is the same one.
        self._signalled_by.add(host)

    def _stop_politely(self, number: int, host: str) -> None:
        """Pass the user's signal on to the ranks, and give them the grace to save something."""
        # SIGINT is passed on as SIGINT, and every other signal as SIGTERM. After a failure, the job
        # ends as quickly as without a signal. A rank that ended by this same signal has not failed:
        # batch systems send a signal to all processes at once.
        self._policy.signalled()
        codes = [failure.ending.code for failure in self._failures]
        failed = self.lost and any(code != 128 + number for code in codes)
        grace = min(self.grace, GRACE) if failed else self.grace
        where = f" on host {host}" if host else ""
        self.say(
            f"{_name(number)}{where}: stopping {counted(len(self.running), self._policy.noun)} "
            "(again to kill them at once)"
        )
        self._hurried = grace == 0
        passed_on = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        self.stop_now(128 + number, passed_on, grace)
        self._note_at = time.monotonic() + _FIRST_NOTE

    def tick(self, now: float) -> float | None:
        policy = self._policy
        times = [self._note_waits(now), self.release_due(now)]
        if self._stop is None:
            for start in policy.due(now):
                self._start_later(start)
            self._kill_late(now)
            times += [at for at, _ in self._kill_at.values()]
        times.append(policy.tick(now))
        if self._agents is not None:
            wanted = policy.hosts() if policy.expects() else {}
            used = {worker.host for worker in self.running}
            times.append(self._agents.tick(now, wanted, used, not self.streams.full))
        return min((when for when in times if when is not None), default=None)

    def _start_later(self, start: Start) -> None:
        try:
            self._policy.start(start)
        except OSError as error:
            where = self._policy.host_name(start.host)
            self.say(f"cannot start worker {start.worker} on {where}: {explained(error)}")
            self._policy.not_started(start, error)

    def _kill_late(self, now: float) -> None:
        for number, (at, seconds) in list(self._kill_at.items()):
            if at > now:
                continue
            del self._kill_at[number]
            for worker in [one for one in self.workers if one.number == number]:
                self.say(f"worker {number} has not ended in time, and is killed")
                raised = self._raised.get(number)
                if raised:
                    self._killed[number] = f"{raised}, and did not end within {seconds:g} s"
                worker.send_signal(signal.SIGKILL)

    def _note_waits(self, now: float) -> float | None:
        """Once a signal came, print which ranks the launcher waits for."""
        stop = self._stop
        if stop is None or not self.signalled or stop.killed:
            return None
        if now >= self._note_at:
            self._note_at = now + _NOTE_SECONDS
            seconds = stop.kill_at - now
            up_to = "" if math.isinf(seconds) else f" up to {max(1, round(seconds))} s"
            self.say(
                f"waiting{up_to} for {self._those_left()}; "
                f"{_name(self.signalled)} again ends them at once"
            )
        return self._note_at

    def _signal(self, number: int) -> None:
        """Send a signal to all ranks; one that asks them to stop to some of them later."""
        if not self.signalled or number in (signal.SIGKILL, PASSED_ON):
            super()._signal(number)
            return
        for worker in reversed(self.workers):
            if not self._policy.spares(worker.number):
                worker.send_signal(number)
        self._policy.judge()

    def killing(self) -> None:
        if self.signalled and not self._hurried:
            self.say(f"the grace is over: killing {self._those_left()}")

    def _those_left(self) -> str:
        ranks = [worker.number for worker in self.running]
        return self._named(ranks) or f"processes that the {self._policy.noun}s started"

    def _named(self, ranks: Sequence[int]) -> str:
        by_noun: dict[str, list[int]] = {}
        for number in ranks:
            by_noun.setdefault(self._policy.noun_of(number), []).append(number)
        return " and ".join(_listed(noun, numbers) for noun, numbers in by_noun.items())

    def _console_changed(self) -> None:
        self._console.woken()
        self._take_signals()  # Ctrl-C also ends the reader in `hvdlite-run ... | tee log`.
        if self._console.broken and (self._stop is None or self._stop.status is None):
            self.stop_now(_STATUS_OF_CLOSED_OUTPUT)

    def conclude(self) -> int:
        """Show the report, wait for the console, and return the exit status of the launcher."""
        status = self._stop.status if self._stop is not None else None
        if status is None and self.root is not None:
            status = self.root.ending.code
            if self._reports:
                root = self.root
                text = describe(root, self._policy.noun_of(root.rank))
                self._console.write(STDERR, (text + self._policy.remark(root)).encode())
        elif self._asked and not self._console.broken and self._policy.all_well():
            status = EXIT_STOPPED
            self.say(
                f"{self._named(sorted(self._asked))} stopped by request (exit status "
                f"{EXIT_STOPPED}); the job has not failed: run it again to go on"
            )
        # All output is written, or a signal comes.
        if self._stop is not None and self._stop.status is not None:
            self._console.drained(_HURRIED_DRAIN)
        else:
            while not self._console.drained(0.1) and not self._inbox.take():
                pass
        return status or int(self.lost)

    @property
    def root(self) -> Failure | None:
        suspects = self._policy.suspects(self._failures)
        return root_failure(suspects) if self.lost and suspects else None


def _listed(noun: str, numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - _MOST_NAMED} more" if len(numbers) > _MOST_NAMED else ""
    named = ", ".join(map(str, numbers[:_MOST_NAMED]))
    return f"{noun}{'s' if len(numbers) > 1 else ''} {named}{more}"


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
