"""`run` and `RayExecutor`: call functions on workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.errors import ArgumentError, UnsupportedError
from hvdlite.launch.description import elastic_job
from hvdlite.ray.elastic import run_elastic
from hvdlite.ray.group import Demand, Group, import_ray


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_workers: int | None = None,
    cpus_per_worker: float = 1,
    gpus_per_worker: float = 0,
    placement: str = "PACK",
    env: Mapping[str, str] | None = None,
    start_timeout: float = 60,
    **elastic: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on workers of a Ray cluster; return their results in rank order.

    Every rank is a new actor, in which the function calls `hvd.init()` as a script would. If
    `ray.init` was not called, Ray joins the cluster that RAY_ADDRESS names, or starts one here.

    Args:
        fn: the function; import frameworks inside it, or in a module that all nodes have.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_workers: the number of ranks. An elastic job starts with so many, by default with as
            many as there is room for.
        cpus_per_worker: the CPUs that Ray reserves for each rank.
        gpus_per_worker: the GPUs that Ray reserves for each rank; a rank also sees those of the
            other ranks of its node, so that `hvd.local_rank()` chooses one.
        placement: how Ray spreads the ranks over nodes: "PACK", "SPREAD", "STRICT_PACK" or
            "STRICT_SPREAD".
        env: variables of the ranks' environment.
        start_timeout: seconds that Ray has to reserve room and start the ranks, and then the ranks
            to find each other; 0 for no limit.
        **elastic: `min_np`, `max_np`, `reset_limit`, `blacklist_cooldown_range`, `elastic_timeout`,
            `elastic_heartbeat`, `drain_timeout`, as for `hvdlite.run`. The first or the second
            makes the job elastic: it grows and shrinks with Ray's nodes.

    Returns:
        The result of each rank; in an elastic job, of each rank of its last epoch.

    Raises:
        ImportError: Ray is not installed.
        ArgumentError: a number, or `placement`, cannot be used.
        BootstrapError: Ray has no room for the workers, or has not started them in time.
        RankFailedError: a worker died.
        Exception: the exception of the first failing rank, with its traceback as the cause.

    Example:
        >>> def number():
        ...     import hvdlite.torch as hvd
        ...     hvd.init()
        ...     return hvd.rank() * 10
        >>> run(number, num_workers=2)
        [0, 10]
    """
    changes = elastic_job(**elastic)
    if num_workers is None and changes is None:
        raise ArgumentError("give num_workers, or min_np and max_np for an elastic job")
    demand = Demand(
        1 if num_workers is None else num_workers,
        cpus_per_worker,
        gpus_per_worker,
        placement,
        timeout=start_timeout,
    )
    if changes is not None:
        return run_elastic(fn, args, kwargs or {}, demand, num_workers, changes, env or {})
    group = Group(demand, env or {})
    try:
        return group.call("call", shared_call(fn, args, kwargs))
    finally:
        if not group.ended:
            group.end()


def shared_call(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Any:
    """Put a call where every node fetches it once, whatever the number of its workers."""
    return import_ray().put((fn, tuple(args or ()), dict(kwargs or {})))


@dataclass(frozen=True)
class Settings:
    """What `RayExecutor.create_settings` returns.

    Attributes:
        timeout_s: seconds that the workers have to find each other.
        placement_group_timeout_s: seconds that Ray has to reserve room for them.
        nics: names of the network interfaces by which nodes reach each other.
    """

    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    nics: tuple[str, ...] = ()


class RayExecutor:
    """Workers of a Ray cluster that are called again and again, with Horovod's names.

    Args:
        settings: what `create_settings` returns.
        num_workers: the number of workers; give either this or `num_hosts`.
        num_hosts: the number of nodes, each with `num_workers_per_host` workers.
        num_workers_per_host: the workers of each node, with `num_hosts`.
        cpus_per_worker: the CPUs that Ray reserves for each worker.
        use_gpu: whether Ray reserves GPUs for the workers.
        gpus_per_worker: the GPUs of each worker; by default one, with `use_gpu`.
        use_current_placement_group: whether the workers take their place in the placement
            group in which the caller runs, if that has room for them.
        placement: how Ray spreads the workers over nodes, with `num_workers`.
        env: variables of the workers' environment.
        **elastic: Horovod's arguments for elastic workers, of which only None is accepted.

    Raises:
        ArgumentError: a number cannot be used, or arguments contradict each other.
        UnsupportedError: the workers were to be elastic.

    Example:
        >>> executor = RayExecutor(num_workers=2)
        >>> executor.start()
        >>> executor.run(number)
        [0, 10]
        >>> executor.shutdown()
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Sequence[str] | None = None,
        **others: Any,
    ) -> Settings:
        """Return settings for the constructor.

        Args:
            timeout_s: seconds that the workers have to find each other.
            ssh_identity_file: only None is accepted: no ssh is needed.
            ssh_str: only None is accepted.
            placement_group_timeout_s: seconds that Ray has to reserve room for the workers.
            nics: names of the network interfaces by which nodes reach each other.
            **others: only `verbose`, which changes nothing.

        Raises:
            UnsupportedError: an argument cannot be used.
        """
        given = {"ssh_identity_file": ssh_identity_file, "ssh_str": ssh_str, **others}
        for name, value in given.items():
            if value is not None and name != "verbose":
                raise UnsupportedError(
                    f"RayExecutor.create_settings({name}=...): workers are started by Ray alone; "
                    "leave it out"
                )
        return Settings(timeout_s, placement_group_timeout_s, tuple(nics or ()))

    def __init__(
        self,
        settings: Settings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        *,
        placement: str = "PACK",
        env: Mapping[str, str] | None = None,
        **elastic: Any,
    ) -> None:
        for name, value in elastic.items():
            if value is not None:
                raise UnsupportedError(
                    f"RayExecutor({name}=...): its workers are as many as num_workers says; for a "
                    "job that grows and shrinks use hvdlite.ray.run(min_np=, max_np=), or "
                    "HvdliteTrainer with ScalingConfig(num_workers=(min, max))"
                )
        if bool(num_workers) == bool(num_hosts):
            raise ArgumentError("RayExecutor: give either num_workers or num_hosts")
        if gpus_per_worker and not use_gpu:
            raise ArgumentError("RayExecutor: gpus_per_worker needs use_gpu=True")
        if num_workers_per_host < 1:
            raise ArgumentError(
                f"num_workers_per_host={num_workers_per_host}: at least one worker is needed"
            )
        self._settings = settings or Settings()
        self._demand = Demand(
            num_workers or (num_hosts or 0) * num_workers_per_host,
            cpus_per_worker,
            (1 if gpus_per_worker is None else gpus_per_worker) if use_gpu else 0,
            placement,
            per_node=num_workers_per_host if num_hosts else None,
            timeout=max(self._settings.placement_group_timeout_s, self._settings.timeout_s),
            joins_current=use_current_placement_group,
        )
        self._env = dict(env or {})
        self._group: Group | None = None

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the workers, and make an object in each.

        Args:
            executable_cls: the class of the objects that `execute` works on.
            executable_args: positional arguments of the class.
            executable_kwargs: keyword arguments of the class.
            extra_env_vars: more variables of the workers' environment.

        Raises:
            ArgumentError: the workers run already.
            BootstrapError: Ray has no room for the workers, or has not started them in time.
            Exception: what the class raised, with its traceback as the cause.
        """
        if self._group is not None and not self._group.ended:
            raise ArgumentError("RayExecutor.start(): its workers run; call shutdown() first")
        self._group = Group(
            self._demand,
            {**self._env, **(extra_env_vars or {})},
            self._settings.nics,
            self._settings.timeout_s,
        )
        if executable_cls is not None:
            arguments = tuple(executable_args or ()), dict(executable_kwargs or {})
            try:
                self._group.call("build", executable_cls, *arguments)
            except BaseException:
                self.shutdown()
                raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on all workers; return the results in rank order.

        The workers stay: a world that the function has made goes on in the next call.

        Args:
            fn: the function; it and its arguments travel by cloudpickle.
            args: its arguments by position.
            kwargs: its arguments by name.

        Raises:
            ArgumentError: the workers do not run.
            RankFailedError: a worker died. The others have ended, too; call `start` again.
            Exception: the exception of the first failing rank, with its traceback as the cause.
        """
        return self._running().call("call", shared_call(fn, args, kwargs))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function on all workers, and do not wait; arguments as for `RayExecutor.run`.

        Returns:
            A reference to each result, for `ray.get`, in rank order.
        """
        return self._running().submit("call", shared_call(fn, args, kwargs))

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call `fn` on all workers with the object that `start` made; return all results.

        Args:
            fn: the function, which gets the object as its only argument.
        """
        return self._running().call("execute", fn)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn` with rank 0's object; return its result. Otherwise as `RayExecutor.execute`."""
        group = self._running()
        return group.results([group.actors[0].answer.remote("execute", fn)])[0]

    def shutdown(self) -> None:
        """End the workers."""
        if self._group is not None and not self._group.ended:
            self._group.end()
        self._group = None

    def _running(self) -> Group:
        if self._group is None or self._group.ended:
            raise ArgumentError("RayExecutor: its workers do not run; call start() first")
        return self._group
