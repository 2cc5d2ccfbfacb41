"""The Spark session in which ranks are to run: what it can do, and what it must not be asked.

Spark tries a barrier stage that does not fit for minutes, and some settings let it wait for ever.
So these are checked before a job begins. A session of Spark Connect has no `SparkContext`, and does
not tell its slots: there, Spark's own check has to do.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from hvdlite.errors import ArgumentError, UnsupportedError

_SETTLED_SECONDS = 30.0  # without a new executor: no more are expected
_LOOK_SECONDS = 0.2
_QUIET_SECONDS = 3.0
_had: dict[str, int] = {}  # An application's last run had so many slots.
_ENCRYPTS = ("spark.ssl.enabled", "spark.network.crypto.enabled")


def active_session() -> Any:
    """Return the Spark session of this program. Raises ArgumentError if there is none."""
    # Raises ImportError if PySpark is not installed.
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
    """Refuse settings with which ranks cannot run."""
    # Raises ArgumentError if a setting of the session excludes ranks; the message names it.
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


def choose_ranks(session: Any, num_proc: int | None, timeout: float, verbose: bool) -> int:
    """Return the number of ranks, after a check that Spark has a slot for each."""
    # Executors may be on their way, unless all of Spark is in one process. So this waits for more
    # slots as long as more come; and if the application has had enough of them before, up to the
    # timeout, since Spark replaces executors that it lost.
    # `num_proc` says how many ranks the user wants; None for one in each slot.
    # `timeout` says how many seconds to wait at most; 0 for no limit.
    # `verbose` says whether to print that executors are waited for.
    # Raises ArgumentError if there are too few slots.
    if num_proc is not None and num_proc < 1:
        raise ArgumentError(f"num_proc={num_proc}: at least one rank is needed")
    slots = _slots(session)
    if slots is None:
        if num_proc is None:
            raise ArgumentError(
                "num_proc is needed here: a session of Spark Connect does not tell its slots"
            )
        return num_proc
    wanted = num_proc or 1
    application = session.sparkContext.applicationId
    returning = _had.get(application, 0) >= wanted
    begun = grown = time.monotonic()
    most = slots
    quiet = not verbose
    while slots < wanted and not _is_local(session):
        now = time.monotonic()
        settled = now - grown > _SETTLED_SECONDS and not returning
        if settled or (timeout and now - begun > timeout):
            break
        if not quiet and now - begun > _QUIET_SECONDS:
            quiet = True
            print(f"hvdlite.spark waits for {wanted} slots, {slots} are there", file=sys.stderr)
        time.sleep(_LOOK_SECONDS)
        slots = _slots(session) or 0
        if slots > most:  # One that was there before and comes again is not a new one.
            most, grown = slots, time.monotonic()
    if slots < wanted:
        raise ArgumentError(
            f"num_proc={wanted}, but Spark has {slots} slots (spark.task.cpus="
            f"{session.conf.get('spark.task.cpus', '1')}), and all ranks have to run at once; give "
            "a smaller num_proc, or start Spark with more executors or cores"
        )
    _had[application] = slots
    return num_proc or slots


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
    """Refuse arguments of Horovod's function that ask for what is not there."""
    # Raises UnsupportedError if one of them is used; the message says why it is not there.
    # Raises TypeError if an argument is not Horovod's either.
    for name, value in given.items():
        if name not in (*_HOROVODS, "use_gloo"):
            raise TypeError(f"run() got an unexpected keyword argument {name!r}")
        if value and name in _HOROVODS:
            raise UnsupportedError(f"hvdlite.spark.run({name}=...): {_HOROVODS[name]}")
