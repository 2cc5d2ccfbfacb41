"""Worlds whose control messages go through a tree of hosts, which small worlds do only here."""

from __future__ import annotations

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

HOSTS = [0, 0, 1, 1, 2, 2, 3]  # host 3 hangs on host 1
BOUND = 1.0


def train_in_a_tree(victim: int, noted: str) -> dict[str, Any] | None:
    mesh._LARGEST_STAR = 1
    basics.init()
    for step in range(20):
        assert works(f"layer.{step % 3}")
    if victim < 0:
        basics.shutdown()
        return None
    reduce_array(ones(), "layer.weight")
    if basics.rank() == victim:
        time.sleep(0.2)  # The other ranks submit meanwhile, and wait for this one.
        die(noted)
    return reduce_until_error("layer.weight")


@pytest.mark.parametrize("victim", [-1, 3])
def test_tree_of_hosts_names_the_rank_that_dies(victim: int, tmp_path: Path) -> None:
    noted = tmp_path / "died"
    dies = victim >= 0
    results = run_world(
        len(HOSTS), train_in_a_tree, victim, str(noted), hosts=HOSTS, expect_failure=dies
    )
    for result in results:
        if result.rank == victim:
            assert result.returncode == -9
            continue
        assert result.returncode == 0, result.stderr
        if dies:
            assert result.value["rank"] == victim, result.value
            assert f"rank {victim} died" in result.value["message"]
            assert seconds_between(noted_time(noted), result.value["seen"]) <= BOUND
