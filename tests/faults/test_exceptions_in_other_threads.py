"""A training function that fails in another thread than the main one ends the world by name."""

from __future__ import annotations

import threading
from typing import Any

from faults.arrays import ones, reduce_array, reduce_until_error
from harness import run_world
from hvdlite import basics

PRELOAD = ("numpy",)

NP = 3


def call_in_a_thread(victim: int) -> dict[str, Any] | None:
    """Call the training function as Ray does: in a thread, which tells the peers of its end."""
    basics.init()
    found: list[dict[str, Any] | None] = [None]

    def train() -> None:
        reduce_array(ones(), "warm.up")
        if basics.rank() == victim:
            raise ValueError("no such file")
        found[0] = reduce_until_error("layer.weight")

    def call() -> None:
        try:
            train()
        except ValueError as error:
            basics.tell_peers(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found[0]


def test_exception_in_another_thread_is_told_to_all_peers() -> None:
    results = run_world(NP, call_in_a_thread, 1)
    assert results[1].value is None
    for result in (results[0], results[2]):
        assert result.value["rank"] == 1
        assert "rank 1 raised ValueError: no such file at " in result.value["message"]
