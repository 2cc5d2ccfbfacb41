"""What the guardian kills: groups that it was not told to forget, and processes with a mark."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator

import pytest

from hvdlite.launch.process.guardian import job_mark, kill_processes, processes_with
from hvdlite.launch.process.local import Guardian
from patience import HANG, wait_until


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    found = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(3)]
    yield found
    for process in found:
        process.kill()
        process.wait()


def test_forgotten_group_is_not_signalled_and_the_others_are(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    guardian = Guardian(job_mark(secrets.token_hex(16)))
    for process in sleepers:
        guardian.watch(process.pid)
    guardian.forget(sleepers[1].pid)
    assert guardian._process.stdin is not None
    guardian._process.stdin.close()  # So does the death of the launcher, without the line "end".
    guardian._process.wait(HANG)
    assert [process.wait(HANG) for process in (sleepers[0], sleepers[2])] == [-signal.SIGKILL] * 2
    assert sleepers[1].poll() is None
    os.kill(sleepers[1].pid, 0)


def test_dismissed_guardian_signals_nothing(sleepers: list[subprocess.Popen[bytes]]) -> None:
    guardian = Guardian(job_mark(secrets.token_hex(16)))
    guardian.watch(sleepers[0].pid)
    guardian.dismiss()
    assert sleepers[0].poll() is None


def test_process_that_is_inside_exec_is_found() -> None:
    name, value = "TEST_MARK", secrets.token_hex(16)
    for _ in range(50):  # About every fourth is inside exec when Popen returns.
        with subprocess.Popen(["sleep", "600"], env={name: value}) as process:
            found = processes_with(f"{name}={value}")
            process.kill()
        assert found == [process.pid]


def test_processes_that_start_while_others_are_killed_are_killed_too() -> None:
    mark = f"TEST_MARK={secrets.token_hex(16)}"
    loop = "while :; do setsid sleep 600 & sleep 0.001; done"
    with subprocess.Popen(["env", mark, "sh", "-c", loop]) as process:
        try:
            wait_until(lambda: len(processes_with(mark)) >= 10, "ten processes")
            assert process.poll() is None
        finally:
            kill_processes(mark)
    wait_until(lambda: not processes_with(mark), "the end of all of them")
