"""Any rank leaves cleanly while others go on: those that need it get an error that names it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from faults.arrays import (
    describe,
    note_time,
    noted_time,
    ones,
    reduce_array,
    seconds_between,
    submit,
)
from harness import run_world
from hvdlite import _core, basics
from hvdlite.errors import HvdliteError
from patience import HANG, Stopwatch, wait_until

TENSOR = "encoder.weight"
BOUND = 1.0  # seconds until the error, from the leaving or from the call, whichever is later
SEEN = 0.2  # seconds in which the others notice that the rank has left
RANKS = 3
# The rank that leaves, the steps before that, and the operation that the others call, before or
# after they have noticed. In "set ..." they call it in a process set without the leaving rank.
CASES = [
    (2, 0, "allreduce", "before"),
    (0, 0, "allreduce", "before"),
    (2, 20, "allreduce", "after"),
    (0, 20, "allreduce", "after"),
    (1, 1, "broadcast", "before"),
    (0, 1, "broadcast", "after"),
    (1, 1, "barrier", "after"),
    (0, 1, "join", "after"),
    (0, 1, "add_process_set", "after"),
    (0, 1, "set allreduce", "after"),
]


def operation(kind: str, own_set: int) -> _core.Handle:
    """Start an operation of this kind on this rank."""
    engine = basics.engine()
    if kind == "barrier":
        return engine.barrier(TENSOR)
    if kind == "join":
        return engine.join()
    if kind == "add_process_set":
        return engine.add_process_set(TENSOR, [1, 2])
    array = ones()
    if kind == "broadcast":
        address = array.ctypes.data
        tensor = _core.Tensor(TENSOR, _core.DTYPES["float32"], array.shape, address, address)
        return engine.broadcast(TENSOR, [tensor], 0, keep=array)
    return submit(array, TENSOR, process_set=own_set)


def error_of(kind: str, own_set: int) -> dict[str, Any]:
    asked = Stopwatch()
    try:
        operation(kind, own_set).wait(timeout=HANG)
    except HvdliteError as error:
        return {**describe(error), "asked": asked}
    raise AssertionError("nothing failed")


def add_set(kind: str) -> int:
    """Add a process set of ranks 1 and 2 if the case needs it; return its number, or 0."""
    if not kind.startswith("set "):
        return 0
    handle = basics.engine().add_process_set("own", [1, 2])
    handle.wait()
    return handle.set_id


def leave(folder: str) -> list[dict[str, Any]]:
    """Run every case in a world of its own; return this rank's error in each."""
    errors: list[dict[str, Any]] = []
    for number, (leaver, steps, kind, when) in enumerate(CASES):
        noted = Path(folder) / str(number)
        basics.init()
        own_set = add_set(kind)
        for _ in range(steps):
            reduce_array(ones(), TENSOR)
        if basics.rank() == leaver:
            time.sleep(SEEN if when == "before" else 0)  # Meanwhile the others submit.
            basics.shutdown()
            note_time(str(noted))
            errors.append({})
        else:
            if when == "after":
                wait_until(noted.exists, "the rank has left")
                time.sleep(SEEN)
            errors.append(error_of(kind, own_set))
        basics.shutdown()
    return errors


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 1]], ids=["shared_memory", "tcp"])
def test_early_exit_of_any_rank_is_told_as_a_clean_leave(hosts: list[int], tmp_path: Path) -> None:
    # A rank 0 that leaves stays for half of this time if a process set of others still works.
    env = {"HVDLITE_SHUTDOWN_TIMEOUT": "1"}
    results = run_world(RANKS, leave, str(tmp_path), hosts=hosts, env=env)
    for number, (leaver, steps, kind, _) in enumerate(CASES):
        left = noted_time(tmp_path / str(number))
        for result in results:
            error = result.value[number]
            if result.rank == leaver:
                continue
            assert error["kind"] == "RankFailedError", (CASES[number], error)
            assert error["rank"] == leaver
            message = error["message"]
            done = steps + kind.startswith("set ")
            assert f"rank {leaver} left after {done} collectives, but " in message
            assert ("join()" if kind == "join" else TENSOR) in message
            advice = "hvd.barrier()" if kind.startswith("set ") else "no collective under `if"
            assert advice in message
            since = min(seconds_between(one, error["seen"]) for one in (left, error["asked"]))
            assert since <= BOUND
