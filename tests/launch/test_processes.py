"""Processes are found and killed by a variable in their environment."""

from __future__ import annotations

import secrets
import subprocess

from hvdlite.launch.process.processes import kill_processes, processes_with
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
