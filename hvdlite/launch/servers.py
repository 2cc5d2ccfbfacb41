"""The policy of a job with parameter servers: workers die and are started again.

The first ranks serve, and the others are workers. A worker that dies is an event, as in an elastic
job: its group is killed, and its rank gets another process later (`fleet`). A server that dies
ends the job, because the parameters that it held are lost. Servers usually end by themselves
when no worker needs them any more; once the workers have ended, those that are left get SIGTERM.

A signal to the launcher is passed on to the workers alone, which may still need the servers to
save what they have. The servers get SIGTERM when the last worker has ended.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping, Sequence

from hvdlite.launch.console import Console
from hvdlite.launch.description import Description, Outcome, Servers
from hvdlite.launch.hosts import Start
from hvdlite.launch.job import FixedRun
from hvdlite.launch.loop import SignalInbox
from hvdlite.launch.output import View
from hvdlite.launch.process import Ending
from hvdlite.launch.report import Failure
from hvdlite.launch.slots import Fleet
from hvdlite.launch.supervisor import AnyRank, Next, Policy, Supervisor
from hvdlite.rendezvous.environment import EXIT_STOPPED
from hvdlite.rendezvous.service import Service

_PATIENCE = 5.0  # seconds that servers have to end by themselves when the workers have ended


def kind_of(number: int, servers: int) -> str:
    """Name what the process of a number is."""
    return "server" if number < servers else "worker"


class RestartingWorkers(Policy):
    """Starts workers again, and lets the servers end after them."""

    recovers = True
    story = 2.0

    def __init__(
        self, servers: Servers, workers: Sequence[Start], elsewhere: Collection[str]
    ) -> None:
        """Make the policy of a job that starts with `workers`, some of them on other hosts."""
        self._servers = servers.count
        self._fewest = servers.min_workers
        self._total = len(workers)
        self._fleet = Fleet.of(workers, servers.restarts, time.monotonic())
        self._finished = 0  # how many workers have ended well
        self._elsewhere = elsewhere
        self._serving = set(range(servers.count))  # the servers that have not ended
        self._left = 0  # the number of live workers when the job failed
        self._all_obeyed = True  # every process that was told to end has ended well

    def starting(self, start: Start) -> str:
        """Say for which rank a worker starts."""
        return f"worker {start.worker} starts for rank {start.placement.rank}"

    def expects(self) -> bool:
        """Return whether the rank of a worker that died gets another one."""
        return not (self.job.ending or self._done)

    @property
    def _done(self) -> bool:
        """Whether the training is over: no worker runs, and none is to be started."""
        return not (self._fleet.size or self._fleet.waits)

    @property
    def _live(self) -> int:
        """The number of workers that run, or have ended well."""
        return self._fleet.size + self._finished

    def due(self, now: float) -> Sequence[Start]:
        """Return the workers to start now."""
        agents = self.job.agents
        for name in self._elsewhere:
            self._fleet.reach(name, agents is not None and agents.serves(name))
        return self._fleet.due(now)

    def not_started(self, start: Start, error: OSError) -> None:
        """Note that a worker could not be started here."""
        pause = self._fleet.ended(start.worker, time.monotonic(), died=True, blames=False)
        self._tell(f"worker {start.worker} could not be started", pause)

    def noun_of(self, number: int) -> str:
        """Name what the process of a number is."""
        return kind_of(number, self._servers)

    def tick(self, now: float) -> float | None:
        """Return when a worker is to be started."""
        return self._fleet.wake_at(now) if self.expects() else None

    def hosts(self) -> Mapping[str, float]:
        """Return the other hosts."""
        return dict.fromkeys(self._elsewhere, 0.0)

    def ended(self, worker: AnyRank, ending: Ending, excused: bool) -> Next:
        """Note how a process ended; the job goes on without a worker if it can."""
        if worker.number < self._servers:
            return self._server_ended(worker.number, ending)
        pause = self._fleet.ended(worker.number, time.monotonic(), not ending.well, blames=False)
        if ending.well:
            self._finished += 1
            self._fleet.stop_growing()
        if ending.well or excused:
            self._all_obeyed &= ending.well
            return Next.GO_ON
        if self._live < self._fewest or self.job.lost:
            return self._fail()
        if not self.job.ending:
            self._tell(f"worker {worker.number} (host {worker.host}): {ending}", pause)
        return Next.RECOVER

    def _fail(self) -> Next:
        if not self.job.lost:
            self._left = self._live
        return Next.FAIL

    def _tell(self, what: str, pause: float | None) -> None:
        """Say that the job goes on after the end of a worker, and whether its rank gets another."""
        then = "its rank gets no other one"
        if pause is not None:
            then = f"its rank gets another one in {pause:g} s"
        elif self._fleet.grows:
            then += ", because its workers died too often (--worker-restarts)"
        text = f"{what}; {self._live} of {self._total} workers go on or have finished, and {then}"
        self.job.say(text)
        self.job.note(text)

    def _server_ended(self, number: int, ending: Ending) -> Next:
        job = self.job
        self._serving.discard(number)
        if self._workers_gone():
            asked = ending.code in (signal.SIGTERM, 128 + signal.SIGTERM) and job.told
            well = ending.well or asked or job.signalled or job.lost
            return Next.GO_ON if well else self._fail()
        if job.told:
            return Next.GO_ON
        if ending.stopped:
            job.say(
                f"server {number} stopped by request (exit status {EXIT_STOPPED}): stopping "
                "the workers, too"
            )
            job.stop_now(EXIT_STOPPED, signal.SIGTERM, job.grace)
            return Next.GO_ON
        if ending.ok:  # Its workers have said goodbye, and may do something else before they end.
            self._fleet.stop_growing()
            return Next.GO_ON
        return self._fail()

    def _workers_gone(self) -> bool:
        """Return whether no worker runs, nor is to be started."""
        runs = any(one.number >= self._servers and one.ending is None for one in self.job.workers)
        return not runs and (self._done or self.job.ending)

    def judge(self) -> None:
        """Give the servers a while to end by themselves, if the workers have ended."""
        job = self.job
        if not self._workers_gone():
            return
        if not self._serving:
            job.call_off()  # What the processes have left gets the same moment as in any job.
        elif job.signalled:
            for worker in job.workers:
                if worker.number < self._servers and worker.ending is None:
                    worker.send_signal(signal.SIGTERM)
        else:
            job.end_in(_PATIENCE, job.grace)

    def spares(self, number: int) -> bool:
        """Return whether this is a server, which gets its signal from `judge`."""
        return number < self._servers

    def suspects(self, failures: Sequence[Failure]) -> Sequence[Failure]:
        """Return the failures of servers, rather than those of workers."""
        servers = [one for one in failures if one.rank < self._servers and one.is_cause]
        return servers or failures

    def all_well(self) -> bool:
        """Return whether every process that was told to end has ended well."""
        return self._all_obeyed and not self.job.lost

    def remark(self, root: Failure) -> str:
        """Return how many workers were left, if they were too few."""
        if root.rank < self._servers or self._live >= self._fewest:
            return ""
        left = f"{self._left} of {self._total} workers were left"
        return f"hvdlite-run: {left}, fewer than --min-workers\n"


class ServersRun(FixedRun):
    """One run of a description of a job with parameter servers; used once."""

    def __init__(
        self,
        what: Description,
        servers: Servers,
        console: Console,
        inbox: SignalInbox,
        view: View | None,
    ) -> None:
        """Check the description; `view` takes the processes' samples of themselves."""
        # Raises ArgumentError if numbers contradict each other.
        # Raises HostsError if the hosts have too few slots.
        servers.check(what.ranks)
        super().__init__(what, console, inbox, view)
        self._servers = servers

    def variables(self, start: Start) -> Mapping[str, str]:
        """Return the variables that tell a process about the servers."""
        variables = {
            "HVDLITE_SERVERS": str(self._servers.count),
            "HVDLITE_WORKER": str(start.worker),
        }
        if start.joiner:
            variables["HVDLITE_JOINER"] = "1"
        return variables

    def policy(self) -> Policy:
        """Return the policy."""
        servers = self._servers
        return RestartingWorkers(servers, self.starts[servers.count :], self.elsewhere)

    def outcome(self, supervisor: Supervisor, met: Service) -> Outcome:
        """Show how the job ended, and return it."""
        return Outcome(supervisor.conclude(), supervisor.root, supervisor.results)
