"""What one of Spark's tasks does: it runs a rank as a process of its own.

Spark uses its Python processes again for other tasks, so a rank cannot be one of them: frameworks,
and hvdlite, would keep what they had in the last job.

The tasks are the nodes of node mode (`hvdlite.launch.node`), with a rank each. Rank 0's task is the
launcher; when a rank has failed, it ends those of the other tasks, which are its agents.
"""

from __future__ import annotations

import json
import pickle
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hvdlite.errors import BootstrapError
from hvdlite.launch.description import Description, Outcome
from hvdlite.launch.node import ThisNode, join, launch
from hvdlite.launch.process import Ending, inherited_environment
from hvdlite.launch.report import Failure
from hvdlite.rendezvous.address import address_of, is_loopback, listen
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.mesh import host_identity


@dataclass(frozen=True)
class Plan:
    """What the driver tells every task."""

    call: bytes = field(repr=False)  # the function and its arguments, from `launch.call.pack`
    token: bytes = field(repr=False)  # the job's secret
    start_timeout: float  # seconds that the ranks have to find each other
    env: Mapping[str, str]  # variables for the ranks, beside those of Spark's processes
    verbose: bool  # whether the process of each rank is printed


def run_task(plan: Plan, context: Any) -> Outcome | None:
    """Run the rank of this task to its end; return in rank 0's task how all ranks have ended."""
    rank = context.partitionId()
    address = context.getTaskInfos()[rank].address.rpartition(":")[0].strip("[]")
    said = context.allGather(json.dumps([host_identity(None), address]))
    machines = [json.loads(text)[0] for text in said]
    listener, why = _listen(address, len(set(machines)) > 1) if rank == 0 else (None, "")
    meet = "" if listener is None else address_of(listener)
    meet, why = json.loads(context.allGather(json.dumps([meet, why]))[0])
    if why:
        return None if rank else _did_not_start(why)
    here = ThisNode(len(said), rank, meet, plan.token, start_timeout=plan.start_timeout)
    timeout = f"{plan.start_timeout:g}"
    more = {**_gpus(context), "PYTHONUNBUFFERED": "1", "HVDLITE_START_TIMEOUT": timeout, **plan.env}
    environment = inherited_environment(more)
    what = Description(
        [sys.executable, "-m", "hvdlite.launch.call"],
        1,
        environment,
        interfaces=environment.get("HVDLITE_NETWORK_INTERFACES", "").replace(",", " ").split(),
        verbose=plan.verbose,
        stdin=plan.call,
    )
    if listener is None:
        with suppress(BootstrapError):  # Rank 0's task says what has happened.
            join(here, what)
        return None
    try:
        return launch(here, what, listener, Deadline(plan.start_timeout), machines)
    except (BootstrapError, OSError) as error:
        return _did_not_start(str(error))


def _listen(host: str, several: bool) -> tuple[socket.socket | None, str]:
    """Listen for the other tasks; or return why that is impossible. `several` machines may call."""
    host = host if several else "127.0.0.1"
    try:
        listener = listen(f"[{host}]:0" if ":" in host else f"{host}:0")
    except OSError as error:
        return None, f"its executor cannot listen at {host}: {error.strerror or error}"
    if several and is_loopback(address_of(listener)):
        listener.close()
        return None, (
            f"its executor is called {host}, which only its own host can reach; "
            "set SPARK_LOCAL_HOSTNAME or SPARK_LOCAL_IP there"
        )
    return listener, ""


def _gpus(context: Any) -> dict[str, str]:
    """Show a rank the GPUs that Spark has given to its task, if Spark gives any."""
    found = context.resources().get("gpu")
    return {} if found is None else {"CUDA_VISIBLE_DEVICES": ",".join(found.addresses)}


def _did_not_start(why: str) -> Outcome:
    ending = Ending(1, False, why)
    return Outcome(1, Failure(0, 0, ending, time.monotonic(), b"", socket.gethostname()), {})


SCHEMA = "part int, data binary"
_PART_BYTES = 1 << 20


def rows(outcome: Outcome | None) -> Iterator[Any]:
    """Turn an outcome into the batches that Spark takes."""
    # One pickle is cut into parts, because Spark limits the size of what travels at once.
    import pyarrow

    types = pyarrow.schema([("part", pyarrow.int32()), ("data", pyarrow.binary())])
    data = b"" if outcome is None else pickle.dumps(outcome)
    for number, begin in enumerate(range(0, len(data), _PART_BYTES)):
        columns = {"part": [number], "data": [data[begin : begin + _PART_BYTES]]}
        yield pyarrow.RecordBatch.from_pydict(columns, schema=types)


def joined(found: Iterable[Any]) -> Outcome:
    """Put the outcome of rank 0's task together again; the rows come in any order."""
    parts = sorted(found, key=lambda row: row.part)
    outcome: Outcome = pickle.loads(b"".join(bytes(row.data) for row in parts))
    return outcome
