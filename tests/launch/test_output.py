"""The ranks' output is shown in whole lines and at full speed, on terminals, pipes and files."""

from __future__ import annotations

import math
import os
import re
import selectors
import subprocess
import time
from pathlib import Path

import pytest

from harness import base_environment
from hvdlite.launch.console import Console
from hvdlite.launch.output import OutputPump
from hvdlite.launch.process import STDERR, STDOUT
from launch.marked import MarkedJob, python
from launch.on_terminal import TerminalJob
from launcher import end_launcher, launcher_command, run_launcher, start_launcher
from patience import HANG, Stopwatch, wait_until

TESTS = str(Path(__file__).parents[1])
FLOOD = f"""
import os, sys
sys.path.append({TESTS!r})
from patience import Stopwatch
line = (b"%s" % os.environ["HVDLITE_RANK"].encode()) * 99 + b"\\n"
block = line * 10_000
watch = Stopwatch()
for _ in range(50):
    sys.stdout.buffer.write(block)
sys.stdout.buffer.flush()
print("seconds", format(watch.seconds(), ".6f"), file=sys.stderr)
"""


def test_flood_of_two_ranks_blocks_neither() -> None:
    result = run_launcher("-np", "2", *python(FLOOD))
    assert result.returncode == 0
    blocked = [float(text) for text in re.findall(r"seconds ([\d.]+)", result.stderr)]
    assert len(blocked) == 2
    assert max(blocked) <= 1.5
    lines = result.stdout.split("\n")
    assert lines.pop() == ""
    assert len(lines) == 1_000_000
    assert set(lines) == {f"[{rank}] " + str(rank) * 99 for rank in (0, 1)}


def test_end_of_one_stream_leaves_the_line_of_the_other_whole() -> None:
    code = """
import fcntl, os, sys, termios, time
def unread():
    return int.from_bytes(fcntl.ioctl(1, termios.FIONREAD, bytes(4)), sys.byteorder)
def pipes():
    return len(os.listdir(f"/proc/{os.getppid()}/fd"))
sys.stdout.write("x" * 600_000); sys.stdout.flush()
while unread(): time.sleep(0.01)
before = pipes()
os.close(2)
while pipes() == before: time.sleep(0.01)  # The launcher has not seen the end yet.
print("y")
"""
    result = run_launcher("-np", "1", *python(code))
    assert result.stdout == "[0] " + "x" * 600_000 + "y\n"


def test_bytes_that_are_no_text_pass() -> None:
    code = "import sys; sys.stdout.buffer.write(bytes([0, 255, 10]))"
    process = start_launcher("-np", "1", *python(code))
    try:
        assert process.communicate(timeout=HANG)[0] == b"[0] \x00\xff\n"
    finally:
        end_launcher(process)


def test_timestamps() -> None:
    result = run_launcher("-np", "1", "--prefix-output-with-timestamp", *python("print('x')"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \[0\] x\n", result.stdout)


def test_files_hold_what_each_rank_wrote(tmp_path: Path) -> None:
    code = "import os, sys; print('out'); print('no end', end='', file=sys.stderr)"
    result = run_launcher("-np", "2", "--output-filename", str(tmp_path / "logs"), *python(code))
    for rank in (0, 1):
        folder = tmp_path / "logs" / f"rank.{rank}"
        assert (folder / "stdout").read_text() == "out\n"
        assert (folder / "stderr").read_text() == "no end"
    assert sorted(result.stdout.splitlines()) == ["[0] out", "[1] out"]
    assert {"[0] no end", "[1] no end"} <= set(result.stderr.splitlines())


def test_folder_for_files_that_cannot_be_made_is_one_clear_line() -> None:
    result = run_launcher("-np", "2", "--output-filename", "/dev/null/x", *python("print(1)"))
    assert result.returncode == 1
    assert "/dev/null/x" in result.stderr
    assert "Traceback" not in result.stderr


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_slow_reader_costs_no_memory_and_does_not_stop_the_watch() -> None:
    code = "import os\nwhile True: os.write(1, b'x' * 99 + b'\\n')"
    with MarkedJob(2, *python(code)) as job:
        wait_until(lambda: len(ranks_of(job)) == 2, "both ranks")
        ranks = ranks_of(job)
        # Nothing reads the output, so all pipes and queues become full.
        wait_until(lambda: all(is_held_up(rank) for rank in ranks.values()), "full queues")
        assert resident_bytes(job.process.pid) < 100 << 20
        watch = Stopwatch()
        os.kill(ranks[1], 9)
        # The launcher itself still waits for its reader.
        wait_until(lambda: len(job.alive()) <= 1, "the end of the ranks")
        assert watch.seconds() <= 3.0
        status, _, stderr, _ = job.finish()
    assert status == 137
    assert "rank 1" in stderr


def ranks_of(job: MarkedJob) -> dict[int, int]:
    """Return the process ids of the ranks that write already, by rank."""
    found = {}
    for pid in job.alive():
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        match = re.search(rb"\0HVDLITE_RANK=(\d)\0", environment)
        if match and written_by(pid) > 4096:  # One rank alone may fill the launcher's queue.
            found[int(match[1])] = pid
    return found


def written_by(pid: int) -> int:
    """Return how many bytes a process has written."""
    match = re.search(r"wchar: (\d+)", Path(f"/proc/{pid}/io").read_text())
    return int(match[1]) if match else 0


def is_held_up(pid: int) -> bool:
    """Return whether a process waits, and writes nothing for a moment."""
    before = Path(f"/proc/{pid}/io").read_text()
    time.sleep(0.2)
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state in "SD" and Path(f"/proc/{pid}/io").read_text() == before


class Paper:
    """A console that is a file, or a terminal."""

    full = False

    def __init__(self, terminal: bool = False) -> None:
        self.text = b""
        self._terminal = terminal

    def is_terminal(self, fd: int) -> bool:
        return self._terminal

    def write(self, fd: int, text: bytes) -> None:
        self.text += text


def test_progress_bar_of_a_long_epoch_is_seen_in_a_file_now_and_then() -> None:
    paper, (read, write) = Paper(), os.pipe()
    with selectors.DefaultSelector() as selector:
        pump = OutputPump(paper, selector, timestamps=False)  # type: ignore[arg-type]
        pump.open(0, read, STDERR)
        for percent in (b"\r10%", b"\r20%", b"\r30%"):
            os.write(write, percent)
            selector.select(HANG)[0][0].data()
        when = pump.due(0.0)
        assert when is not None and paper.text == b""
        assert pump.due(when) is None
        assert paper.text == b"[0] 30%\n"
        os.write(write, b"\r100%\n")
        os.close(write)
        pump.finish()
    assert paper.text == b"[0] 30%\n[0] 100%\n"


def test_progress_bar_of_the_lowest_rank_is_drawn_and_others_are_seen_when_full() -> None:
    paper = Paper(terminal=True)
    with selectors.DefaultSelector() as selector:
        pump = OutputPump(paper, selector, timestamps=False)  # type: ignore[arg-type]
        for rank in range(2):
            pump.open(rank, None, STDERR)
            pump.open(rank, None, STDOUT)
        pump.feed(1, STDERR, b"\r10%\r20%")
        pump.feed(0, STDERR, b"\r30%\r40%")
        assert paper.text == b"[1] 10%\n[0] 30%"
        pump.feed(1, STDERR, b"\r30%\r40%")
        assert pump.due(math.inf) is None
        assert paper.text == b"[1] 10%\n[0] 30%\r[0] 40%"
        pump.feed(1, STDERR, b"\r100%\n")
        assert paper.text == b"[1] 10%\n[0] 30%\r[0] 40%\n[1] 100%\n"
        paper.text = b""
        pump.feed(0, STDERR, b"\r50%\r   \r")  # as tqdm.write
        pump.feed(0, STDOUT, b"hello\n")
        assert paper.text == b"[0] 50%\r[0]    \r[0] hello\n"
        pump.finish()


def test_line_of_another_rank_does_not_land_in_a_progress_bar(tmp_path: Path) -> None:
    code = """
import os, sys, time
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)
if os.environ["HVDLITE_RANK"] == "0":
    sys.stdout.write("50%"); sys.stdout.flush(); wait_for("greeted"); print(" done")
else:
    wait_for("half"); print("hello")
"""
    with TerminalJob("-np", "2", *python(code), width=80, cwd=tmp_path) as job:
        job.wait_for("50%")
        (tmp_path / "half").touch()
        job.wait_for("hello")
        (tmp_path / "greeted").touch()
        assert job.finish() == ["[0] 50%", "[1] hello", "[0]  done"]


def test_width_of_the_terminal_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it.
    show = python("import os; print(os.environ.get('COLUMNS'))")
    with TerminalJob("-np", "1", *show, width=80) as job:
        assert job.finish() == ["[0] 74"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_one_descriptor_closed_from_the_start(stream: str) -> None:
    fd = {"stdout": 1, "stderr": 2}[stream]
    script = f'exec "$0" "$@" {fd}>&-'
    done = subprocess.run(
        ["sh", "-c", script, *launcher_command("-np", "1", *python("print('x')"))],
        env=base_environment(),
        capture_output=True,
        text=True,
        timeout=HANG,
        cwd="/tmp",
        check=False,
    )
    assert done.returncode in (0, 1)
    assert "Traceback" not in done.stderr


def test_last_words_of_the_launcher_are_written_by_a_thread_that_gets_no_core(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write = Console._write_all

    def late(console: Console, fd: int, data: bytes) -> None:
        time.sleep(0.2)  # as on a busy machine, where the launcher's own thread goes on
        write(console, fd, data)

    monkeypatch.setattr(Console, "_write_all", late)
    with Console() as console:
        assert console.drained(0.0)
        console.say("the job was none")
    assert capfd.readouterr().err == "hvdlite-run: the job was none\n"
