"""What one of Spark's tasks does: it starts a rank as a process of its own, and watches it.

Spark uses its Python processes again for other tasks, so a rank cannot be one of them: frameworks,
and hvdlite, would keep what they had in the last job.
"""

from __future__ import annotations

import json
import pickle
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from secrets import token_bytes
from typing import Any

from hvdlite.errors import BootstrapError
from hvdlite.launch.call import pack
from hvdlite.launch.console import Console
from hvdlite.launch.loop import AnyRank, SignalInbox
from hvdlite.launch.process import Ending, inherited_environment, start_worker
from hvdlite.launch.report import CAUSE_WINDOW, Failure
from hvdlite.launch.supervisor import Next, Policy, Supervisor
from hvdlite.rendezvous.address import address_of, fresh_unix_address, is_loopback, listen
from hvdlite.rendezvous.assignments import Place, assignment_for, start_store
from hvdlite.rendezvous.client import reach
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.environment import WorkerEnvironment, assign_rank
from hvdlite.rendezvous.handshake import JOB_ID_BYTES, Job, Role, ServerHandshake
from hvdlite.rendezvous.mesh import host_identity
from hvdlite.rendezvous.service import Acceptor


@dataclass(frozen=True)
class Plan:
    """What the driver tells every task."""

    call: bytes = field(repr=False)  # the function and its arguments, from `launch.call.pack`
    job: Job
    start_timeout: float  # seconds that the ranks have to find each other
    env: Mapping[str, str]  # variables for the ranks, beside those of Spark's processes
    verbose: bool  # whether each task prints the process of its rank


def run_task(plan: Plan, context: Any) -> Report:
    rank = context.partitionId()
    address = context.getTaskInfos()[rank].address.rpartition(":")[0].strip("[]")
    mine = {"node": host_identity(None), "address": address}
    said = [json.loads(text) for text in context.allGather(json.dumps(mine))]
    places = [Place(one["node"], one["address"]) for one in said]
    with ExitStack() as stack:
        served, listener = _serve(stack, places, plan.job) if rank == 0 else ({}, None)
        served = json.loads(context.allGather(json.dumps(served))[0])
        if "error" in served:
            failure = None if rank else _did_not_start(rank, served["error"])
            return Report(rank, failure, status=1)
        own = assignment_for(places, rank, served["store"], plan.job)
        assignment = replace(own, start_timeout=plan.start_timeout)
        return _watch(plan, assignment, served["hub"], listener, context)


def _serve(
    stack: ExitStack, places: list[Place], job: Job
) -> tuple[dict[str, str], socket.socket | None]:
    """Serve the store, where the ranks meet, and listen for the lines of the other tasks.

    Returns:
        What the other tasks need to know: two addresses, or why there are none; and the listener.
    """
    several = len({place.node for place in places}) > 1
    host = places[0].address
    try:
        store = stack.enter_context(start_store(places, job))
        if several and is_loopback(store.address):
            return {
                "error": f"its executor is called {host}, which only its own host can reach; "
                "set SPARK_LOCAL_HOSTNAME or SPARK_LOCAL_IP there"
            }, None
        address = f"{host}:0" if several else fresh_unix_address()
        listener = stack.enter_context(listen(address))
    except OSError as error:
        return {"error": f"its executor cannot listen at {host}: {error.strerror or error}"}, None
    return {"store": store.address, "hub": address_of(listener)}, listener


def _watch(
    plan: Plan,
    assignment: WorkerEnvironment,
    hub: str,
    listener: socket.socket | None,
    context: Any,
) -> Report:
    """Start the rank, and watch it to its end; only the hub, rank 0's task, has a listener."""
    rank = assignment.rank
    # The processes of this rank are found by a number that no other task of this host has.
    own = token_bytes(JOB_ID_BYTES)
    more = {**_gpus(context), "PYTHONUNBUFFERED": "1", **plan.env, "HVDLITE_JOB_ID": own.hex()}
    environment = inherited_environment(more)
    command = [sys.executable, "-m", "hvdlite.launch.call"]
    stdin = pack(_assigned, (assignment, plan.call), {})
    with Console() as console, SignalInbox() as inbox:
        alarmed = _AlarmedRank()
        supervisor = Supervisor(console, inbox, own, alarmed, reports=False)

        def start() -> None:
            try:
                if listener is None:
                    alarmed.alarm.connect(hub, plan.job, rank, Deadline(plan.start_timeout))
                else:
                    alarmed.alarm.listen(listener.dup(), plan.job, assignment.size)
                worker = start_worker(rank, command, environment, stdin=stdin)
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
        return Report(rank, failure, status, supervisor.streams.results.get(rank, b""))


class _AlarmedRank(Policy):
    """Decides about the one rank of a task; the alarm of another task ends it."""

    alarm: Alarm

    def attach(self, supervisor: Supervisor) -> None:
        super().attach(supervisor)
        # When another rank has failed, this one has a moment to say what it knows.
        self.alarm = Alarm(supervisor.selector, lambda: supervisor.end_in(CAUSE_WINDOW))

    def left(self) -> None:
        """Disconnect this task from the others; if its rank is not done, they end theirs."""
        self.alarm.close()

    def expects(self) -> bool:
        return self.alarm.waits

    def ended(self, worker: AnyRank, ending: Ending, excused: bool) -> Next:
        if ending.well:
            self.alarm.done()
        else:
            self.alarm.ring()
        return super().ended(worker, ending, excused)

    def tick(self, now: float) -> float | None:
        self.alarm.expire()
        return None


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


SCHEMA = "rank int, part int, data binary"
_PART_BYTES = 1 << 20


@dataclass(frozen=True)
class Report:
    """What became of one rank."""

    rank: int
    # How the rank failed; None if it did not, or was ended because another rank failed.
    failure: Failure | None = None
    status: int = 0  # the exit status of the rank as a launcher would report it
    result: bytes = b""  # what the rank wrote as its result, for `launch.call.unpack_result`

    def parts(self) -> Iterator[bytes]:
        """Cut one pickle into parts, because Spark limits the size of what travels at once."""
        data = pickle.dumps(self)
        for begin in range(0, len(data), _PART_BYTES):
            yield data[begin : begin + _PART_BYTES]

    @staticmethod
    def joined(parts: Iterable[bytes]) -> Report:
        """Put a report together again; its parts come in order."""
        report: Report = pickle.loads(b"".join(parts))
        return report


_DONE = b"d"


class Alarm:
    """How the tasks of a job learn that a rank of another task has failed; a part of a task's loop.

    Every other task has a *line*, which is a connection to rank 0's task, the *hub*. A task whose
    rank is done says so on its line and closes it. A line that is closed without a word is the
    alarm: that task's rank failed, or the task was killed. The hub then closes all lines, so all
    tasks get the alarm, and end their ranks, even those that do not call hvdlite at all.

    The owner of `selector` calls the key's data for each event, and `expire` regularly. `rang` is
    called once, when a rank of another task has failed.
    """

    def __init__(self, selector: selectors.BaseSelector, rang: Callable[[], None]) -> None:
        self._selector = selector
        self._rang = rang
        self._lines: dict[int, socket.socket] = {}
        self._expected: set[int] = set()  # at the hub, the ranks that are not done
        self._acceptor: Acceptor | None = None  # of the hub
        self._over = False

    def listen(self, listener: socket.socket, job: Job, size: int) -> None:
        """Be the hub; `listener`, to which the other tasks connect, is its own from now on."""
        self._expected = set(range(1, size))
        self._acceptor = Acceptor(listener, job, size, self._selector, self._welcome)

    def connect(self, hub: str, job: Job, rank: int, deadline: Deadline) -> None:
        """Connect to the hub; raise BootstrapError if it does not answer in time."""
        line, _ = reach("rank 0's task", hub, job, rank, Role.CONTROL, deadline)
        self._watch(0, line)

    @property
    def waits(self) -> bool:
        """Whether ranks of other tasks run, so that this task has to stay."""
        return bool(self._expected) and not self._over

    def done(self) -> None:
        """Note that this task's rank is done."""
        if self._acceptor is None:
            for line in self._lines.values():
                with suppress(OSError):  # The hub has gone, because a rank has failed.
                    line.send(_DONE)
            self.ring()

    def ring(self) -> None:
        """Tell all tasks that this task's rank has failed, if `done` was not called before."""
        self._over = True
        for rank in list(self._lines):
            self._drop(rank)

    def expire(self) -> None:
        """Drop connections that take too long to become lines."""
        if self._acceptor is not None:
            self._acceptor.expire()

    def close(self) -> None:
        self.ring()
        if self._acceptor is not None:
            self._acceptor.close()

    def _welcome(self, line: socket.socket, handshake: ServerHandshake) -> None:
        rank = handshake.rank
        if self._over or handshake.role != Role.CONTROL or rank not in self._expected:
            line.close()
        else:
            self._watch(rank, line)

    def _watch(self, rank: int, line: socket.socket) -> None:
        line.setblocking(False)
        self._lines[rank] = line
        self._selector.register(line, selectors.EVENT_READ, partial(self._hear, rank))

    def _hear(self, rank: int) -> None:
        if rank not in self._lines:
            return  # The selector returned this event together with the one that closed the line.
        try:
            said = self._lines[rank].recv(len(_DONE))
        except OSError:
            said = b""
        self._drop(rank)
        if said == _DONE:
            self._expected.discard(rank)
        elif not self._over:
            self.ring()
            self._rang()

    def _drop(self, rank: int) -> None:
        line = self._lines.pop(rank)
        self._selector.unregister(line)
        line.close()
