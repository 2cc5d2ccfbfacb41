"""The life of a world: alone, again after shutdown, under torchrun, idle, and in several sets."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time

import numpy as np

from faults.arrays import reduce_array
from harness import base_environment, run_world
from hvdlite import basics
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
