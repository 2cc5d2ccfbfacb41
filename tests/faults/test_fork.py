"""hvdlite raises an error at once in a child of fork(), and the parent goes on."""

from __future__ import annotations

import json
import os
import re
import weakref
from pathlib import Path
from typing import Any

from faults.arrays import ones, reduce_array, submit, works
from harness import run_world
from hvdlite import _core, basics
from hvdlite.errors import ForkedError
from patience import Stopwatch, wait_until

BOUND = 0.1


def use_in_a_forked_child() -> dict[str, Any]:
    basics.init()
    assert works("before")
    pending = submit(ones(), "across.the.fork")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, json.dumps(in_the_child()).encode())
        os._exit(0)  # This runs no destructors and no exit hooks.
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told: dict[str, Any] = json.loads(pipe.read())
    pending.wait()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {**told, "status": status, "works": works("after")}


def in_the_child() -> dict[str, Any]:
    watch = Stopwatch()
    try:
        reduce_array(ones(), "in.the.child")
    except ForkedError as error:
        return {"message": str(error), "seconds": watch.seconds()}
    return {"message": "no error", "seconds": watch.seconds()}


def test_operation_in_a_forked_child_raises_and_the_parent_goes_on() -> None:
    for result in run_world(2, use_in_a_forked_child):
        told = result.value
        assert re.search(r"not usable after fork\(\) \(pid \d+ -> \d+\)", told["message"])
        assert "child of a rank" in told["message"]
        assert told["seconds"] <= BOUND
        assert told["status"] == 0
        assert told["works"]


def begin_a_group_in_a_forked_child(folder: str) -> list[int]:
    """Return the exit statuses of children that made groups: after the parent's end, and before."""
    rank, size = int(os.environ["HVDLITE_RANK"]), 2

    def reduce_in_a_group(name: str, ends: bool = True) -> bool:
        method = f"file://{folder}/{name}"
        dist.init_process_group("hvdlite", init_method=method, rank=rank, world_size=size)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        if ends:
            dist.destroy_process_group()
        return tensor.tolist() == [2.0] * 3

    def status_of_child(name: str) -> int:
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if reduce_in_a_group(name) else 1)
            except (ForkedError, ValueError):  # torch: "trying to initialize ... twice"
                os._exit(2)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    import torch
    import torch.distributed as dist

    import hvdlite.torch.distributed  # noqa: F401 (names the backend)

    torch.set_num_threads(1)
    assert reduce_in_a_group("first")
    statuses = [status_of_child("second")]
    assert reduce_in_a_group("third", ends=False)
    statuses.append(status_of_child("fourth"))
    dist.destroy_process_group()
    return statuses


def test_forked_child_has_groups_of_its_own_if_the_parent_has_none(tmp_path: Path) -> None:
    results = run_world(2, begin_a_group_in_a_forked_child, str(tmp_path))
    assert [result.value for result in results] == [[0, 2], [0, 2]]


class Kept:
    """What an operation keeps alive."""


def drop_a_handle_in_a_forked_child(dropped: str) -> int:
    """Return the exit status of the child: 0 if it let go of what the operation keeps."""
    basics.init()
    assert works("before")
    if basics.rank() == 1:
        wait_until(Path(dropped).exists, "the child of rank 0 has ended")
    array, kept = ones(), Kept()
    tensor = _core.Tensor(
        "", _core.DTYPES["float32"], array.shape, array.ctypes.data, array.ctypes.data
    )
    total = _core.REDUCE_OPS["sum"]
    handle = basics.engine().allreduce("across.the.fork", [tensor], total, keep=kept)
    alive = weakref.ref(kept)
    del kept
    child = os.fork()
    if child == 0:
        del handle
        os._exit(0 if alive() is None else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    Path(dropped).touch()
    handle.wait()
    return status


def test_forked_child_lets_go_of_its_copy_of_a_handle(tmp_path: Path) -> None:
    results = run_world(2, drop_a_handle_in_a_forked_child, str(tmp_path / "dropped"))
    assert [result.value for result in results] == [0, 0]
