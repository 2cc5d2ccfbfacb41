"""What one of Spark's tasks does: it starts a rank as a process of its own, and watches it.

Spark uses its Python processes again for other tasks, so a rank cannot be one of them: frameworks,
and hvdlite, would keep what they had in the last job.
"""

from __future__ import annotations

import json
import pickle
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from secrets import token_bytes
from typing import Any

from hvdlite.errors import BootstrapError
from hvdlite.launch.call import pack
from hvdlite.launch.control import AnyRank, Desk, Next
from hvdlite.launch.output.console import Console
from hvdlite.launch.output.report import CAUSE_WINDOW, Failure
from hvdlite.launch.policies.fixed import FixedRanks
from hvdlite.launch.process.ending import Ending
from hvdlite.launch.process.inbox import SignalInbox
from hvdlite.launch.process.local import inherited_environment, start_worker
from hvdlite.launch.process.placement import place_as
from hvdlite.launch.supervisor import Supervisor
from hvdlite.rendezvous.address import address_of, fresh_unix_address, is_loopback, listen
from hvdlite.rendezvous.assignments import Place, assignment_for, start_store
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.endpoint import host_identity
from hvdlite.rendezvous.environment import JOB_ID_BYTES, WorkerEnvironment, assign_rank
from hvdlite.rendezvous.handshake import Job
from hvdlite.spark.alarm import Hub, Line
from hvdlite.spark.report import Report


@dataclass(frozen=True)
class Plan:
    """What the driver tells every task."""

    call: bytes = field(repr=False)  # the function and its arguments, from `launch.call.pack`
    token: bytes = field(repr=False)  # the job's secret
    job_id: bytes  # the public number of the job
    attempt: int  # the number of this start of the ranks, from 0
    start_timeout: float  # seconds that the ranks have to find each other
    env: Mapping[str, str]  # variables for the ranks, beside those of Spark's processes
    verbose: bool  # whether each task prints the process of its rank


def run_task(plan: Plan, context: Any) -> Report:
    """Run one rank to its end."""
    rank = context.partitionId()
    address = context.getTaskInfos()[rank].address.rpartition(":")[0].strip("[]")
    mine = {"node": host_identity(None), "address": address}
    said = [json.loads(text) for text in context.allGather(json.dumps(mine))]
    places = [Place(one["node"], one["address"]) for one in said]
    job = Job(plan.token, plan.job_id, plan.attempt)
    with ExitStack() as stack:
        served, listener = _serve(stack, places, job) if rank == 0 else ({}, None)
        served = json.loads(context.allGather(json.dumps(served))[0])
        if "error" in served:
            failure = None if rank else _did_not_start(rank, served["error"])
            return Report(rank, failure, status=1)
        assignment = assignment_for(
            places, rank, served["store"], plan.token, plan.job_id, plan.attempt
        )
        assignment = replace(assignment, start_timeout=plan.start_timeout)
        return _watch(plan, _Rank(assignment, job, places, served["hub"], listener), context)


def _serve(
    stack: ExitStack, places: list[Place], job: Job
) -> tuple[dict[str, str], socket.socket | None]:
    """Serve the store, where the ranks meet, and listen for the lines of the other tasks."""
    # Returns what the other tasks need to know: two addresses, or why there are none; and the
    # listener.
    several = len({place.node for place in places}) > 1
    host = places[0].address
    try:
        store = stack.enter_context(start_store(places, job.token, job.job_id, job.epoch))
        if several and is_loopback(store.address):
            return {
                "error": f"its executor is called {host}, which only its own host can reach; "
                "set SPARK_LOCAL_HOSTNAME or SPARK_LOCAL_IP there"
            }, None
        address = f"[{host}]:0" if ":" in host else f"{host}:0"
        listener = stack.enter_context(listen(address if several else fresh_unix_address()))
    except OSError as error:
        return {"error": f"its executor cannot listen at {host}: {error.strerror or error}"}, None
    return {"store": store.address, "hub": address_of(listener)}, listener


@dataclass(frozen=True)
class _Rank:
    """One rank, and where its task meets the others."""

    assignment: WorkerEnvironment
    job: Job
    places: list[Place]
    hub: str
    listener: socket.socket | None


def _watch(plan: Plan, one: _Rank, context: Any) -> Report:
    rank = one.assignment.rank
    # The processes of this rank are found by a number that no other task of this host has.
    own = token_bytes(JOB_ID_BYTES)
    nodes = list(dict.fromkeys(place.node for place in one.places))
    placement = place_as([nodes.index(place.node) for place in one.places])[rank]
    more = {**_gpus(context), "PYTHONUNBUFFERED": "1", **plan.env, "HVDLITE_JOB_ID": own.hex()}
    environment = inherited_environment(more)
    command = [sys.executable, "-m", "hvdlite.launch.call"]
    stdin = pack(_assigned, (one.assignment, plan.call), {})
    with Console() as console, SignalInbox() as inbox:
        alarmed = _AlarmedRank()
        supervisor = Supervisor(Desk(console, inbox, own, reports=False), alarmed)

        def start() -> None:
            try:
                alarmed.meet(one, Deadline(plan.start_timeout))
                worker = start_worker(placement, command, environment, stdin=stdin)
            except BaseException:
                alarmed.left()
                raise
            supervisor.add(worker)
            if plan.verbose:
                console.say(f"rank {rank}: pid {worker.pid} on {worker.host}")

        try:
            supervisor.run([start])
        except (BootstrapError, OSError) as error:
            return Report(rank, _did_not_start(rank, str(error)), status=1)
        status = supervisor.conclude()
        failure = supervisor.root
        if failure is not None:  # Its time becomes one that other hosts know, too.
            failure = replace(failure, at=time.time() - (time.monotonic() - failure.at))
        return Report(rank, failure, status, supervisor.results.get(rank, b""))


class _AlarmedRank(FixedRanks):
    """Decides about the one rank of a task; the alarm of another task ends it."""

    _alarm: Hub | Line | None = None

    def meet(self, one: _Rank, deadline: Deadline) -> None:
        """Connect this task to the others."""
        selector = self.job.selector
        if one.listener is not None:
            self._alarm = Hub(one.listener.dup(), one.job, len(one.places), selector, self._rang)
        else:
            rank = one.assignment.rank
            self._alarm = Line(one.hub, one.job, rank, selector, self._rang, deadline)

    def left(self) -> None:
        """Disconnect this task from the others; if its rank is not done, they end theirs."""
        if self._alarm is not None:
            self._alarm.close()

    def expects(self) -> bool:
        """Return whether rank 0's task stays for the others."""
        return self._alarm is not None and self._alarm.waits

    def ended(self, worker: AnyRank, ending: Ending, excused: bool) -> Next:
        """Tell the other tasks whether the rank is done or has failed."""
        if self._alarm is not None:
            if ending.well:
                self._alarm.done()
            else:
                self._alarm.ring()
        return super().ended(worker, ending, excused)

    def tick(self, now: float) -> float | None:
        """Drop strangers at the hub."""
        if self._alarm is not None:
            self._alarm.expire()
        return None

    def _rang(self) -> None:
        """End the rank, because another one has failed; it has a moment to say what it knows."""
        self.job.end_in(CAUSE_WINDOW)


def _assigned(assignment: WorkerEnvironment, call: bytes) -> Any:
    """Call the user's function in the process of the rank."""
    path, inner = pickle.loads(call)
    sys.path += [entry for entry in path if entry not in sys.path]
    assign_rank(assignment)
    fn, args, kwargs = pickle.loads(inner)
    return fn(*args, **kwargs)


def _gpus(context: Any) -> dict[str, str]:
    """Show a rank the GPUs that Spark has given to its task, if Spark gives any."""
    found = context.resources().get("gpu")
    return {} if found is None else {"CUDA_VISIBLE_DEVICES": ",".join(found.addresses)}


def _did_not_start(rank: int, why: str) -> Failure:
    return Failure(rank, 0, Ending(1, False, why), time.time(), b"", socket.gethostname())


def rows(report: Report) -> Iterator[Any]:
    """Turn a report into the batches that Spark takes."""
    import pyarrow

    types = pyarrow.schema(
        [("rank", pyarrow.int32()), ("part", pyarrow.int32()), ("data", pyarrow.binary())]
    )
    for number, part in enumerate(report.parts()):
        columns = {"rank": [report.rank], "part": [number], "data": [part]}
        yield pyarrow.RecordBatch.from_pydict(columns, schema=types)
