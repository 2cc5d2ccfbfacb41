"""Operations work in any order, from any thread and in any number, and so do exits amid them."""

from __future__ import annotations

import random
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults.arrays import Array, ones, reduce_array, submit, total_of_ones, works
from harness import run_world
from hvdlite import _core, basics
from patience import Stopwatch, wait_until

PRELOAD = ("numpy",)


def reduce_in_random_orders(tensors: int, seeds: int) -> int:
    """Submit the same tensors in another order on every rank; return how many sums were wrong."""
    basics.init()
    rank, size = basics.rank(), basics.size()
    wrong = 0
    for seed in range(seeds):
        order = list(range(tensors))
        random.Random(seed * size + rank).shuffle(order)
        arrays: list[Array] = [
            np.full(1 + number, number + rank, dtype="float64") for number in range(tensors)
        ]
        handles = {number: submit(arrays[number], f"tensor.{number}") for number in order}
        for number in random.Random(seed).sample(order, tensors):
            handles[number].wait()
            wrong += int((arrays[number] != number * size + sum(range(size))).any())
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_any_order_of_submission_gives_exact_sums(size: int) -> None:
    results = run_world(size, reduce_in_random_orders, args=(100, 50))
    assert [result.value for result in results] == [0] * size


def reduce_from_threads(threads: int, repeats: int) -> int:
    basics.init()
    wrong: list[str] = []

    def work(thread: int) -> None:
        for repeat in range(repeats):
            array = ones(100 + thread) * (repeat + 1)
            reduce_array(array, f"thread.{thread}")
            if (array != total_of_ones() * (repeat + 1)).any():
                wrong.append(f"{thread}/{repeat}")

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return len(wrong)


def test_eight_threads_get_right_sums() -> None:
    results = run_world(2, reduce_from_threads, args=(8, 50))
    assert [result.value for result in results] == [0, 0]


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


def keep_outstanding(count: int) -> dict[str, Any]:
    basics.init()
    arrays: list[Array] = [np.full(16, number % 100, dtype="float32") for number in range(count)]
    assert works("before")
    watch = Stopwatch()
    handles = [submit(array, f"tensor.{number}") for number, array in enumerate(arrays)]
    for handle in handles:
        handle.wait()
    seconds = watch.seconds()
    size = basics.size()
    wrong = sum((array != number % 100 * size).any() for number, array in enumerate(arrays))
    return {"seconds": seconds, "wrong": int(wrong)}


def test_ten_thousand_outstanding_tensors_are_all_right() -> None:
    results = run_world(2, keep_outstanding, args=(10_000,))
    for result in results:
        assert result.value["wrong"] == 0
        assert result.value["seconds"] <= 2.0


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
