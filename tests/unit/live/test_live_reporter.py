"""A rank's reporter writes whole lines, never waits, and ends quietly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdlite.live import observed
from hvdlite.live.reporter import CoreWait, PipeWriter, Reporter
from hvdlite.live.sample import Sample
from hvdlite.parameter_server.collection import ServerReport, WorkerReport
from hvdlite.parameter_server.group import Watched
from patience import HANG, Stopwatch, wait_until

FAST = 0.02


class FakeEngine:
    """Answers as an engine does."""

    def __init__(self, size: int = 2) -> None:
        self.calls = 0
        self._size = size

    def live(self) -> dict[str, Any]:
        self.calls += 1
        return {
            "time": float(self.calls),
            "began": 0.5,
            "counters": {"bytes": 10 * self.calls},
            "events": [[1.0, "stall", 1, "x", "x waits"]],
            "steps": {"count": self.calls, "seconds": 1.0, "ranks": [[0.1] * 8] * self._size},
            "stalled": [["x", 2.0, [0], [1]]],
        }


def read_now(pipe: int) -> bytes:
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 1 << 20)
    except BlockingIOError:
        return b""


class Lines:
    """The read end of a pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self._rest = b""

    def _has_line(self) -> bool:
        if b"\n" not in self._rest:
            self._rest += read_now(self.pipe)
        return b"\n" in self._rest

    def next(self) -> Sample:
        wait_until(self._has_line, "a line")
        line, _, self._rest = self._rest.partition(b"\n")
        return Sample.parse(line)


@pytest.fixture
def pipe() -> Iterator[tuple[Lines, int]]:
    read, write = os.pipe()
    yield Lines(read), write
    for fd in (read, write):
        try:
            os.close(fd)
        except OSError:
            pass  # The test has closed it.


def live_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hvdlite-live"]


def wait_for_end(thread: threading.Thread) -> None:
    thread.join(HANG)
    assert not thread.is_alive()


def test_a_line_says_what_the_engine_the_process_and_the_loop_say(pipe: tuple[Lines, int]) -> None:
    lines, write = pipe
    observed = {"samples": 32, "values": {"loss": 0.25}}
    engine = FakeEngine()
    reporter = Reporter(PipeWriter(write), "node7", lambda: observed, FAST)
    reporter.follow(engine, 0, 2, 3)
    sample = lines.next()
    reporter.end()
    assert (sample.rank, sample.size, sample.epoch, sample.host) == (0, 2, 3, "node7")
    assert sample.pid == os.getpid()
    assert sample.counters == {"bytes": 10}
    assert sample.samples == 32 and sample.values == {"loss": 0.25}
    assert sample.steps is not None and len(sample.steps.ranks) == 2
    assert sample.events[0].text == "x waits"
    assert sample.stalled[0].missing == (1,)
    assert sample.rss > 1 << 20 and sample.cpu > 0 and sample.threads >= 2
    assert sample.cores == len(os.sched_getaffinity(0))


def test_waits_for_a_core_are_those_of_all_threads_also_of_ended_ones(tmp_path: Path) -> None:
    def threads(**waited: int) -> None:
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)
        for name, nanoseconds in waited.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "schedstat").write_text(f"9000000000 {nanoseconds} 7\n")

    threads(main=2_000_000_000, worker=500_000_000)
    wait = CoreWait(tmp_path)
    assert wait.seconds() == 2.5
    threads(main=3_000_000_000)
    assert wait.seconds() == 3.5
    threads(main=3_000_000_000, worker=250_000_000)
    assert wait.seconds() == 3.75
    threads(main=3_000_000_000, worker=125_000_000)  # The number of the thread was used again.
    assert wait.seconds() == 3.875
    (tmp_path / "main" / "schedstat").unlink()  # It ends just now.
    assert wait.seconds() == 3.875


def test_the_end_of_a_world_writes_a_last_line_and_the_next_world_goes_on(
    pipe: tuple[Lines, int],
) -> None:
    lines, write = pipe
    first, second = FakeEngine(), FakeEngine(size=1)
    reporter = Reporter(PipeWriter(write), "h", period=60.0)
    reporter.follow(first, 1, 2, 0)
    reporter.end()
    last = lines.next()
    assert (last.epoch, last.ended) == (0, True)
    assert first.calls == 1 and not reporter.busy
    reporter.follow(second, 0, 1, 1)
    reporter.end()
    assert lines.next().epoch == 1
    assert second.calls == 1


def test_an_engine_is_not_kept_alive(pipe: tuple[Lines, int]) -> None:
    lines, write = pipe
    engine = FakeEngine(size=1)
    reporter = Reporter(PipeWriter(write), "h", period=FAST)
    reporter.follow(engine, 0, 1, 0)
    assert reporter.busy and not lines.next().ended
    del engine
    wait_until(lambda: not reporter.busy, "the engine's end")
    wait_until(lambda: lines.next().ended, "the last line, which says so")
    reporter.end()


def test_full_pipe_costs_samples_and_no_time(pipe: tuple[Lines, int]) -> None:
    lines, write = pipe
    engine = FakeEngine(size=500)  # A line of more than a page, which a pipe may take in parts.
    reporter = Reporter(PipeWriter(write), "h", period=FAST)
    reporter.follow(engine, 0, 500, 0)

    def is_full() -> bool:
        before = engine.calls
        time.sleep(10 * FAST)
        return engine.calls == before > 0  # No room: the engine is not even asked.

    wait_until(is_full, "a line that has no room")
    before = engine.calls
    watch = Stopwatch()
    taken = [lines.next() for _ in range(before)]
    assert [sample.time for sample in taken] == [float(n) for n in range(1, before + 1)]
    assert lines.next().time == before + 1
    assert watch.seconds() < 20
    reporter.end()


def test_closed_pipe_ends_the_thread_in_silence(
    pipe: tuple[Lines, int], capfd: pytest.CaptureFixture[str]
) -> None:
    lines, write = pipe
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as scripts do that end in `| head`
    engine = FakeEngine(size=1)
    try:
        reporter = Reporter(PipeWriter(write), "h", period=FAST)
        reporter.follow(engine, 0, 1, 0)
        lines.next()
        thread = live_threads()[-1]
        os.close(lines.pipe)
        wait_for_end(thread)
        reporter.end()  # does not wait
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert capfd.readouterr().err == ""


def test_engine_that_fails_is_one_warning(
    pipe: tuple[Lines, int], capfd: pytest.CaptureFixture[str]
) -> None:
    _, write = pipe
    engine = FakeEngine()
    engine.live = dict  # type: ignore[method-assign]
    reporter = Reporter(PipeWriter(write), "h", period=FAST)
    reporter.follow(engine, 3, 4, 0)
    said = ""

    def warned() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return said.endswith("\n")

    wait_until(warned, "the warning")
    time.sleep(10 * FAST)  # Periods in which it says nothing more.
    reporter.end()
    said += capfd.readouterr().err
    assert said == "hvdlite [3] warning: no live view of it: KeyError('steps')\n"


SCRIPT = """
import json, os, subprocess, sys, threading
taken = "HVDLITE_LIVE_FD" in os.environ
import hvdlite.basics as hvd
from hvdlite.rendezvous.environment import live_pipe
hvd.init()
child = os.fork()
if child == 0:
    os._exit(7 if live_pipe() is not None else 0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
pipes = subprocess.run(
    ["sh", "-c", f"test -e /proc/self/fd/{live_pipe()}; echo $?"], close_fds=False,
    capture_output=True, text=True).stdout.strip()
print(json.dumps({
    "threads": [t.name for t in threading.enumerate()],
    "modules": sorted(name for name in sys.modules if name.startswith("hvdlite.live.re")),
    "environment": "HVDLITE_LIVE_FD" in os.environ,
    "fork": status, "child": pipes, "pipe": live_pipe(), "taken": taken}))
hvd.shutdown()
"""


def run_script(fd: str | None, write: int) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if "HVDLITE" not in name}
    if fd is not None:
        environment["HVDLITE_LIVE_FD"] = fd
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        pass_fds=[write],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_rank_reports_and_its_children_do_not(pipe: tuple[Lines, int]) -> None:
    lines, write = pipe
    found = run_script(f"{write}:{os.fstat(write).st_ino}", write)
    assert "hvdlite-live" in found["threads"]
    assert found["pipe"] == write
    assert not found["environment"]
    assert found["fork"] == 0, "a child by fork may write"
    assert found["child"] == "1", "a child by exec has the pipe"
    sample = lines.next()
    assert (sample.rank, sample.size) == (0, 1)


@pytest.mark.parametrize("given", [None, "", "x", "{fd}", "{fd}:1", "99:{inode}", "0:{inode}"])
def test_without_a_pipe_of_its_own_a_rank_does_nothing(
    pipe: tuple[Lines, int], given: str | None
) -> None:
    lines, write = pipe
    inode = os.fstat(write).st_ino
    found = run_script(given and given.format(fd=write, inode=inode), write)
    assert found["pipe"] is None
    assert "hvdlite-live" not in found["threads"]
    assert found["modules"] == []
    assert read_now(lines.pipe) == b""


def test_a_server_without_an_engine_tells_how_old_the_gradients_of_its_workers_are(
    pipe: tuple[Lines, int],
) -> None:
    workers = {0: WorkerReport(pushes=1), 1: WorkerReport(live=False, pushes=1, ages=4, age_max=4)}
    lines, end = pipe
    watched = Watched(lambda: ServerReport(0, 2, workers))
    reporter = Reporter(PipeWriter(end), "node1", observed.figures, period=FAST)
    try:
        reporter.follow(watched, rank=0, size=3, epoch=0)
        sample = lines.next()
    finally:
        reporter.end()
        observed.forget()
    assert sample.steps is None and sample.size == 3
    assert sample.values["workers"] == 1 and sample.values["pushes"] == 2
    assert sample.values["mean_age"] == 2 and sample.values["largest_age"] == 4
