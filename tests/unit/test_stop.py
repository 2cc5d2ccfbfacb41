"""`hvd.stop_on` notes signals, and keeps earlier handlers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from hvdlite import basics, stop
from hvdlite.errors import ArgumentError

USR1, TERM = signal.SIGUSR1, signal.SIGTERM


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Make a world of one, and afterwards let the signals do what they did before."""
    before = {number: signal.getsignal(number) for number in (USR1, TERM, signal.SIGINT)}
    basics.init()
    yield
    basics.shutdown()
    for number, handler in before.items():
        signal.signal(number, handler)
    stop._installed.clear()
    stop._noted.clear()


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_signal_is_named_and_the_request_stays() -> None:
    stop.stop_on()
    send(USR1)
    assert [stop.stop_requested(), stop.stop_requested()] == ["rank 0: SIGUSR1"] * 2


def test_first_of_two_signals_is_named() -> None:
    stop.stop_on()
    send(TERM)
    send(USR1)
    assert stop.stop_requested() == "rank 0: SIGTERM"


def test_ranks_ask_in_every_third_call_only() -> None:
    stop.stop_on()
    send(USR1)
    asked = [stop.stop_requested(every=3) for _ in range(7)]
    assert [one is not None for one in asked] == [True, False, False, True, False, False, True]
    with pytest.raises(ArgumentError, match=r"stop_requested\(every=0\)"):
        stop.stop_requested(every=0)


def test_earlier_handler_may_raise() -> None:
    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(3)

    signal.signal(TERM, leave)
    stop.stop_on()
    with pytest.raises(SystemExit):
        send(TERM)
    assert stop.stop_requested() == "rank 0: SIGTERM"


def test_signal_of_real_time_has_a_number_for_a_name() -> None:
    number = signal.SIGRTMIN + 3
    stop.stop_on([number])
    send(number)
    assert stop.stop_requested() == f"rank 0: signal {number}"
    signal.signal(number, signal.SIG_DFL)


def test_handlers_that_call_each_other_end() -> None:
    seen = []

    def earlier(number: int, frame: FrameType | None) -> None:
        seen.append("earlier")

    signal.signal(USR1, earlier)
    stop.stop_on()
    ours = signal.getsignal(USR1)

    def wrapper(number: int, frame: FrameType | None) -> None:
        seen.append("wrapper")
        assert callable(ours)
        ours(number, frame)

    signal.signal(USR1, wrapper)
    stop.stop_on()
    send(USR1)
    assert seen == ["wrapper", "earlier"]
    assert stop.stop_requested() == "rank 0: SIGUSR1"


def test_only_the_main_thread_watches() -> None:
    caught: list[BaseException] = []

    def call() -> None:
        try:
            stop.stop_on()
        except ArgumentError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread only" in str(caught[0])


def test_signal_that_nobody_can_catch_is_refused() -> None:
    with pytest.raises(ArgumentError, match="SIGKILL cannot be caught"):
        stop.stop_on([signal.SIGKILL])
    assert stop.watched() is False


def test_signal_to_a_process_that_ends_does_not_hide_its_status() -> None:
    code = (
        "import os, signal, sys\n"
        "from hvdlite import stop\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):\n"
        "        kill(pid, number)\n"
        "late = Late()\n"
        "stop.stop_on()\n"
        "sys.exit(75)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=240, check=False)
    assert done.returncode == 75
