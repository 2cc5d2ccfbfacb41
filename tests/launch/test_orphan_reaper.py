"""What the orphan reaper kills: groups that it was not told to forget, and marked processes."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator

import pytest

from hvdlite.launch.process.local import OrphanReaper
from hvdlite.launch.process.orphan_reaper import job_mark, kill_processes, processes_with
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
    reaper = OrphanReaper(job_mark(secrets.token_hex(16)))
    for process in sleepers:
        reaper.watch(process.pid)
    reaper.forget(sleepers[1].pid)
    assert reaper._process.stdin is not None
    reaper._process.stdin.close()  # So does the death of the launcher, without the line "end".
    reaper._process.wait(HANG)
    assert [process.wait(HANG) for process in (sleepers[0], sleepers[2])] == [-signal.SIGKILL] * 2
    assert sleepers[1].poll() is None
    os.kill(sleepers[1].pid, 0)


def test_dismissed_reaper_signals_nothing(sleepers: list[subprocess.Popen[bytes]]) -> None:
    reaper = OrphanReaper(job_mark(secrets.token_hex(16)))
    reaper.watch(sleepers[0].pid)
    reaper.dismiss()
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
