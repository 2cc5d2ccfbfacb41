"""Processes are found and killed by a variable in their environment."""

from __future__ import annotations

import errno
import os
import secrets
import subprocess

import pytest

from hvdlite.launch.process import kill_processes, processes_with, start_worker
from patience import wait_until


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


def test_process_that_cannot_be_watched_leaves_no_file_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    before = os.listdir("/proc/self/fd")
    for _ in range(2):
        with pytest.raises(OSError, match="Too many open files"):
            start_worker(0, ["sleep", "600"], dict(os.environ), stdin=b"", live=True)
        assert os.listdir("/proc/self/fd") == before


def test_no_process_is_found_where_no_file_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:  # What measures the test reads /proc after it.
        patch.setattr(os, "listdir", refuse)
        assert processes_with("TEST_MARK=1") == []
