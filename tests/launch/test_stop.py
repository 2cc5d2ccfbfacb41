"""Ctrl-C, SIGTERM or SIGKILL ends the launcher, and nothing of the job is left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from harness import shm_entries
from launch.marked import DEAF_SLEEPER, SLEEPER, MarkedJob, python
from launch.test_real_job import LOOP

BOUND = 2.0
# A rank that prints which signal it got, and then saves something until there is a file SAVE, or
# for longer than the 2 s after which the ranks would be killed if one of them had failed.
SAVER = """
import os, signal, sys, time
def told(number, frame):
    signal.signal(number, signal.SIG_IGN)  # It comes twice if all processes are signalled.
    raise SystemExit("SIGTERM")
signal.signal(signal.SIGTERM, told)
try:
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
except (KeyboardInterrupt, SystemExit) as why:
    print("told by", type(why).__name__, flush=True)
finally:
    if "SAVE" in os.environ:
        while not os.path.exists(os.environ["SAVE"]):
            time.sleep(0.01)
    else:
        time.sleep(2.5)
    print("saved", flush=True)
"""
# A rank that ignores SIGINT and SIGTERM.
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + DEAF_SLEEPER


@pytest.mark.parametrize(
    ("number", "status", "told"), [(2, 130, "KeyboardInterrupt"), (15, 143, "SystemExit")]
)
def test_ranks_have_time_to_save_and_are_told_by_the_users_signal(
    number: int, status: int, told: str, tmp_path: Path
) -> None:
    env = {"OMP_NUM_THREADS": "1", "SAVE": str(tmp_path / "save")}
    with MarkedJob(2, *python(SAVER), env=env) as job:
        job.wait_until_ready(2)
        job.signal(number)
        note = job.wait_for_stderr("waiting up to")
        waited = time.monotonic() - job.signalled_at
        (tmp_path / "save").touch()
        code, stdout, _, _ = job.finish()
        assert job.alive() == []
    assert code == status
    for rank in (0, 1):
        assert f"[{rank}] told by {told}\n" in stdout
        assert f"[{rank}] saved\n" in stdout
    assert waited >= 2.0  # Without a grace they would have been killed after 1.5 s.
    again = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    match = re.search(r"waiting up to (\d+) s for ranks 0, 1; (.*) again ends them at once\n", note)
    assert match and match[2] == again, note
    assert 30 - waited - 1 <= int(match[1]) <= 28


def test_signal_after_a_failure_does_not_make_the_job_last_longer(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
from pathlib import Path
handles = Path(os.environ["HANDLES"])
if os.environ["HVDLITE_RANK"] == "0":
    while not handles.exists():
        time.sleep(0.01)
    sys.exit(3)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: print("ready: the job ends", flush=True))
handles.touch()
while True:
    time.sleep(0.05)
"""
    with MarkedJob(2, *python(code), env={"HANDLES": str(tmp_path / "handles")}) as job:
        job.wait_until_ready(1)
        job.signal(signal.SIGINT)
        status, _, _, seconds = job.finish()
        assert job.alive() == []
    assert status in (130, 3)
    assert seconds <= 5


def test_signal_that_reached_the_ranks_first_leaves_them_the_grace() -> None:
    code = f"import os\nif os.environ['HVDLITE_RANK'] == '0':\n exec({SLEEPER!r})\n{SAVER}"
    with MarkedJob(2, *python(code)) as job:
        job.wait_until_ready(2)
        pids = job.alive()
        for pid in pids:  # Slurm and systemd signal all processes in this way.
            if pid != job.process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        job.signal(signal.SIGTERM)
        status, stdout, _, _ = job.finish()
        assert job.alive() == []
    assert status == 143
    assert "[1] saved\n" in stdout


def test_ctrl_c_at_a_terminal_reaches_every_rank_once() -> None:
    code = """
import signal, time
interrupts = []
def interrupt(*_):
    interrupts.append(1)
    print("interrupted", flush=True)
signal.signal(signal.SIGINT, interrupt)
print("ready", flush=True)
while not interrupts:
    time.sleep(0.01)
time.sleep(0.5)
"""
    with MarkedJob(2, *python(code)) as job:
        job.wait_until_ready(2)
        os.killpg(job.process.pid, signal.SIGINT)  # A terminal signals its foreground group so.
        status, stdout, _, _ = job.finish()
        assert job.alive() == []
    assert status == 130
    assert stdout.count("interrupted") == 2


def test_ranks_that_ignore_the_signal_are_killed_after_the_grace() -> None:
    with MarkedJob(3, "--grace", "1.2", *python(DEAF)) as job:
        job.wait_until_ready(3)
        job.signal(signal.SIGINT)
        status, _, stderr, seconds = job.finish()
        waited = time.monotonic() - job.signalled_at
        assert job.alive() == []
    assert status == 130
    assert waited >= 1.2
    assert seconds <= 1.2 + BOUND
    assert stderr.endswith("hvdlite-run: the grace is over: killing ranks 0, 1, 2\n")


def test_ctrl_c_before_the_ranks_are_up() -> None:
    # A Python that is starting may swallow the signal, in a callback of its own imports (once in
    # 750 starts here). A rank is then killed after the grace; the user sends the launcher another.
    for delay in (0.0, 0.05, 0.1, 0.15, 0.2, 0.3):
        with MarkedJob(4, "--grace", "1.2", *python(SLEEPER)) as job:
            time.sleep(delay)
            job.signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(10)
            if job.process.poll() is None:
                job.signal(signal.SIGINT)
            status, _, stderr, seconds = job.finish()
            assert job.alive() == []
        # Python itself ends with 1 when it is interrupted before it can run anything.
        early = status == 1 and "KeyboardInterrupt" in stderr
        assert early or status in (130, -signal.SIGINT), (delay, stderr)
        assert seconds <= BOUND


def test_death_of_the_launchers_whole_group_ends_all() -> None:
    wrapper = f'"{python("")[0]}" -c "{SLEEPER}"; true'
    with MarkedJob(3, "sh", "-c", wrapper) as job:
        job.wait_until_ready(3)
        job.event()
        os.killpg(job.process.pid, signal.SIGKILL)
        assert job.seconds_until_gone() <= BOUND


def test_death_of_the_launcher_while_it_starts_ranks() -> None:
    for delay in (0.02, 0.05, 0.08, 0.11, 0.14, 0.17, 0.2):
        with MarkedJob(8, *python(SLEEPER)) as job:
            time.sleep(delay)
            job.signal(signal.SIGKILL)
            assert job.seconds_until_gone() <= BOUND


def test_killing_everything_leaves_nothing_behind(tmp_path: Path) -> None:
    before = shm_entries()
    code = LOOP + "while True: step()"
    with MarkedJob(3, *python(code), env={"TMPDIR": str(tmp_path)}) as job:
        job.wait_until_ready(3)
        pids = job.alive()
        job.event()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # It may have died with the launcher.
                os.kill(pid, signal.SIGKILL)
        assert job.seconds_until_gone() <= 3.0
    assert not [name for name in shm_entries() - before if "hvdlite" in name]
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_a_launcher_with_blocked_signals_have_none() -> None:
    """As Ray starts the processes of a node."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})
    try:
        job = MarkedJob(1, *python("import signal; print(signal.pthread_sigmask(0, ()))"))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with job:
        status, stdout, stderr, _ = job.finish()
    assert (status, stdout) == (0, "[0] set()\n"), stderr
