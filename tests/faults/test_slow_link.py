"""A slow link of 20 Mbit/s between two hosts is not taken for a dead rank."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from faults.arrays import Array, reduce_array
from faults.links import ENTER, linked_hosts, needs_namespaces, served_store
from harness import World
from hvdlite import basics

PRELOAD = ("numpy",)

BYTES = 12 << 20
PATIENCE = 2.0  # far less than the transfer takes


def reduce_over_the_link(count: int) -> dict[str, Any]:
    basics.init()
    gradient: Array = np.full(count, basics.rank() + 1, dtype="float32")
    begin = time.monotonic()
    reduce_array(gradient, "large.gradient")
    return {
        "seconds": time.monotonic() - begin,
        "right": bool((gradient == 3).all()),
        "hosts": len(set(basics.current_world().host_of)),
    }


@needs_namespaces
def test_slow_link_is_not_taken_for_a_dead_rank() -> None:
    with linked_hosts(2, "20mbit"), served_store(2) as variables:
        environment = {
            **variables,
            "HVDLITE_COLLECTIVE_TIMEOUT": str(PATIENCE),
            "HVDLITE_PEER_TIMEOUT": str(PATIENCE),
            "HVDLITE_STALL_WARNING": "1",
        }
        body, count = reduce_over_the_link, BYTES // 4
        with World(2, body, count, env=environment, command=ENTER) as world:
            results = world.wait()
    for result in results:
        assert result.value["right"]
        assert result.value["hosts"] == 2
        assert result.value["seconds"] > PATIENCE
