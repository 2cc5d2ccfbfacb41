"""The launcher's loop over a job with parameter servers: workers die and are started again.

The first ranks serve, and the others are workers. A worker that dies is an event, as in an elastic
job: its group is killed, and its rank gets another process later (`worker_ranks`). A server that
dies ends the job, because the parameters that it held are lost. Servers usually end by themselves
when no worker needs them any more; once the workers have ended, those that are left get SIGTERM.

A signal to the launcher is passed on to the workers alone, which may still need the servers to
save what they have. The servers get SIGTERM when the last worker has ended.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping, Sequence

from hvdlite.launch.loop import Stop
from hvdlite.launch.output.report import Failure
from hvdlite.launch.process.ending import Ending
from hvdlite.launch.process.inbox import PASSED_ON
from hvdlite.launch.process.starts import Start
from hvdlite.launch.servers.worker_ranks import WorkerRanks
from hvdlite.launch.supervisor import AnyRank, Desk, Supervisor
from hvdlite.stop_marks import EXIT_STOPPED

_PATIENCE = 5.0  # seconds that servers have to end by themselves when the workers have ended
_STORY = 2.0  # seconds before the end of a job in which a failure may be the cause of it


def kind_of(number: int, servers: int) -> str:
    """Name what the process of a number is."""
    return "server" if number < servers else "worker"


class ServersSupervisor(Supervisor):
    """Runs one job with parameter servers, in the launcher. Used by one thread."""

    def __init__(
        self, desk: Desk, servers: int, ranks: WorkerRanks, elsewhere: Collection[str]
    ) -> None:
        """Make a supervisor without processes; all arguments are borrowed."""
        super().__init__(desk)
        self._servers = servers
        self._ranks = ranks
        self._elsewhere = elsewhere
        self._serving = set(range(servers))  # the servers that have not ended
        self._left = 0  # the number of live workers at that moment
        self._all_obeyed = True  # every process that was told to end has ended well

    def start(self, start: Start) -> None:
        """Start one process."""
        super().start(start)
        if start.joiner:
            self.note(f"worker {start.worker} starts for rank {start.placement.rank}")

    def expects(self) -> bool:
        """Return whether the rank of a worker that died gets another one."""
        return not self._ranks.done

    def due(self, now: float) -> Sequence[Start]:
        """Return the workers to start now."""
        return self._ranks.due(now, self._usable)

    def not_started(self, start: Start, error: OSError) -> None:
        """Note that a worker could not be started here."""
        pause = self._ranks.ended(start.worker, time.monotonic(), well=False)
        self._tell(f"worker {start.worker} could not be started", pause)

    def noun_of(self, number: int) -> str:
        """Name what the process of a number is."""
        return kind_of(number, self._servers)

    def tick(self, now: float) -> float | None:
        """Do what is due, and wake up when a worker is to be started."""
        times = [super().tick(now), None if self._ends_now else self._ranks.wake_at(now)]
        return min((when for when in times if when is not None), default=None)

    def hosts_wanted(self) -> Mapping[str, float]:
        """Return the other hosts, unless nothing is started any more."""
        return {} if self._ends_now else dict.fromkeys(self._elsewhere, 0.0)

    @property
    def _ends_now(self) -> bool:
        """Whether nothing is started any more."""
        return self._stop is not None or self._ranks.done

    def _usable(self, host: str) -> bool:
        agents = self._agents
        return host not in self._elsewhere or (agents is not None and agents.serves(host))

    def ended(self, worker: AnyRank, ending: Ending) -> None:
        """Note how a process ended; the job goes on without a worker if it can."""
        if not ending.well:
            worker.signal_group(signal.SIGKILL)
        if ending.stopped:
            self._asked.add(worker.number)
        if worker.number < self._servers:
            self._server_ended(worker, ending)
        else:
            self._worker_ended(worker, ending)
        self.retire(worker, ending.well)
        if self._workers_gone():
            self._let_servers_end()

    def _worker_ended(self, worker: AnyRank, ending: Ending) -> None:
        pause = self._ranks.ended(worker.number, time.monotonic(), ending.well)
        if ending.well or self._told:
            self._all_obeyed &= ending.well
            return
        failure = self._note_failure(worker, ending)
        if self._ranks.lost or self._lost:
            self._lose(failure)
        elif self._stop is None:
            self._tell(f"worker {worker.number} (host {worker.host}): {ending}", pause)

    def _tell(self, what: str, pause: float | None) -> None:
        """Say that the job goes on after the end of a worker, and whether its rank gets another."""
        ranks = self._ranks
        then = "its rank gets no other one"
        if pause is not None:
            then = f"its rank gets another one in {pause:g} s"
        elif ranks.given_up:
            then += ", because its workers died too often (--worker-restarts)"
        text = f"{what}; {ranks.live} of {ranks.total} workers go on or have finished, and {then}"
        self._console.say(text)
        self.note(text)

    def _server_ended(self, worker: AnyRank, ending: Ending) -> None:
        self._serving.discard(worker.number)
        if self._workers_gone():
            asked = ending.code in (signal.SIGTERM, 128 + signal.SIGTERM) and self._told
            if not (ending.well or asked or self._signalled or self._lost):
                self._lose(self._note_failure(worker, ending))
            return
        if self._told:
            return
        if ending.stopped:
            self._console.say(
                f"server {worker.number} stopped by request (exit status {EXIT_STOPPED}): stopping "
                "the workers, too"
            )
            self.stop_now(EXIT_STOPPED, signal.SIGTERM, self._grace)
            return
        if ending.ok:  # Its workers have said goodbye, and may do something else before they end.
            self._ranks.stop_starting()
            return
        self._lose(self._note_failure(worker, ending))

    def _workers_gone(self) -> bool:
        """Return whether no worker runs, nor is to be started."""
        runs = any(one.number >= self._servers and one.ending is None for one in self._workers)
        return not runs and (self._ranks.done or self._stop is not None)

    def _let_servers_end(self) -> None:
        """Give the servers a while to end by themselves, because the workers have ended."""
        stop = self._stop
        if self._serving and self._signalled:
            self._signal_servers()
        elif self._serving and stop is None:
            at = time.monotonic() + _PATIENCE
            self._stop = Stop(at, at + self._grace)
        elif not self._serving and stop is not None and stop.status is None and not self._lost:
            self._stop = None  # What the processes have left gets the same moment as in any job.

    def _signal(self, number: int) -> None:
        """Send a signal to all processes; one that asks them to stop to the workers at first."""
        if number in (signal.SIGKILL, PASSED_ON) or not self._signalled:
            super()._signal(number)
            return
        for worker in reversed(self._workers):
            if worker.number >= self._servers:
                worker.signal_group(number)
        if self._workers_gone():
            self._signal_servers()

    def _signal_servers(self) -> None:
        for worker in self._workers:
            if worker.number < self._servers and worker.ending is None:
                worker.signal_group(signal.SIGTERM)

    def _lose(self, failure: Failure) -> None:
        """End the job because of a failure; earlier ones, which it has survived, do not count."""
        if not self._lost:
            self._left = self._ranks.live
            self._failures = [one for one in self._failures if one.at > failure.at - _STORY]
        self._end_after(failure)

    def suspects(self) -> Sequence[Failure]:
        """Return the failures of servers, rather than those of workers."""
        servers = [one for one in self._failures if one.rank < self._servers and one.is_cause]
        return servers or self._failures

    def _all_well(self) -> bool:
        return self._all_obeyed and not self._lost

    def _report(self, root: Failure) -> str:
        text = super()._report(root)
        ranks = self._ranks
        if root.rank >= self._servers and ranks.lost:
            left = f"{self._left} of {ranks.total} workers were left"
            text += f"hvdlite-run: {left}, fewer than --min-workers\n"
        return text

    def host_lost(self, name: str, why: str) -> None:
        """Say that a host is gone; the ends of its processes come one by one."""
        if why and not self._ends_now:
            self._console.say(f"host {name} takes no part now: {why}")
