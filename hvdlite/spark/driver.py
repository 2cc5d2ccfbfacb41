"""`hvdlite.spark.run`: call a function on ranks that Spark's tasks start."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hvdlite.errors import ArgumentError, RankFailedError, UnsupportedError
from hvdlite.launch.api import results_of
from hvdlite.launch.call import pack
from hvdlite.launch.description import Outcome
from hvdlite.launch.report import root_failure
from hvdlite.rendezvous.handshake import Job
from hvdlite.spark.task import SCHEMA, Plan, Report, rows, run_task

_ENCRYPTS = ("spark.ssl.enabled", "spark.network.crypto.enabled")
# In what Spark says of a barrier stage that has failed.
_LOST = re.compile(
    r"barrier task ResultTask\(\d+, (\d+)\) finished unsuccessfully.\s*(.*?)(?=\n\s+at |\Z)",
    re.DOTALL,
)


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    start_timeout: float = 600.0,
    env: Mapping[str, str] | None = None,
    verbose: int = 1,
    allow_plain: bool = False,
    **horovods: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `num_proc` ranks in Spark's executors; return their results.

    Every rank is a new process, which one of Spark's tasks starts and watches, and in which the
    function calls `hvd.init()` as a script would. The function, its arguments and its results are
    pickled (functions of a notebook by value).

    Args:
        fn: the function; import frameworks inside it, or at the top of its module.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: the number of ranks, one in each task; by default all slots of Spark.
        start_timeout: seconds that the ranks have to find each other; 0 for no limit.
        env: variables for the ranks, beside those of Spark's Python processes.
        verbose: 2 names the process of each rank in the executors' logs.
        allow_plain: whether ranks may send parameters and gradients without encryption, although
            the session encrypts what Spark sends.
        **horovods: the other arguments of `horovod.spark.run`, which are refused with the reason.

    Returns:
        The result of each rank, in rank order.

    Raises:
        ArgumentError: there is no Spark session, it has too few slots, or a setting excludes ranks.
        RankFailedError: a rank failed without an exception, or with one that cannot be pickled; or
            Spark lost an executor.
        Exception: the exception of the first failing rank, with its traceback as the cause.

    Example:
        def number():
            import hvdlite.torch as hvd
            hvd.init()
            return hvd.rank() * 10

        hvdlite.spark.run(number, num_proc=2)  # [0, 10]
    """
    refuse_horovods(horovods)
    if not start_timeout >= 0:
        raise ArgumentError(f"start_timeout={start_timeout}: give a number of seconds, or 0")
    session = active_session()
    check_settings(session, allow_plain)
    ranks = choose_ranks(session, num_proc)
    plan = Plan(
        call=pack(fn, args, kwargs or {}),
        job=Job.drawn(),
        start_timeout=start_timeout,
        env=dict(env or {}),
        verbose=verbose > 1,
    )
    return _results(_reports(session, plan, ranks))


def _reports(session: Any, plan: Plan, ranks: int) -> list[Report]:
    """Run the ranks as the tasks of one barrier stage; raise RankFailedError if Spark lost one."""

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import BarrierTaskContext

        yield from rows(run_task(plan, BarrierTaskContext.get()))

    table = session.range(0, ranks, 1, ranks).mapInArrow(task, SCHEMA, barrier=True)
    parts: dict[int, dict[int, bytes]] = {rank: {} for rank in range(ranks)}
    try:
        found = table.collect()
    except Exception as error:
        raise_lost(error)
        raise
    for row in found:
        parts[row.rank][row.part] = bytes(row.data)
    return [Report.joined(parts[rank][part] for part in sorted(parts[rank])) for rank in parts]


def raise_lost(error: Exception) -> None:
    """Raise RankFailedError if Spark lost a task; do nothing if `error` is something else.

    The stage is the last one of its job, which Spark does not begin again when it has lost a task.
    """
    found = _LOST.search(str(error))
    if found is not None:
        failure = RankFailedError(
            f"Spark lost the task of rank {found[1]}, or its executor: {found[2]}; the logs of the "
            "executors say more"
        )
        failure.failed_rank = int(found[1])
        raise failure from error


def _results(reports: Sequence[Report]) -> list[Any]:
    failures = [report.failure for report in reports if report.failure is not None]
    status = max(report.status for report in reports)
    results = {report.rank: report.result for report in reports}
    root = root_failure(failures) if failures else None
    return results_of(Outcome(status, root, results, tuple(results)))


def active_session() -> Any:
    """Return the session of this program; raise ArgumentError or ImportError if that is none."""
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ImportError(
            f"hvdlite.spark needs PySpark ({error}): pip install 'hvdlite[spark]'"
        ) from error
    try:
        return SparkSession.active()
    except Exception as error:  # Spark has several classes for it.
        raise ArgumentError(
            "hvdlite.spark.run needs a running Spark session; make one first, for example by "
            "SparkSession.builder.getOrCreate()"
        ) from error


def check_settings(session: Any, allow_plain: bool) -> None:
    """Raise ArgumentError if a setting of the session excludes ranks."""
    if _is_on(session, "spark.dynamicAllocation.enabled"):
        raise ArgumentError(
            "spark.dynamicAllocation.enabled is true: Spark does not run barrier stages, in which "
            "all ranks start together, while the number of executors changes; start the "
            "application with --conf spark.dynamicAllocation.enabled=false"
        )
    for name in _ENCRYPTS:
        if not allow_plain and _is_on(session, name):
            raise ArgumentError(
                f"{name} is true, but ranks authenticate each other and do not encrypt what they "
                "send; give hvdlite.spark.run(..., allow_plain=True) if the network between the "
                "executors may see parameters and gradients"
            )


def choose_ranks(session: Any, num_proc: int | None) -> int:
    """Return the number of ranks; raise ArgumentError if Spark cannot have a slot for each.

    Where executors may still come, Spark itself waits for the slots of a barrier stage: ten minutes
    by default (`spark.scheduler.barrier.maxConcurrentTasksCheck`).
    """
    if num_proc is not None and num_proc < 1:
        raise ArgumentError(f"num_proc={num_proc}: at least one rank is needed")
    slots = _slots(session)
    if num_proc is None and slots is None:
        raise ArgumentError(
            "num_proc is needed here: a session of Spark Connect does not tell its slots"
        )
    wanted = num_proc or slots or 1
    if slots is not None and slots < wanted and (num_proc is None or _is_local(session)):
        raise ArgumentError(
            f"num_proc={wanted}, but Spark has {slots} slots (spark.task.cpus="
            f"{session.conf.get('spark.task.cpus', '1')}), and all ranks have to run at once; give "
            "a smaller num_proc, or start Spark with more executors or cores"
        )
    return wanted


def _slots(session: Any) -> int | None:
    """Return how many tasks Spark runs at once; None if it does not tell."""
    try:
        context = session.sparkContext._jsc.sc()
        profile = context.resourceProfileManager().defaultResourceProfile()
        return int(context.maxNumConcurrentTasks(profile))
    except Exception:  # Spark Connect has no context; the method is Spark's own.
        return None


def _is_local(session: Any) -> bool:
    master = str(session.conf.get("spark.master", ""))
    return master == "local" or master.startswith("local[")


def _is_on(session: Any, name: str) -> bool:
    return str(session.conf.get(name, "false")).lower() == "true"


_HOROVODS = {
    "use_mpi": "no MPI is used: ranks connect by themselves",
    "mpi_args": "no MPI is used",
    "extra_mpi_args": "no MPI is used",
    "nics": "ranks use the network of Spark's executors; env={'HVDLITE_NETWORK_INTERFACES': ...} "
    "chooses another one",
    "stdout": "what ranks print is in the executors' logs",
    "stderr": "what ranks print is in the executors' logs",
    "prefix_output_with_timestamp": "what ranks print is in the executors' logs",
    "executable": "ranks run with the Python of Spark's executors; set spark.pyspark.python",
}


def refuse_horovods(given: dict[str, Any]) -> None:
    """Raise UnsupportedError for what only Horovod has, and TypeError for an unknown argument."""
    for name, value in given.items():
        if name not in (*_HOROVODS, "use_gloo"):
            raise TypeError(f"run() got an unexpected keyword argument {name!r}")
        if value and name in _HOROVODS:
            raise UnsupportedError(f"hvdlite.spark.run({name}=...): {_HOROVODS[name]}")
