"""A group of workers, one for each rank: how they start, meet, are called, and end."""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdlite import basics
from hvdlite.errors import ArgumentError, BootstrapError, CollectiveError, RankFailedError
from hvdlite.launch.api import RemoteTraceback
from hvdlite.launch.call import Returned, pickled_error, unpack_error
from hvdlite.launch.report import root_failure
from hvdlite.rendezvous.assignments import Place, assignments, start_store
from hvdlite.rendezvous.environment import WorkerEnvironment, assign_rank, show_gpus
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.store import Store

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
        """Start the workers, and give each its rank.

        `meeting_timeout` gives the seconds that `hvd.init()` waits for the other ranks; by default
        as long as Ray may take.

        Raises:
            BootstrapError: Ray has no room for them, or has not started them in time.
        """
        ray = import_ray()
        self._timeout = demand.timeout
        self._meeting_timeout = demand.timeout if meeting_timeout is None else meeting_timeout
        self._deadline = time.monotonic() + demand.timeout if demand.timeout else None
        self._reservation = Reservation(demand)
        self.actors: list[Any] = []  # by rank; none when the group has ended
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
        workplaces: list[_Workplace] = self._get([one.describe.remote() for one in self.actors])
        nodes = list(dict.fromkeys(one.place.node for one in workplaces))
        order = sorted(range(len(workplaces)), key=lambda i: nodes.index(workplaces[i].place.node))
        self.actors = [self.actors[i] for i in order]
        self._workplaces = [workplaces[i] for i in order]
        places = [one.place for one in self._workplaces]
        job = Job.drawn()
        (store,) = self._get([self.actors[0].serve.remote(places, job)])
        pending = []
        settings = {
            "launcher": "hvdlite.ray",
            "interfaces": tuple(interfaces),
            "start_timeout": self._meeting_timeout,
        }
        for own in assignments(places, store, job, **settings):
            of_node = [one for one in self._workplaces if one.place.node == places[own.rank].node]
            gpus = list(dict.fromkeys(gpu for one in of_node for gpu in one.gpus))
            pending.append(self.actors[own.rank].assign.remote(own, gpus))
        self._get(pending)

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
        """Wait for all results, or raise the failure that caused the others.

        If a worker has died, or still runs although another one has failed, all workers end.
        Otherwise they leave their world, so that they can be used again.

        Raises:
            RankFailedError: a worker died.
            Exception: what the rank that failed first raised, with its traceback as the cause.
        """
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
                found[rank] = ray.get(done[0])
            except ray.exceptions.RayError as error:
                failures.append(self._no_answer(rank, error))
            else:
                if not isinstance(found[rank], Returned):
                    continue
                failures.append(_raised(rank, found[rank]))
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
        workplace = self._workplaces[rank]
        died = RankFailedError(
            f"rank {rank} (pid {workplace.pid} on node {workplace.place.address}) ended before its "
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
        return not self.actors

    def end(self, at_once: bool = False) -> None:
        """End all workers, `at_once` without a moment to leave their world."""
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
    """How one rank failed; for `root_failure`."""

    rank: int
    error: BaseException  # what it raised, or what says that it died
    died: bool  # whether its worker died
    at: float = field(default_factory=time.monotonic)  # when the driver noticed it
    is_shared = False  # The first of several equal errors is raised.

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
    error = unpack_error(returned)
    if error is None:
        error = RankFailedError(
            f"rank {rank} raised an exception that cannot be pickled; its traceback is above"
        )
        error.failed_rank = rank
    error.__cause__ = RemoteTraceback(f"rank {rank}:\n{returned.text}")
    return Failure(rank, error, died=False)


@dataclass(frozen=True)
class _Workplace:
    """What a worker says of itself when it has started."""

    place: Place
    pid: int
    gpus: tuple[str, ...]  # the numbers of the GPUs that Ray gave it


class Worker:
    """One rank. Ray calls its methods one after the other."""

    def __init__(self) -> None:
        self._store: Store | None = None  # in the worker of rank 0 alone
        self._rank = 0
        self._object: Any = None

    def describe(self) -> _Workplace:
        gpus = tuple(str(one) for one in import_ray().get_gpu_ids())
        return _Workplace(own_place(), os.getpid(), gpus)

    def serve(self, places: Sequence[Place], job: Job) -> str:
        """Serve the store until this worker ends; return its address."""
        self._store = start_store(places, job)
        return self._store.address

    def assign(self, assignment: WorkerEnvironment, gpus: Sequence[str]) -> None:
        """Take a rank, and see all GPUs of the workers of this node."""
        # Ray shows each worker its own alone. With those of its neighbours, local ranks number the
        # GPUs, as under any other launcher, and NCCL can use memory of the neighbours.
        self._rank = assignment.rank
        if gpus:
            show_gpus(gpus)
        assign_rank(assignment)

    def build(
        self, cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._object = self._run(cls, args, kwargs)

    def call(self, what: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]) -> Any:
        return self._run(*what)

    def execute(self, fn: Callable[[Any], Any]) -> Any:
        return self._run(fn, (self._object,), {})

    def answer(self, method: str, *arguments: Any) -> Any:
        """Call a method of this worker; return what it raises as `Returned`, with its traceback."""
        try:
            return getattr(self, method)(*arguments)
        except Exception as error:
            return Returned(error=pickled_error(error), text=traceback.format_exc())

    def leave(self) -> None:
        """Leave the world, so that the next `hvd.init()` makes a new one."""
        basics.shutdown()

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function, and tell the other ranks of an exception, as a script's end would."""
        try:
            return fn(*args, **kwargs)
        except SystemExit as error:  # For Ray it means that the actor ends as it should.
            basics.tell_peers(error)
            failure = RankFailedError(
                f"rank {self._rank} called sys.exit({error.code!r}) in a function that Ray runs; "
                "let the function return instead"
            )
            failure.failed_rank = self._rank
            raise failure from None
        except BaseException as error:
            basics.tell_peers(error)
            raise


_NO_LIMIT = 10**9  # seconds; Ray takes whole ones, and forgets fractions
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class Demand:
    workers: int
    cpus: float = 1
    gpus: float = 0
    strategy: str = "PACK"  # how Ray spreads them over nodes, as for `ray.util.placement_group`
    per_node: int | None = None  # if not None, every node gets exactly so many workers
    timeout: float = 60.0  # seconds that Ray has to reserve all of it; 0 for no limit
    # Whether workers take their part of the placement group in which the caller runs, if any.
    joins_current: bool = True

    def __post_init__(self) -> None:
        """Raise ArgumentError if a number is out of range."""
        if self.workers < 1:
            raise ArgumentError(f"num_workers={self.workers}: at least one worker is needed")
        if self.cpus < 0 or self.gpus < 0 or not self.cpus + self.gpus > 0:
            raise ArgumentError(
                f"cpus_per_worker={self.cpus}, gpus_per_worker={self.gpus}: Ray reserves nothing "
                "for such workers; give a positive number of one of them"
            )
        if self.strategy not in _STRATEGIES:
            raise ArgumentError(
                f"placement={self.strategy!r}: give one of {', '.join(_STRATEGIES)}"
            )
        if not self.timeout >= 0:
            raise ArgumentError(
                f"start_timeout={self.timeout}: give a number of seconds, or 0 for no limit"
            )

    def bundles(self) -> list[dict[str, float]]:
        """Return what is reserved together: for each worker, or for all of one node."""
        each = self.per_node or 1
        one = {"CPU": self.cpus * each, "GPU": self.gpus * each}
        bundle = {name: amount for name, amount in one.items() if amount}
        return [dict(bundle) for _ in range(self.workers // each)]


class Reservation:
    """A placement group: one of its own, which `close` removes, or that of the caller.

    Making one waits for it, and raises BootstrapError if that takes too long.
    """

    def __init__(self, demand: Demand) -> None:
        ray = import_ray()
        self._demand = demand
        current = ray.util.get_current_placement_group() if demand.joins_current else None
        self._owned = current is None or not self._fits(current)
        if not self._owned:
            self._group = current
            return
        strategy = "STRICT_SPREAD" if demand.per_node else demand.strategy
        self._group = ray.util.placement_group(demand.bundles(), strategy=strategy)
        try:
            if not self._group.wait(math.ceil(demand.timeout) or _NO_LIMIT):
                raise BootstrapError(self._why_not(ray))
        except BaseException:
            self.close()
            raise

    def _fits(self, group: Any) -> bool:
        """Return whether the caller's group has a bundle for each worker, beside the caller's."""
        context = import_ray().get_runtime_context()
        uses_first = any(context.get_assigned_resources().values())
        need = self._demand.bundles()[0]
        enough = [
            bundle
            for bundle in group.bundle_specs[1 if uses_first else 0 :]
            if all(bundle.get(name, 0) >= amount for name, amount in need.items())
        ]
        return self._demand.per_node is None and len(enough) >= self._demand.workers

    def _why_not(self, ray: Any) -> str:
        demand = self._demand
        every, free = ray.cluster_resources(), ray.available_resources()
        names = [name for name in ("CPU", "GPU") if demand.bundles()[0].get(name)]
        has = " and ".join(
            f"{every.get(name, 0):g} {name}s, of which {free.get(name, 0):g} are free"
            for name in names
        )
        wants = " and ".join(f"{demand.bundles()[0][name]:g} {name}s" for name in names)
        what = f"on each of {demand.workers // (demand.per_node or 1)} nodes"
        if demand.per_node is None:
            what = f"for each of {demand.workers} workers ({demand.strategy})"
        return (
            f"Ray has not reserved {wants} {what} within {demand.timeout:g} s: the cluster has "
            f"{has}. Ask for less, or for a longer start_timeout; in trials of Ray Tune, give "
            "TuneConfig a max_concurrent_trials for which the cluster has room"
        )

    def options(self, worker: int) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = worker // (self._demand.per_node or 1) if self._owned else -1
        return {
            "num_cpus": self._demand.cpus,
            "num_gpus": self._demand.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group,
                placement_group_bundle_index=bundle,
                placement_group_capture_child_tasks=True,
            ),
        }

    def close(self) -> None:
        """Give back what was reserved here; it is free when the actors have ended."""
        if self._owned:
            import_ray().util.remove_placement_group(self._group)


def import_ray() -> Any:
    """Import Ray; raise ImportError with a remedy if it is not installed."""
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ImportError(
            "hvdlite.ray needs Ray, which is not installed here; install it by "
            "pip install 'hvdlite[ray]', on every node of the cluster"
        ) from None
    return ray


def own_place() -> Place:
    """Return the node of the cluster on which this process runs, and its address."""
    ray = import_ray()
    return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def ray_says(error: BaseException) -> str:
    """Return what an exception of Ray says of an actor, in one sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    of_cause = [line for line in lines if line.startswith("The actor is dead because")]
    said = (of_cause or lines or [type(error).__name__])[0].split(". ")[0].rstrip(".")
    return f"Ray says: {said}"
