"""A group of workers, one for each rank: how they start, meet, are called, and end."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvdlite.errors import BootstrapError, CollectiveError, RankFailedError
from hvdlite.launch.api import RemoteTraceback
from hvdlite.launch.call import Returned, unpack_error
from hvdlite.launch.output.report import root_failure
from hvdlite.ray.cluster import import_ray, ray_says
from hvdlite.ray.placement import Demand, Reservation
from hvdlite.ray.worker import Answer, Arrival, Worker
from hvdlite.rendezvous.assignments import JOB_ID_BYTES, TOKEN_BYTES, assignments

_CAUSE_SECONDS = 1.0  # after a cause, until the other ranks are not waited for any more
_CONSEQUENCE_SECONDS = 10.0  # after a consequence, until no cause is expected any more
_GOODBYE_SECONDS = 5.0  # Workers have this long to leave their world.


class Group:
    """Workers that have met; the driver's thread calls all methods."""

    def __init__(
        self,
        demand: Demand,
        env: Mapping[str, str],
        interfaces: Sequence[str] = (),
        meeting_timeout: float | None = None,
    ) -> None:
        """Start the workers, and give each its rank."""
        # `meeting_timeout` gives the seconds that `hvd.init()` waits for the other ranks; by
        # default as long as Ray may take.
        # Raises BootstrapError if Ray has no room for them, or has not started them in time.
        ray = import_ray()
        self._timeout = demand.timeout
        self._meeting_timeout = demand.timeout if meeting_timeout is None else meeting_timeout
        self._deadline = time.monotonic() + demand.timeout if demand.timeout else None
        self._reservation = Reservation(demand)
        self.actors: list[Any] = []  # They are in the order of ranks.
        try:
            remote = ray.remote(Worker)
            runtime = {"runtime_env": {"env_vars": dict(env)}} if env else {}
            for number in range(demand.workers):
                options = {**self._reservation.options(number), **runtime}
                self.actors.append(remote.options(**options).remote())
            self._meet(interfaces)
        except BaseException:
            self.end(at_once=True)
            raise

    def _meet(self, interfaces: Sequence[str]) -> None:
        """Number the workers, those of one node side by side, and give them their assignments."""
        arrivals: list[Arrival] = self._get([one.arrive.remote() for one in self.actors])
        nodes = list(dict.fromkeys(one.place.node for one in arrivals))
        order = sorted(range(len(arrivals)), key=lambda i: nodes.index(arrivals[i].place.node))
        self.actors = [self.actors[i] for i in order]
        self._arrivals = [arrivals[i] for i in order]
        places = [one.place for one in self._arrivals]
        token, job_id = secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(JOB_ID_BYTES)
        (store,) = self._get([self.actors[0].serve.remote(places, token, job_id)])
        pending = []
        for actor, assignment in zip(
            self.actors, assignments(places, store, token, job_id, epoch=0), strict=True
        ):
            own = replace(
                assignment,
                launcher="hvdlite.ray",
                interfaces=tuple(interfaces),
                start_timeout=self._meeting_timeout,
            )
            pending.append(actor.sit.remote(own, self._gpus_of(places[assignment.rank].node)))
        self._get(pending)

    def _gpus_of(self, node: str) -> list[str]:
        """List the GPUs that workers of a node have, in order of local ranks."""
        of_node = [one.gpus for one in self._arrivals if one.place.node == node]
        return list(dict.fromkeys(gpu for gpus in of_node for gpu in gpus))

    def _get(self, pending: Sequence[Any], seconds: float | None = None) -> list[Any]:
        ray = import_ray()
        if seconds is None and self._deadline is not None:
            seconds = max(0.1, self._deadline - time.monotonic())
        try:
            return list(ray.get(list(pending), timeout=seconds))
        except ray.exceptions.GetTimeoutError:
            raise BootstrapError(
                f"Ray has not started {len(self.actors)} workers within {self._timeout:g} s; "
                "`ray status` and the logs of the nodes say why; a longer start_timeout helps "
                "where workers are slow to start"
            ) from None
        except ray.exceptions.RayError as error:
            raise BootstrapError(
                f"a worker of hvdlite.ray could not be started: {error}; is hvdlite installed on "
                "every node of the cluster?"
            ) from error

    def submit(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all workers; return a reference to each result, by rank."""
        return [getattr(actor, method).remote(*arguments) for actor in self.actors]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all workers; return their results, or raise as `results` does."""
        return self.results(self.submit("answer", method, *arguments))

    def results(self, pending: Sequence[Any]) -> list[Any]:
        """Wait for all results, or raise the failure that caused the others."""
        # If a worker has died, or still runs although another one has failed, all workers end.
        # Otherwise they leave their world, so that they can be used again.
        # Raises RankFailedError if a worker died; otherwise what the rank that failed first raised,
        # with its traceback as the cause.
        ray = import_ray()
        rank_of = {ref: rank for rank, ref in enumerate(pending)}
        running, found = list(pending), dict[int, Any]()
        failures: list[Failure] = []
        until = math.inf
        while running:
            wait = None if until == math.inf else max(0.0, until - time.monotonic())
            done, running = ray.wait(running, num_returns=1, timeout=wait)
            if not done:
                break
            rank = rank_of[done[0]]
            try:
                answer: Answer = ray.get(done[0])
            except ray.exceptions.RayError as error:
                failures.append(self._no_answer(rank, error))
            else:
                found[rank] = answer.value
                if answer.raised is None:
                    continue
                failures.append(_raised(rank, answer.raised))
            until = min(until, failures[-1].at + failures[-1].window)
        if failures:
            self._recover(failures, bool(running))
            raise root_failure(failures).error
        return [found[rank] for rank in range(len(pending))]

    def _no_answer(self, rank: int, error: Any) -> Failure:
        """Describe the failure of a rank whose answer Ray does not have."""
        ray = import_ray()
        if isinstance(error, ray.exceptions.RayTaskError):  # The result cannot be pickled.
            return Failure(rank, error, died=False)
        arrival = self._arrivals[rank]
        died = RankFailedError(
            f"rank {rank} (pid {arrival.pid} on node {arrival.place.address}) ended before its "
            f"function returned; {ray_says(error)}"
        )
        died.failed_rank = rank
        died.__cause__ = error
        return Failure(rank, died, died=True)

    def _recover(self, failures: Sequence[Failure], some_run: bool) -> None:
        if some_run or any(one.died for one in failures):
            self.end(at_once=True)
            return
        try:
            self._get(self.submit("leave"), _GOODBYE_SECONDS)
        except BootstrapError:
            self.end(at_once=True)

    @property
    def ended(self) -> bool:
        """Whether there are no workers any more."""
        return not self.actors

    def end(self, at_once: bool = False) -> None:
        """End all workers."""
        # `at_once` says whether they do not get a moment to leave their world.
        ray = import_ray()
        pending = [] if at_once else self.submit("leave")
        actors, self.actors = self.actors, []
        if pending:
            ray.wait(pending, num_returns=len(pending), timeout=_GOODBYE_SECONDS)
        for actor in actors:
            ray.kill(actor)
        self._reservation.close()


@dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    rank: int
    error: BaseException  # what it raised, or what says that it died
    died: bool  # whether its worker died
    at: float = field(default_factory=time.monotonic)  # when the driver noticed it

    @property
    def is_cause(self) -> bool:
        """Whether this failure did not follow from that of another rank."""
        error = self.error
        return not isinstance(error, CollectiveError) or error.failed_rank == self.rank

    @property
    def window(self) -> float:
        """The seconds in which another failure may still turn out to be the cause."""
        return _CAUSE_SECONDS if self.is_cause else _CONSEQUENCE_SECONDS


def _raised(rank: int, returned: Returned) -> Failure:
    """Describe the failure of a rank that raised an exception."""
    error = unpack_error(returned)
    if error is None:
        error = RankFailedError(
            f"rank {rank} raised an exception that cannot be pickled; its traceback is above"
        )
        error.failed_rank = rank
    error.__cause__ = RemoteTraceback(f"rank {rank}:\n{returned.text}")
    return Failure(rank, error, died=False)
