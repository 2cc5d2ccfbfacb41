"""Ctrl-C, SIGTERM or SIGKILL ends the launcher, and nothing of the job is left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

import pytest

from harness import shm_entries
from launch.marked import DEAF_SLEEPER, SLEEPER, MarkedJob, python

BOUND = 2.0
# A rank with a child in its own group, a child in another session, and a forked copy of itself.
FAMILY = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "60"])
subprocess.Popen(["sleep", "60"], start_new_session=True)
if os.fork() == 0:
    time.sleep(60)
print("ready", flush=True)
time.sleep(60)
"""


# A rank that prints which signal it got, and then saves something for longer than 1.5 s.
SAVER = """
import signal, sys, time
def told(number, frame):
    signal.signal(number, signal.SIG_IGN)  # It comes twice if all processes are signalled.
    raise SystemExit("SIGTERM")
signal.signal(signal.SIGTERM, told)
try:
    print("ready", flush=True)
    time.sleep(60)
except (KeyboardInterrupt, SystemExit) as why:
    print("told by", type(why).__name__, flush=True)
finally:
    time.sleep(2.5)
    print("saved", flush=True)
"""
# A rank that ignores SIGINT and SIGTERM.
DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + DEAF_SLEEPER


@pytest.mark.parametrize(
    ("number", "status", "told"), [(2, 130, "KeyboardInterrupt"), (15, 143, "SystemExit")]
)
def test_ranks_have_time_to_save_and_are_told_by_the_users_signal(
    number: int, status: int, told: str
) -> None:
    with MarkedJob(2, *python(SAVER), env={"OMP_NUM_THREADS": "1"}) as job:
        job.wait_until_ready(2)
        job.signal(number)
        code, stdout, stderr, seconds = job.finish()
        assert job.alive() == []
    assert code == status
    for rank in (0, 1):
        assert f"[{rank}] told by {told}\n" in stdout
        assert f"[{rank}] saved\n" in stdout
    assert seconds >= 2.5
    again = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    waiting = rf"waiting up to 2\d s for ranks 0, 1; {again} again ends them at once\n"
    assert re.search(waiting, stderr), stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_grace_of_zero_kills_at_once(number: int) -> None:
    with MarkedJob(2, "--grace", "0", *python(DEAF)) as job:
        job.wait_until_ready(2)
        job.signal(number)
        status, _, _, seconds = job.finish()
        assert job.alive() == []
    assert status == 128 + number
    assert seconds <= BOUND


def test_signal_after_a_failure_does_not_make_the_job_last_longer() -> None:
    code = f"import os, sys, time\nif os.environ['HVDLITE_RANK'] == '0': sys.exit(3)\n{DEAF}"
    with MarkedJob(2, *python(code)) as job:
        job.wait_until_ready(1)
        time.sleep(0.7)
        job.signal(signal.SIGINT)
        status, _, _, seconds = job.finish()
        assert job.alive() == []
    assert status in (130, 3)
    assert seconds <= 5


def test_signal_that_reached_the_ranks_first_leaves_them_the_grace() -> None:
    code = f"import os\nif os.environ['HVDLITE_RANK'] == '0':\n {SLEEPER}\n{SAVER}"
    with MarkedJob(2, *python(code)) as job:
        job.wait_until_ready(2)
        for pid in job.alive():  # Slurm and systemd signal all processes in this way.
            if pid != job.process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        job.signal(signal.SIGTERM)
        status, stdout, _, _ = job.finish()
        assert job.alive() == []
    assert status == 143
    assert "[1] saved\n" in stdout


@pytest.mark.parametrize(("number", "status"), [(15, 143), (1, 129)])
def test_signal_ends_the_job_with_one_line(number: int, status: int) -> None:
    with MarkedJob(3, *python(SLEEPER), env={"OMP_NUM_THREADS": "1"}) as job:
        job.wait_until_ready(3)
        job.signal(number)
        code, stdout, stderr, seconds = job.finish()
        assert job.alive() == []
    assert code == status
    assert seconds <= BOUND
    assert stdout == ""
    assert stderr.count("\n") == 1
    assert stderr.endswith("stopping 3 ranks (again to kill them at once)\n")


def test_ctrl_c_at_a_terminal_reaches_every_rank_once() -> None:
    code = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
print("ready", flush=True)
for _ in range(10):
    time.sleep(0.1)
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
        assert job.alive() == []
    assert status == 130
    assert 1.2 <= seconds <= 1.2 + BOUND
    assert stderr.endswith("hvdlite-run: the grace is over: killing ranks 0, 1, 2\n")


def test_second_ctrl_c_kills_at_once() -> None:
    with MarkedJob(3, *python(DEAF)) as job:
        job.wait_until_ready(3)
        job.signal(signal.SIGINT)
        time.sleep(0.2)
        job.signal(signal.SIGINT)
        status, _, _, seconds = job.finish()
        assert job.alive() == []
    assert status == 130
    assert seconds <= 0.8


def test_ctrl_c_before_the_ranks_are_up() -> None:
    # A Python that is starting may swallow the signal, as in an import hook. Then the rank is
    # killed after the grace.
    for delay in (0.0, 0.05, 0.1, 0.15, 0.2, 0.3):
        with MarkedJob(4, "--grace", "1.2", *python(SLEEPER)) as job:
            time.sleep(delay)
            job.signal(signal.SIGINT)
            status, _, stderr, seconds = job.finish()
            assert job.alive() == []
        # Python itself ends with 1 when it is interrupted before it can run anything.
        early = status == 1 and "KeyboardInterrupt" in stderr
        assert early or status in (130, -signal.SIGINT), (delay, stderr)
        assert seconds <= BOUND


def test_signal_reaches_children_and_other_sessions() -> None:
    with MarkedJob(2, *python(FAMILY)) as job:
        job.wait_until_ready(2)
        assert len(job.alive()) >= 2 * 4
        job.signal(signal.SIGTERM)
        status, _, _, seconds = job.finish()
        assert job.alive() == []
    assert status == 143
    assert seconds <= BOUND


@pytest.mark.parametrize("command", [python(SLEEPER), python(DEAF_SLEEPER), python(FAMILY)])
def test_death_of_the_launcher_ends_all(command: list[str]) -> None:
    with MarkedJob(3, *command) as job:
        job.wait_until_ready(3)
        job.signal(signal.SIGKILL)
        assert job.seconds_until_gone() <= BOUND


def test_death_of_the_launchers_whole_group_ends_all() -> None:
    wrapper = f'"{python("")[0]}" -c "{SLEEPER}"; true'
    with MarkedJob(3, "sh", "-c", wrapper) as job:
        job.wait_until_ready(3)
        os.killpg(job.process.pid, signal.SIGKILL)
        assert job.seconds_until_gone() <= BOUND


def test_death_of_the_launcher_while_it_starts_ranks() -> None:
    for delay in (0.02, 0.05, 0.08, 0.11, 0.14, 0.17, 0.2):
        with MarkedJob(8, *python(SLEEPER)) as job:
            time.sleep(delay)
            job.signal(signal.SIGKILL)
            assert job.seconds_until_gone() <= BOUND


def test_death_of_the_guardian_leaves_the_ranks_tied_to_the_launcher() -> None:
    with MarkedJob(2, *python(SLEEPER)) as job:
        job.wait_until_ready(2)
        for guardian in guardians_of(job.process.pid):
            os.kill(guardian, signal.SIGKILL)
        job.signal(signal.SIGKILL)
        assert job.seconds_until_gone() <= BOUND


def guardians_of(launcher: int) -> list[int]:
    with open(f"/proc/{launcher}/task/{launcher}/children") as children:
        pids = [int(pid) for pid in children.read().split()]
    found = []
    for pid in pids:
        with open(f"/proc/{pid}/cmdline") as cmdline:
            if "guardian.py" in cmdline.read():
                found.append(pid)
    assert found
    return found


def test_killing_everything_leaves_no_file_behind() -> None:
    before = shm_entries()
    with MarkedJob(3, *python(SLEEPER)) as job:
        job.wait_until_ready(3)
        for pid in job.alive():
            os.kill(pid, signal.SIGKILL)
        assert job.seconds_until_gone() <= 3.0
    assert not [name for name in shm_entries() - before if "hvdlite" in name]
