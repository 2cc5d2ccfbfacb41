"""A job opens no socket to the network, and leaves nothing after kill -9 of all its processes."""

from __future__ import annotations

import contextlib
import signal
import socket
from pathlib import Path

import psutil

from faults.jobs import Address, shared_files, stepping_job
from patience import Stopwatch, wait_until

WILDCARDS = ("0.0.0.0", "::")
BOUND = 3.0


def test_no_socket_is_bound_to_every_address_and_no_child_gets_the_token(tmp_path: Path) -> None:
    seen: set[Address] = set()
    with stepping_job(tmp_path, hosts=2) as job:

        def look() -> bool:
            seen.update(job.listening())
            return job.steps() > 50

        wait_until(look, "the job does steps")
        assert job.stop() == 0
    assert seen, "not even the launcher's store was seen"
    assert [address for _, address in seen if address[0] in WILDCARDS] == []
    environments = [path.read_text() for path in tmp_path.glob("environment.?")]
    assert len(environments) == 2
    for environment in environments:
        assert "HVDLITE_RANK" in environment
        assert "HVDLITE_TOKEN" not in environment


def test_nothing_is_left_after_kill_nine_of_all(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with stepping_job(tmp_path, hosts=2, env={"TMPDIR": str(temporary)}) as job:
        wait_until(lambda: job.steps() > 50, "the job does steps")
        processes = job.processes()
        assert len(processes) >= 3
        addresses = job.listening()
        files = shared_files(processes)
        for process in processes:
            # The kernel kills the ranks with the launcher, which comes first.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        killed = Stopwatch()
        job.launcher.wait()
        wait_until(lambda: not any(is_alive(process) for process in processes), "all gone")
        assert [path for path in files if Path(path).exists()] == []
        assert [path.name for path in Path("/dev/shm").iterdir() if "hvdlite" in path.name] == []
        assert list(temporary.rglob("*")) == []
        assert [address for address in addresses if can_connect(*address)] == []
        assert killed.seconds() <= BOUND


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def can_connect(family: int, address: str | tuple[str, int]) -> bool:
    with socket.socket(family) as client, contextlib.suppress(OSError):
        client.connect(address)
        return True
    return False
