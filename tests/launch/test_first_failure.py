"""The first failure ends the job, and the launcher's last lines report it."""

from __future__ import annotations

import pytest

from launch.marked import MarkedJob, python
from launcher import run_launcher

BOUND = 3.0


def on_rank(rank: int, code: str) -> list[str]:
    """Build a command of which one rank runs `code`, while the others sleep."""
    return python(
        f"import os, sys, time\nif os.environ['HVDLITE_RANK'] == '{rank}':\n    {code}\n"
        "else:\n    time.sleep(60)"
    )


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("sys.exit(3)", 3, "exit status 3"),
        ("os.kill(os.getpid(), 11)", 139, "killed by SIGSEGV"),
        ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
        ("os.abort()", 134, "killed by SIGABRT"),
    ],
)
def test_status_of_the_first_failure_is_the_launchers(code: str, status: int, words: str) -> None:
    result = run_launcher("-np", "3", *on_rank(1, code))
    assert result.returncode == status
    assert result.seconds <= BOUND
    assert "hvdlite-run: rank 1 (host " in result.stderr
    assert f"failed first: {words}" in result.stderr


def test_traceback_of_the_first_failure_is_shown_last() -> None:
    code = "print('before', file=sys.stderr); raise ValueError('boom at step 7')"
    result = run_launcher("-np", "3", *on_rank(2, code))
    assert result.returncode == 1
    assert result.seconds <= BOUND
    report = result.stderr[result.stderr.index("hvdlite-run: rank 2") :]
    assert "Traceback (most recent call last):" in report
    assert result.stderr.endswith("    ValueError: boom at step 7\n")


def test_rank_that_raises_because_another_failed_is_not_blamed() -> None:
    code = """
import os, sys, time
if os.environ["HVDLITE_RANK"] == "2":
    time.sleep(0.2)
    raise ValueError("the cause")
class RankFailedError(Exception):
    __module__ = "hvdlite.errors"
raise RankFailedError("rank 2 raised ValueError: the cause")
"""
    result = run_launcher("-np", "3", *python(code))
    assert result.returncode == 1
    assert "hvdlite-run: rank 2 (host" in result.stderr
    assert result.stderr.endswith("    ValueError: the cause\n")


def test_cause_that_is_slow_to_end_is_still_blamed() -> None:
    code = """
import os, sys, time
if os.environ["HVDLITE_RANK"] == "2":
    time.sleep(1.0)
    raise ValueError("the cause")
class RankFailedError(Exception):
    __module__ = "hvdlite.errors"
raise RankFailedError("rank 2 raised ValueError: the cause")
"""
    result = run_launcher("-np", "3", *python(code))
    assert "hvdlite-run: rank 2 (host" in result.stderr
    assert result.stderr.endswith("    ValueError: the cause\n")
    assert result.seconds <= BOUND + 1.0


def test_rank_that_ends_well_does_not_end_the_others() -> None:
    code = """
import os, time
if os.environ["HVDLITE_RANK"] != "0":
    time.sleep(1.0); print("finished")
"""
    result = run_launcher("-np", "3", *python(code))
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == ["[1] finished", "[2] finished"]


def test_rank_that_ignores_sigterm_is_killed_in_time() -> None:
    script = (
        "import os, sys, time, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['HVDLITE_RANK'] == '0':\n    time.sleep(0.5); sys.exit(5)\ntime.sleep(60)"
    )
    with MarkedJob(3, *python(script)) as job:
        status, _, stderr, seconds = job.finish()
        assert job.alive() == []
    assert status == 5
    assert seconds <= 0.5 + BOUND
    assert "rank 0" in stderr


def test_survivors_have_a_moment_to_say_what_they_saw() -> None:
    code = """
import os, sys, time
if os.environ["HVDLITE_RANK"] == "1":
    os.kill(os.getpid(), 9)
time.sleep(0.3)
print("seen by", os.environ["HVDLITE_RANK"])
"""
    result = run_launcher("-np", "3", *python(code))
    assert result.returncode == 137
    assert sorted(result.stdout.splitlines()) == ["[0] seen by 0", "[2] seen by 2"]


def test_wrapper_scripts_and_their_children_end_too() -> None:
    wrapper = 'if [ "$HVDLITE_RANK" = 1 ]; then exit 4; fi; sleep 60 & sleep 60'
    with MarkedJob(3, "sh", "-c", wrapper) as job:
        status, _, _, seconds = job.finish()
        assert job.alive() == []
    assert status == 4
    assert seconds <= BOUND


def test_program_that_cannot_be_executed() -> None:
    result = run_launcher("-np", "2", "sh", "-c", "exec /no/such/program")
    assert result.returncode == 127
    assert result.seconds <= BOUND


def test_background_process_of_a_finished_job_is_ended() -> None:
    with MarkedJob(1, "sh", "-c", "setsid sleep 60 & exit 0") as job:
        status, _, _, seconds = job.finish()
        assert job.alive() == []
    assert status == 0
    assert seconds <= BOUND


def test_background_process_may_finish_its_work_first() -> None:
    result = run_launcher("-np", "1", "sh", "-c", "(sleep 0.4; echo cleaned up) & exit 0")
    assert result.returncode == 0
    assert result.stdout == "[0] cleaned up\n"
