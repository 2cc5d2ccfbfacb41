"""`hvdlite-run --live`: what every rank does, below the output, without touching the output."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from launch.live_ranks import NAME, SAMPLES, live
from launch.marked import MarkedJob, python
from launch.on_terminal import TerminalJob
from launcher import run_launcher
from patience import HANG

# A file for which ranks wait; they report meanwhile.
UNTIL_END = "while not os.path.exists(os.environ['TEST_END']):\n    report(n); time.sleep(0.2)\n"
QUICK = SAMPLES + "for n in range(1, 8):\n    report(n); time.sleep(0.2)\n"
FLOWING = SAMPLES + (
    "for n in range(1, 1001):\n"
    "    if n % 50 == 0: report(n)\n"
    "    time.sleep(0.001)\n"
    "    out = sys.stderr if n % 3 == 0 else sys.stdout\n"
    "    out.write(f'line {n} of rank {rank} ' + 'x' * (n % 97)); out.flush()\n"
    "    out.write(' end\\n'); out.flush()\n" + UNTIL_END
)
WAITING = SAMPLES + "n = 1\nwhile True:\n    report(n); n += 1; time.sleep(0.2)\n"
DRIVER = (str(Path(__file__).with_name("live_driver.py")),)
# A rank may lose its core between two writes of a line, and the launcher would show the first one.
WHOLE_LINES = {"TEST_REST_SECONDS": str(10 * HANG)}


@pytest.fixture
def end(tmp_path: Path) -> Path:
    """The file for which ranks wait."""
    return tmp_path / "end"


def ends_with_rows(shown: list[str], starts: list[str], last: str = "") -> bool:
    """Tell whether the last lines begin with these texts; the last one also has `last`."""
    rows = shown[-len(starts) :]
    begins = [line.startswith(start) for line, start in zip(rows, starts, strict=False)]
    return begins == [True] * len(starts) and last in rows[-1]


def test_flowing_output_is_whole_and_the_rows_are_below_it(end: Path) -> None:
    env = {"TEST_END": str(end), **WHOLE_LINES}
    with TerminalJob(*live(2, FLOWING), width=80, env=env, program=DRIVER) as job:
        job.wait_for("line 1000 of rank 0", "line 1000 of rank 1", "step 1,000")
        starts = [f"{NAME}  step 1,000", "rank host", "0 ", "1 ", ""]
        late = "straggler: 90 ms late in data or forward"
        job.wait_until(lambda shown: ends_with_rows(shown, starts, late))
        end.touch()
        job.finish()
        lines = job.screen.unwrapped
        assert job.process.returncode == 0
    said = [line for line in lines if line.startswith("hvdlite-run: ")]
    for rank in (0, 1):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        wanted = [f"[{rank}] line {n} of rank {rank} {'x' * (n % 97)} end" for n in range(1, 1001)]
        assert sorted(own) == sorted(wanted)
        stdout = [line for line in own if int(line.split()[2]) % 3]
        assert stdout == [line for line in wanted if int(line.split()[2]) % 3]
    assert len(lines) == 2000 + len(said), "rows are left on the terminal"
    assert "step 1,000" in said[-1]


def test_terminal_may_change_its_size() -> None:
    with TerminalJob(*live(2, WAITING), width=120, env=WHOLE_LINES, program=DRIVER) as job:
        job.wait_for("rank host", "straggler")
        job.resize(50, 10)
        job.wait_until(lambda shown: len(shown) == 1 and shown[0].startswith(f"{NAME}  step"))
        job.resize(100, 30)
        job.wait_for("rank host")
        job.process.send_signal(signal.SIGINT)
        shown = job.finish()
    assert shown[0] == "hvdlite-run: Ctrl-C: stopping 2 ranks (again to kill them at once)"
    own = [line for line in shown[1:] if "waiting up to" not in line]  # on a crowded machine
    assert all(line.startswith(("[0] ", "[1] ")) for line in own)
    assert job.process.returncode == 130


@pytest.mark.parametrize("where", ["stdout", "stderr"])
def test_one_of_the_outputs_may_be_a_file(where: str, end: Path, tmp_path: Path) -> None:
    code = QUICK + UNTIL_END + "print('to stdout'); print('to stderr', file=sys.stderr)\n"
    env = {"TEST_END": str(end)}
    with (
        open(tmp_path / "file", "wb") as file,
        TerminalJob(*live(1, code), width=80, env=env, **{where: file}) as job,
    ):
        job.wait_for("rank host")
        end.touch()
        shown = job.finish()
    written = (tmp_path / "file").read_text()
    assert f"[0] to {where}\n" in written
    assert "rank host" not in written and "\x1b" not in written
    other = {"stdout": "stderr", "stderr": "stdout"}[where]
    assert f"[0] to {other}" in shown
    assert not any(line.startswith("rank host") for line in shown)


def test_no_colour_and_dumb_terminals_are_respected(end: Path) -> None:
    env = {"NO_COLOR": "1", "TEST_END": str(end)}
    with TerminalJob(*live(1, QUICK + UNTIL_END), width=80, env=env) as job:
        job.screen.colours = False
        job.wait_for("rank host")
        end.touch()
        job.finish()
    env = {"TERM": "dumb", "TEST_LINE_SECONDS": str(10 * HANG)}
    with TerminalJob(*live(1, QUICK), width=80, env=env, program=DRIVER) as job:
        job.screen.colours = False
        shown = job.finish()
    assert len(shown) == 1 and shown[0].startswith(f"hvdlite-run: {NAME}  step 7")


def test_without_a_terminal_there_are_lines_on_stderr(end: Path) -> None:
    program, env = (*DRIVER, "--live"), {"TEST_END": str(end)}
    started = time.monotonic()
    with MarkedJob(2, *python(QUICK + UNTIL_END), program=program, env=env) as job:
        first = job.wait_for_stderr("step/s")
        end.touch()
        status, stdout, stderr, _ = job.finish()
    assert status == 0
    assert stdout == ""
    lines = [first, *(line for line in stderr.splitlines() if "step/s" in line)]
    # There is one a second, and one at the end.
    assert 2 <= len(lines) <= time.monotonic() - started + 1, lines
    assert all(line.startswith(f"hvdlite-run: {NAME}  step ") for line in lines)
    assert "\x1b" not in first + stderr


def test_job_without_the_flag_has_no_pipe_and_no_view() -> None:
    code = "import os; print('HVDLITE_LIVE_FD' in os.environ, len(os.listdir('/proc/self/fd')))"
    result = run_launcher("-np", "1", *python(code))
    # Besides the usual three: the folder itself, and the pipe by which its group dies.
    assert result.stdout == "[0] False 5\n"
