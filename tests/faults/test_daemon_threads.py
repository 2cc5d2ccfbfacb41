"""A script that ends while daemon threads are inside hvdlite ends well, and at once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.arrays import ones, reduce_array, works
from harness import run_world
from hvdlite import basics
from hvdlite.errors import HvdliteError
from hvdlite.objects import broadcast_object

THREADS = 6


def wait_for_a_reduction(number: int) -> None:
    reduce_array(ones(), f"never.{number}")


def reduce_again_and_again(number: int) -> None:
    for step in range(1 << 30):
        reduce_array(ones(), f"step.{number}.{step}")


def wait_for_an_object(number: int) -> None:
    broadcast_object({"from": number}, 0, name=f"object.{number}")


def write_timelines(number: int) -> None:
    folder = os.environ["HVDLITE_TEST_FOLDER"]
    while True:
        basics.start_timeline(Path(folder) / f"timeline.{number}.json")
        basics.stop_timeline()


def shut_down(number: int) -> None:
    basics.shutdown()


def join_again(number: int) -> None:
    """Only rank 1 calls init() again, so it waits until the script ends."""
    basics.shutdown()
    if os.environ["HVDLITE_RANK"] == "1":
        basics.init()


INSIDE: dict[str, Callable[[int], None]] = {
    function.__name__: function
    for function in (
        wait_for_a_reduction,
        reduce_again_and_again,
        wait_for_an_object,
        write_timelines,
        shut_down,
        join_again,
    )
}


def end_with_threads_inside(kind: str, folder: str) -> None:
    """Let threads of rank 1 alone wait for collectives of all ranks, and end the script."""
    os.environ["HVDLITE_TEST_FOLDER"] = folder
    alone = kind.startswith("wait_for")
    basics.init()
    assert works("before")
    begun = threading.Barrier(THREADS + 1)

    def inside(number: int) -> None:
        begun.wait()
        try:
            INSIDE[kind](number)
        except HvdliteError:
            pass  # The script is ending, so the error is of no interest.

    if not alone or basics.rank() == 1:
        for number in range(THREADS):
            threading.Thread(target=inside, args=(number,), daemon=True).start()
        begun.wait()
    time.sleep(0.2)  # The threads work meanwhile.


@pytest.mark.parametrize("kind", INSIDE)
def test_script_ends_well_with_daemon_threads_inside(kind: str, tmp_path: Path) -> None:
    results = run_world(2, end_with_threads_inside, kind, str(tmp_path))
    assert [result.returncode for result in results] == [0, 0]


def end_without_a_word(kind: str) -> None:
    """End the interpreter while threads wait, without the exit hook that leaves the world."""
    import atexit

    basics.init()
    assert works("before")
    atexit.unregister(basics._leave_at_exit)
    if basics.rank() == 1:
        for number in range(THREADS):
            threading.Thread(target=INSIDE[kind], args=(number,), daemon=True).start()
    time.sleep(0.2)  # The threads work meanwhile.


def test_interpreter_ends_while_threads_wait() -> None:
    for result in run_world(2, end_without_a_word, "wait_for_a_reduction"):
        assert result.returncode == 0
        assert "terminate called" not in result.stderr
