"""Rows 39 and 40: no secret to read, no door to the world, nothing left after kill -9 of all."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from faults.jobs import Job, shared_files, stepping_job, wait_until

API_KEY = "a-secret-of-the-user-4711"
HEX_TOKEN = re.compile(r"[0-9a-fA-F]{64}")
WILDCARDS = ("0.0.0.0", "::")
BOUND = 3.0


@pytest.mark.parametrize("hosts", [1, 2])
def test_no_secret_in_argv_and_no_wildcard_bind(hosts: int, tmp_path: Path) -> None:
    seen_commands: set[str] = set()
    seen_addresses = set()
    with stepping_job(tmp_path, hosts=hosts, env={"API_KEY": API_KEY}) as job:

        def look() -> bool:
            seen_commands.update(commands_of(job))
            seen_addresses.update(job.listening())
            return job.steps() > 50

        wait_until(look, 20, "the job does steps")
        assert job.stop() == 0
    assert any("stepping.py" in command for command in seen_commands)
    for command in seen_commands:
        assert API_KEY not in command
        assert "HVDLITE_" not in command
        assert not HEX_TOKEN.search(command)
    for family, address in seen_addresses:
        if family != socket.AF_UNIX:
            assert address[0] not in WILDCARDS
    for path in tmp_path.glob("environment.?"):
        assert "HVDLITE_RANK" in path.read_text()
        assert "HVDLITE_TOKEN" not in path.read_text()


def commands_of(job: Job) -> set[str]:
    commands = set()
    for process in job.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            commands.add(" ".join(process.cmdline()))
    return commands


@pytest.mark.parametrize("hosts", [1, 2])
def test_nothing_is_left_after_kill_nine_of_all(hosts: int, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with stepping_job(tmp_path, hosts=hosts, env={"TMPDIR": str(temporary)}) as job:
        wait_until(lambda: job.steps() > 50, 20, "the job does steps")
        processes = job.processes()
        assert len(processes) >= 3
        addresses = job.listening()
        files = shared_files(processes)
        for process in processes:
            process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        job.launcher.wait()
        wait_until(lambda: not any(is_alive(process) for process in processes), BOUND, "all gone")
        assert [path for path in files if Path(path).exists()] == []
        assert [path.name for path in Path("/dev/shm").iterdir() if "hvdlite" in path.name] == []
        assert list(temporary.rglob("*")) == []
        assert [address for address in addresses if can_connect(*address)] == []
        assert time.monotonic() - killed <= BOUND


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def can_connect(family: int, address: str | tuple[str, int]) -> bool:
    with socket.socket(family) as client, contextlib.suppress(OSError):
        client.connect(address)
        return True
    return False
