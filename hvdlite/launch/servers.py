"""A job with parameter servers: its first ranks serve, and workers that die are started again.

All processes meet in the launcher's store, where servers publish their addresses. A worker that
dies is an event, as in an elastic job: its group is killed, and its rank gets another process later
(`slots`). A server that dies ends the job, because the parameters that it held are lost. Servers
usually end by themselves when no worker needs them any more; once the workers have ended, those
that are left get SIGTERM.

A signal to the launcher is passed on to the workers alone, which may still need the servers to
save what they have. The servers get SIGTERM when the last worker has ended.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence

from hvdlite.launch.console import Console
from hvdlite.launch.description import Description
from hvdlite.launch.hosts import Start
from hvdlite.launch.job import Job
from hvdlite.launch.loop import AnyRank, SignalInbox
from hvdlite.launch.output import View
from hvdlite.launch.process import Ending
from hvdlite.launch.report import Failure
from hvdlite.launch.slots import Slots
from hvdlite.launch.supervisor import Next
from hvdlite.rendezvous.environment import EXIT_STOPPED

_SERVERS_END = 5.0  # seconds that servers have to end by themselves when the workers have ended


class ServersJob(Job):
    recovers = True
    cause_seconds = 2.0

    def __init__(
        self, what: Description, console: Console, inbox: SignalInbox, view: View | None
    ) -> None:
        servers = what.servers
        assert servers is not None
        servers.check(what.ranks)
        super().__init__(what, console, inbox, view)
        self._servers = servers.count
        self._fewest = servers.min_workers
        workers = self.starts[servers.count :]
        self._total = len(workers)
        self._slots = Slots.of(workers, servers.restarts, time.monotonic())
        self._finished = 0  # how many workers have ended well
        self._serving = set(range(servers.count))  # the servers that have not ended
        self._left = 0  # the number of live workers when the job failed
        self._all_obeyed = True  # every process that was told to end has ended well

    def variables(self, start: Start) -> Mapping[str, str]:
        variables = {"HVDLITE_SERVERS": str(self._servers), "HVDLITE_WORKER": str(start.worker)}
        if start.joiner:
            variables["HVDLITE_JOINER"] = "1"
        return variables

    def met(self) -> bool:
        return True  # Workers need the servers, and no other rank.

    def order(self) -> tuple[int, ...]:
        return ()

    def start(self, start: Start) -> None:
        super().start(start)
        if start.joiner:
            self.supervisor.note(f"worker {start.worker} starts for rank {start.placement.rank}")

    def expects(self) -> bool:
        """Return whether the rank of a worker that died gets another one."""
        return not (self.supervisor.ending or self._done)

    @property
    def _done(self) -> bool:
        """Whether the training is over: no worker runs, and none is to be started."""
        return not (self._slots.size or self._slots.waits)

    @property
    def _live(self) -> int:
        """The number of workers that run, or have ended well."""
        return self._slots.size + self._finished

    def due(self, now: float) -> Sequence[Start]:
        for name in self.elsewhere:
            self._slots.reach(name, self.agents.serves(name))
        return self._slots.due(now)

    def not_started(self, start: Start, error: OSError) -> None:
        pause = self._slots.ended(start.worker, time.monotonic(), died=True, blames=False)
        self._tell(f"worker {start.worker} could not be started", pause)

    def noun_of(self, number: int) -> str:
        return "server" if number < self._servers else "worker"

    def tick(self, now: float) -> float | None:
        return self._slots.wake_at(now) if self.expects() else None

    def hosts(self) -> Mapping[str, float]:
        return dict.fromkeys(self.elsewhere, 0.0)

    def ended(self, worker: AnyRank, ending: Ending, excused: bool) -> Next:
        if worker.number < self._servers:
            return self._server_ended(worker.number, ending)
        pause = self._slots.ended(worker.number, time.monotonic(), not ending.well, blames=False)
        if ending.well:
            self._finished += 1
            self._slots.grows = False
        if ending.well or excused:
            self._all_obeyed &= ending.well
            return Next.GO_ON
        if self._live < self._fewest or self.supervisor.lost:
            return self._fail()
        if not self.supervisor.ending:
            self._tell(f"worker {worker.number} (host {worker.host}): {ending}", pause)
        return Next.RECOVER

    def _fail(self) -> Next:
        if not self.supervisor.lost:
            self._left = self._live
        return Next.FAIL

    def _tell(self, what: str, pause: float | None) -> None:
        """Say that the job goes on after the end of a worker, and whether its rank gets another."""
        then = "its rank gets no other one"
        if pause is not None:
            then = f"its rank gets another one in {pause:g} s"
        elif self._slots.grows:
            then += ", because its workers died too often (--worker-restarts)"
        goes_on = f"{self._live} of {self._total} workers go on or have finished"
        self.supervisor.tell(f"{what}; {goes_on}, and {then}")

    def _server_ended(self, number: int, ending: Ending) -> Next:
        supervisor = self.supervisor
        self._serving.discard(number)
        if self._workers_gone():
            asked = ending.code in (signal.SIGTERM, 128 + signal.SIGTERM) and supervisor.told
            well = ending.well or asked or supervisor.signalled or supervisor.lost
            return Next.GO_ON if well else self._fail()
        if supervisor.told:
            return Next.GO_ON
        if ending.stopped:
            supervisor.say(
                f"server {number} stopped by request (exit status {EXIT_STOPPED}): stopping "
                "the workers, too"
            )
            supervisor.stop_now(EXIT_STOPPED, signal.SIGTERM, supervisor.grace)
            return Next.GO_ON
        if ending.ok:  # Its workers have said goodbye, and may do something else before they end.
            self._slots.grows = False
            return Next.GO_ON
        return self._fail()

    def _workers_gone(self) -> bool:
        runs = any(one.number >= self._servers for one in self.supervisor.running)
        return not runs and (self._done or self.supervisor.ending)

    def judge(self) -> None:
        """Give the servers a while to end by themselves, if the workers have ended."""
        supervisor = self.supervisor
        if not self._workers_gone():
            return
        if not self._serving:
            supervisor.call_off()  # What processes have left gets the same moment as in any job.
        elif supervisor.signalled:
            for worker in supervisor.running:
                if worker.number < self._servers:
                    worker.send_signal(signal.SIGTERM)
        else:
            supervisor.end_in(_SERVERS_END, supervisor.grace)

    def spares(self, number: int) -> bool:
        """Return whether this is a server, which gets its signal from `judge`."""
        return number < self._servers

    def suspects(self, failures: Sequence[Failure]) -> Sequence[Failure]:
        servers = [one for one in failures if one.rank < self._servers and one.is_cause]
        return servers or failures

    def all_well(self) -> bool:
        return self._all_obeyed and not self.supervisor.lost

    def remark(self, root: Failure) -> str:
        if root.rank < self._servers or self._live >= self._fewest:
            return ""
        left = f"{self._left} of {self._total} workers were left"
        return f"hvdlite-run: {left}, fewer than --min-workers\n"
