"""Contestants that take turns on the ranks of a benchmark, and what their calls cost.

Short turns, one after the other, let a disturbance of the machine affect all contestants.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as gloo

Call = Callable[[], object]


def join_gloo(store: str, rank: int, size: int, with_nccl: bool = False) -> None:
    """Connect this rank to torch.distributed's gloo group of the same ranks, over loopback."""
    # The ranks meet through the file `store`. With `with_nccl`, GPU tensors travel by NCCL.
    backend = "cpu:gloo,cuda:nccl" if with_nccl else "gloo"
    gloo.init_process_group(backend, store=gloo.FileStore(store, size), rank=rank, world_size=size)


def slowest(microseconds: list[float]) -> list[float]:
    """Return the maximum over ranks of each figure: a collective is as fast as its slowest rank."""
    figures = torch.tensor(microseconds, dtype=torch.float64)
    gloo.all_reduce(figures, op=gloo.ReduceOp.MAX)
    return [float(figure) for figure in figures]


def timed(call: Call) -> float:
    """Time one call in microseconds."""
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1e3


class Cost(NamedTuple):
    """What a call of a contestant costs in microseconds, each on the rank where it is highest."""

    us: float  # median wall time
    best_us: float  # shortest wall time
    cpu_us: float  # processor time of all threads of the process


def costs_of(
    calls: Mapping[str, Call], rounds: int, seconds: float, pause: float = 0.0, most: int = 1000
) -> dict[str, Cost]:
    """Let the contestants take turns, and return what a call of each costs; all ranks call this."""
    # A turn takes `seconds`, but has two calls at least and `most` of them at most. The caller
    # sleeps for `pause` seconds before each call.
    repeats = {name: repeats_within(call, seconds, pause, most) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    used: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            gloo.barrier()
            call()  # This one is not measured, because the turn before affects it.
            before = time.process_time_ns()
            for _ in range(repeats[name]):
                if pause:
                    time.sleep(pause)
                times[name].append(timed(call))
            used[name].append((time.process_time_ns() - before) / 1e3 / repeats[name])
    return {
        name: Cost(*slowest([statistics.median(own), min(own), statistics.median(used[name])]))
        for name, own in times.items()
    }


def repeats_within(call: Call, seconds: float, pause: float, most: int) -> int:
    """Return how often `call` fits into so many seconds; all ranks get the same number."""
    gloo.barrier()
    expected = slowest([statistics.median(timed(call) for _ in range(3))])[0] / 1e6
    return max(2, min(most, int(seconds / max(expected + pause, 1e-6))))
