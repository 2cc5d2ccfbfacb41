"""The life of a world: alone, again after shutdown, under torchrun, idle, and in several sets."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from faults.arrays import reduce_array
from harness import base_environment, run_world
from hvdlite import _core, basics
from patience import wait_until


def test_world_of_one_has_neither_thread_nor_socket() -> None:
    code = """
import os, threading
from hvdlite import basics
def sockets():
    return [l for l in map(os.readlink, open_fds()) if l.startswith("socket:")]
def open_fds():
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.exists(path): yield path
before, tasks = sockets(), len(os.listdir("/proc/self/task"))
basics.init()
assert (basics.rank(), basics.size(), basics.local_size(), basics.cross_size()) == (0, 1, 1, 1)
assert basics.is_homogeneous()
assert sockets() == before and len(os.listdir("/proc/self/task")) == tasks == 1
basics.shutdown()
assert not basics.is_initialized()
basics.init()
print("well")
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=base_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout == "well\n", done.stderr


def _join_three_times() -> list[float]:
    sums = []
    for start in range(3):
        basics.init()
        array = np.full(10, basics.rank() + start, dtype="float32")
        reduce_array(array, "again")
        sums.append(float(array[0]))
        basics.shutdown()
        assert not basics.is_initialized()
    return sums


def test_init_after_shutdown_makes_a_new_world() -> None:
    for hosts in ([0, 0, 0], [0, 1, 1]):
        results = run_world(3, _join_three_times, hosts=hosts)
        assert [result.value for result in results] == [[3.0, 6.0, 9.0]] * 3


def _stay_idle(seconds: float) -> float:
    basics.init()
    reduce_array(np.ones(10, dtype="float32"), "before")
    time.sleep(0.2)
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    reduce_array(np.ones(10, dtype="float32"), "after")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_idle_rank_uses_below_half_a_percent_of_a_core() -> None:
    for hosts in ([0, 0], [0, 1]):
        for result in run_world(2, _stay_idle, 4.0, hosts=hosts):
            assert result.value < 0.005 * 4.0


def _place() -> tuple[int, ...]:
    basics.init()
    place = (basics.local_rank(), basics.local_size(), basics.cross_rank(), basics.cross_size())
    return (*place, int(basics.is_homogeneous()))


def test_places_follow_from_hosts() -> None:
    results = run_world(4, _place, hosts=[0, 0, 1, 1])
    assert [result.value for result in results] == [
        (0, 2, 0, 2, 1),
        (1, 2, 0, 2, 1),
        (0, 2, 1, 2, 1),
        (1, 2, 1, 2, 1),
    ]
    results = run_world(3, _place, hosts=[0, 0, 1])
    assert [result.value for result in results] == [
        (0, 2, 0, 2, 0),
        (1, 2, 0, 1, 0),
        (0, 1, 1, 2, 0),
    ]


def _reduce_in_two_sets() -> list[float]:
    basics.init()
    engine = basics.engine()
    sets = {}
    for ranks in ([0, 1], [1, 2]):
        handle = engine.add_process_set(f"set.{ranks}", ranks)
        handle.wait()
        sets[handle.set_id] = ranks
    arrays, handles = {}, []
    for number, ranks in sets.items():
        if basics.rank() not in ranks:
            continue
        array = arrays[number] = np.full(100, float(basics.rank() + 1), dtype="float32")
        address = array.ctypes.data
        tensor = _core.Tensor("x", _core.DTYPES["float32"], array.shape, address, address)
        op = _core.REDUCE_OPS["average"]
        handles.append(engine.allreduce("x", [tensor], op, process_set=number, keep=array))
    for handle in handles:
        handle.wait()
    engine.barrier("all are done").wait()  # rank 0 coordinates the other process set, too
    return [float(array[99]) for array in arrays.values()]


def test_process_sets_work_at_the_same_time() -> None:
    results = run_world(3, _reduce_in_two_sets)
    assert [result.value for result in results] == [[1.5], [1.5, 2.5], [2.5]]


@pytest.mark.long
def test_torchrun_starts_a_world(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, hvdlite.torch as hvd\n"
        "hvd.init()\n"
        "total = hvd.allreduce(torch.ones(3) * (hvd.rank() + 1), op=hvd.Sum)\n"
        "assert (hvd.size(), hvd.local_size(), total.tolist()) == (2, 2, [3.0] * 3)\n"
        "hvd.shutdown(); hvd.init(); hvd.barrier()\n"
        f"open({str(tmp_path)!r} + f'/{{hvd.rank()}}', 'w').close()\n"
    )
    torchrun = Path(sys.executable).with_name("torchrun")
    done = subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node", "2", script],
        env=base_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "0", "1"}


def _count_threads() -> tuple[int, int]:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    basics.init()
    # The kernel ends a thread a little after it was joined.
    wait_until(lambda: threads() <= before + 1, "one thread more")
    return threads() - before, threading.active_count()


def test_rank_has_one_thread_more_and_it_is_the_engine() -> None:
    for result in run_world(2, _count_threads):
        assert result.value == (1, 1)
