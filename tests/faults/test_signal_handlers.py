"""Signal handlers call hvdlite's functions, or interrupt them: clear errors, and no deadlock."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from faults.arrays import describe, ones, reduce_array, submit, works
from harness import run_world
from hvdlite import basics
from hvdlite.errors import BootstrapError, HvdliteError, NotInitializedError
from hvdlite.objects import broadcast_object, join
from hvdlite.process_sets import add_process_set
from patience import Stopwatch, wait_until

BOUND = 15.0  # seconds; a start may take 60 s, and must not take so long here


@contextlib.contextmanager
def signalled(handler: Callable[[], object], inside: str = "") -> Iterator[None]:
    """Call `handler` as a signal handler of this thread once it is inside what it calls now.

    Another thread sends the signal when it has seen this one there 20 times, with this one free to
    go on between the looks. With `inside`, there is inside the function of this name.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        handler()

    caller, waits, over = sys._getframe(2), threading.get_ident(), threading.Event()

    def send() -> None:
        looks = 0
        while looks < 20:
            if over.wait(0.01):
                return
            looks += is_inside(sys._current_frames()[waits], caller, inside)
        signal.pthread_kill(waits, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, handle)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()
        signal.signal(signal.SIGALRM, before)


def is_inside(frame: FrameType, caller: FrameType, function: str) -> bool:
    """Return whether a thread is in what `caller` calls, other than `signalled`."""
    names = set()
    there: FrameType | None = frame
    while there is not None and there is not caller:
        names.add(there.f_code.co_name)
        there = there.f_back
    return bool(names) and signalled.__name__ not in names and (not function or function in names)


def interrupt() -> None:
    raise KeyboardInterrupt


def reduce() -> None:
    reduce_array(ones(), "rank 0 alone")


def reduce_asynchronously() -> None:
    submit(ones(), "rank 0 alone, too").wait()


def wait_for_all() -> None:
    basics.engine().barrier("barrier").wait()


def join_all() -> None:
    join()


def add_a_set() -> None:
    add_process_set([1])


def broadcast() -> None:
    broadcast_object(7, 1, name="object")


def stop_the_timeline() -> None:
    """Stop a timeline; across hosts this waits up to 20 s for the parts of the others."""
    basics.start_timeline(Path(os.environ["HVDLITE_TEST_FOLDER"]) / "timeline.json")
    basics.stop_timeline()


WAITING: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        reduce,
        reduce_asynchronously,
        wait_for_all,
        join_all,
        add_a_set,
        broadcast,
        stop_the_timeline,
    )
}


def handle_while_it_waits(action: str, folder: str) -> list[dict[str, Any]]:
    """Let rank 0 wait alone in each function, until a signal handler comes; then start anew."""
    os.environ["HVDLITE_TEST_FOLDER"] = folder
    seen = []
    for wait in WAITING.values():
        basics.init()
        assert works("before")
        left = Path(folder) / f"left.{wait.__name__}"
        if basics.rank() == 0:
            watch = Stopwatch()
            told: dict[str, Any] = {"kind": ""}
            with signalled(HANDLERS[action]):
                try:
                    wait()
                except HvdliteError as error:
                    told = describe(error)
                except KeyboardInterrupt:
                    told = {"kind": "KeyboardInterrupt"}
            told |= {"took": watch.seconds(), "up": basics.is_initialized()}
            seen.append(told)
            basics.shutdown()
            left.touch()
        else:
            wait_until(left.exists, "rank 0 has left")
            basics.shutdown()
    return seen


@pytest.mark.parametrize(
    ("action", "kind"), [("shutdown", "ShutdownError"), ("interrupt", "KeyboardInterrupt")]
)
def test_handler_ends_whatever_waits_and_the_process_can_start_anew(
    action: str, kind: str, tmp_path: Path
) -> None:
    first, _ = run_world(2, handle_while_it_waits, action, str(tmp_path), hosts=[0, 1])
    assert len(first.value) == len(WAITING)
    for wait, seen in zip(WAITING, first.value, strict=True):
        assert seen["up"] == (action == "interrupt"), wait
        assert seen["took"] < BOUND, wait
        # A timeline ends with or without a warning at shutdown(). All other functions raise.
        ends_well = (wait, action) == ("stop_the_timeline", "shutdown")
        assert ends_well or seen["kind"] == kind, (wait, seen)


def start_alone(action: str, folder: str) -> dict[str, Any]:
    """Let rank 0 call init() alone, until a signal handler ends that; then all ranks call it."""
    os.environ["HVDLITE_TEST_FOLDER"] = folder
    go = Path(folder) / "go"
    told: dict[str, Any] = {}
    if os.environ["HVDLITE_RANK"] == "0":
        before, watch = len(os.listdir("/proc/self/fd")), Stopwatch()
        try:
            with signalled(HANDLERS[action]):
                basics.init()
        except (HvdliteError, KeyboardInterrupt) as error:
            told = {"kind": type(error).__name__, "message": str(error)}
        told["took"] = watch.seconds()
        told["up"] = basics.is_initialized()
        told["left"] = len(os.listdir("/proc/self/fd")) - before
        told["threads"] = [
            one.name for one in threading.enumerate() if one.name.startswith("hvdlite")
        ]
        go.touch()
    else:
        wait_until(go.exists, "rank 0 has given up")
    basics.init()
    told["works"] = works("at last")
    basics.shutdown()
    return told


def start_again() -> None:
    basics.init()


def ask_for_what_is_not_there() -> None:
    """Check that functions that need a world raise that error, and nothing else; then shut down.

    It shuts down in another thread, for which the handler does not wait, and here.
    """
    for entry in (reduce, wait_for_all, add_a_set, basics.stop_timeline, stop_the_timeline):
        with pytest.raises(NotInitializedError):
            entry()
    threading.Thread(target=basics.shutdown).start()
    basics.shutdown()


HANDLERS = {
    "shutdown": basics.shutdown,
    "init": start_again,
    "everything": ask_for_what_is_not_there,
    "interrupt": interrupt,
}
SAID = {
    "init": "init() was called by a signal handler while init() runs in the same thread",
    "interrupt": "",
}


@pytest.mark.parametrize("action", HANDLERS)
def test_handler_that_comes_while_init_waits(action: str, tmp_path: Path) -> None:
    first, second = run_world(2, start_alone, action, str(tmp_path))
    told = first.value
    assert told["kind"] == ("KeyboardInterrupt" if action == "interrupt" else told["kind"])
    assert (
        SAID.get(action, "init() was given up: shutdown() was called while it ran")
        in (told["message"])
    )
    assert told["took"] < BOUND
    assert not told["up"]
    assert told["left"] == 0, "descriptors"
    assert told["threads"] == []
    assert first.value["works"] and second.value["works"]


def give_up_among_sets(folder: str) -> dict[str, Any]:
    """Let rank 0 wait in init() for rank 1, which is connected but registers no process set."""
    import hvdlite.process_sets as sets

    go = Path(folder) / "go"
    told: dict[str, Any] = {}
    if os.environ["HVDLITE_RANK"] == "1":
        register, sets.register_static = sets.register_static, lambda given: None
        basics.init(process_sets=[[0]])
        sets.register_static = register
        wait_until(go.exists, "rank 0 has given up")
        basics.shutdown()
        return told
    with signalled(basics.shutdown, inside="register_static"):
        try:
            basics.init(process_sets=[[0]])
        except BootstrapError as error:
            told = describe(error)
    told["up"] = basics.is_initialized()
    go.touch()
    return told


def test_handler_that_shuts_down_while_init_registers_sets(tmp_path: Path) -> None:
    first, _ = run_world(2, give_up_among_sets, str(tmp_path))
    assert "init() was given up" in first.value["message"]
    assert not first.value["up"]


def shut_down_over_and_over(folder: str) -> int:
    """Let a handler shut down at many moments of init(), timelines and shutdown()."""
    ended = 0

    def handle(number: int, frame: FrameType | None) -> None:
        basics.shutdown()

    signal.signal(signal.SIGALRM, handle)
    for turn in range(150):
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.00002 * turn)
        try:
            basics.init()
            basics.start_timeline(Path(folder) / "timeline.json")
            basics.stop_timeline()
        except (BootstrapError, NotInitializedError):
            ended += 1
        basics.shutdown()
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert not basics.is_initialized()
    basics.init()
    assert works("at last")
    return ended


def test_handlers_at_any_moment_of_a_world_of_one(tmp_path: Path) -> None:
    (only,) = run_world(1, shut_down_over_and_over, str(tmp_path))
    assert only.value > 0, "no signal came while it ran"


def end_by_an_error_and_an_interrupt() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    basics.init()
    basics.tell_also(interrupt)
    raise ValueError("boom")


def test_ctrl_c_to_a_rank_that_an_error_ends_adds_no_error_of_the_hook() -> None:
    (result,) = run_world(1, end_by_an_error_and_an_interrupt, expect_failure=True)
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: boom\n")
    assert "sys.excepthook" not in result.stderr
