"""A rank dies of SIGKILL, and all surviving ranks name it in an error within a second."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from faults.arrays import (
    die,
    noted_time,
    ones,
    reduce_array,
    reduce_until_error,
    seconds_between,
    works,
)
from harness import run_world
from hvdlite import basics
from hvdlite.rendezvous import mesh

PRELOAD = ("numpy",)

BOUND = 1.0
TENSOR = "layer.weight"


def killed_inside_a_collective(victim: int, noted: str, delay: float) -> dict[str, Any] | None:
    basics.init()
    reduce_array(ones(), "warm.up")
    if basics.rank() == victim:
        threading.Timer(delay, die, [noted]).start()
    return reduce_until_error(TENSOR)


def killed_between_collectives(victim: int, noted: str, delay: float) -> dict[str, Any] | None:
    basics.init()
    reduce_array(ones(), TENSOR)
    if basics.rank() == victim:
        time.sleep(delay)  # The other ranks have submitted by now, and wait for this one.
        die(noted)
    return reduce_until_error(TENSOR)


def killed_in_a_tree_of_hosts(victim: int, noted: str, delay: float) -> dict[str, Any] | None:
    """Control messages go through a tree of hosts, which small worlds have only here."""
    mesh._LARGEST_STAR = 1
    basics.init()
    for step in range(20):
        assert works(f"layer.{step % 3}")
    return killed_between_collectives(victim, noted, delay)


def killed_before_the_first_collective(
    victim: int, noted: str, delay: float
) -> dict[str, Any] | None:
    basics.init()
    if basics.rank() == victim:
        time.sleep(delay / 10)
        die(noted)
    return reduce_until_error(TENSOR)


def killed_with_forked_children(victim: int, noted: str, delay: float) -> dict[str, Any] | None:
    """Two children of fork(), like a DataLoader's, keep copies of all sockets after the death."""
    basics.init()
    reduce_array(ones(), TENSOR)
    if basics.rank() == victim:
        for _ in range(2):
            if os.fork() == 0:
                outlive_the_parent()
        threading.Timer(delay, die, [noted]).start()
    return reduce_until_error(TENSOR)


def outlive_the_parent() -> None:
    """Live until the harness kills this process, which it does once all ranks have ended."""
    time.sleep(600)
    os._exit(0)


def assert_survivors_name(victim: int, results: list[Any], noted: Path) -> None:
    died = noted_time(noted)
    assert results[victim].returncode == -9
    survivors = [result for result in results if result.rank != victim]
    assert survivors
    for result in survivors:
        assert result.returncode == 0, result.stderr
        error = result.value
        assert error["kind"] == "RankFailedError"
        assert error["rank"] == victim
        assert f"rank {victim}" in error["message"]
        assert TENSOR in error["message"]
        assert "died" in error["message"]
        assert seconds_between(died, error["seen"]) <= BOUND


@pytest.mark.parametrize(
    ("body", "victim", "hosts"),
    [
        (killed_inside_a_collective, 0, [0, 0, 0]),
        (killed_inside_a_collective, 3, [0, 1, 0, 1]),
        (killed_between_collectives, 2, [0, 0, 0]),
        (killed_between_collectives, 0, [0, 1, 0, 1]),
        (killed_in_a_tree_of_hosts, 3, [0, 0, 1, 1, 2, 2, 3]),  # Host 3 hangs on host 1.
        (killed_before_the_first_collective, 1, [0, 0, 0]),
        (killed_with_forked_children, 0, [0, 0, 0]),
        (killed_with_forked_children, 1, [0, 0, 0]),
    ],
)
def test_sigkilled_rank_is_named_by_every_survivor(
    body: Any, victim: int, hosts: list[int], tmp_path: Path
) -> None:
    noted, delay = tmp_path / "died", random.uniform(0.05, 0.3)
    arguments = (victim, str(noted), delay)
    results = run_world(len(hosts), body, *arguments, hosts=hosts, expect_failure=True)
    assert_survivors_name(victim, results, noted)
