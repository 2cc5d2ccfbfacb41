"""Operations work in any order, from any thread and in any number, and so do exits amid them."""

from __future__ import annotations

import time
import weakref
from pathlib import Path

import pytest

from faults.arrays import ones, reduce_array, submit, total_of_ones, works
from harness import run_world
from hvdlite import _core, basics
from patience import Stopwatch, wait_until

PRELOAD = ("numpy",)


def leave_with_operations_in_flight(count: int, alone: bool, folder: str) -> Stopwatch:
    basics.init()
    assert works("before")
    if alone and basics.rank() == 1:
        wait_until((Path(folder) / "submitted").exists, "rank 0 submits")
        time.sleep(0.2)  # Meanwhile rank 0 leaves.
        return Stopwatch()
    for number in range(count):
        submit(ones(), f"never.waited.for.{number}")
    (Path(folder) / "submitted").touch()
    return Stopwatch()


@pytest.mark.parametrize("alone", [False, True], ids=["all-ranks", "one-rank-alone"])
def test_exit_with_operations_in_flight_is_clean(alone: bool, tmp_path: Path) -> None:
    results = run_world(2, leave_with_operations_in_flight, args=(200, alone, str(tmp_path)))
    left = min(result.value.seconds() for result in results)
    for result in results:
        assert result.returncode == 0
        assert "Traceback" not in result.stderr
        assert "terminate" not in result.stderr
    assert left <= 2.0 + 1.0  # The harness takes up to 1 s to look for leftovers.


class Kept:
    """What an operation keeps alive."""


def drop_handles(count: int, submitted: str) -> list[int]:
    """Drop all handles; count the kept objects during the operations, and when all have ended."""
    basics.init()
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()
    arrays = [ones() for _ in range(count)]
    reduce_array(ones(), "start")
    if basics.rank() == 1:
        wait_until(Path(submitted).exists, "rank 0 has counted what its operations keep")
    for number, array in enumerate(arrays):
        kept, address = Kept(), array.ctypes.data
        alive.add(kept)
        tensor = _core.Tensor("", _core.DTYPES["float32"], array.shape, address, address)
        name = f"dropped.{number}"
        basics.engine().allreduce(name, [tensor], _core.REDUCE_OPS["sum"], keep=kept)
    del kept
    under_way = len(alive)
    Path(submitted).touch()
    wait_until(lambda: not alive, "all operations have ended")
    assert all((array == total_of_ones()).all() for array in arrays)
    return [under_way, len(alive)]


def test_what_a_dropped_handle_keeps_is_released_when_its_operation_ends(tmp_path: Path) -> None:
    first, second = run_world(2, drop_handles, 100, str(tmp_path / "submitted"))
    assert first.value == [100, 0]
    assert second.value[1] == 0
