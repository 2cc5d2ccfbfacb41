"""A running job of hvdlite-run, whose processes, sockets, memory and steps a test inspects."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher import end_launcher, start_launcher
from patience import HANG

STEPPING = Path(__file__).with_name("stepping.py")
Address = tuple[socket.AddressFamily, str | tuple[str, int]]


@dataclass
class Job:
    """A running job; stepping.py reports its steps in `folder`."""

    launcher: subprocess.Popen[bytes]
    folder: Path

    def processes(self) -> list[psutil.Process]:
        """List the launcher and all of its descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.launcher.pid)
            return [top, *top.children(recursive=True)]
        return []

    def steps(self) -> int:
        """Return the steps of the slowest rank that has reported; 0 before the first report."""
        reports = [int(path.read_text()) for path in self.folder.glob("steps.?")]
        return min(reports, default=0)

    def stop(self) -> int:
        """Ask the ranks to leave; return the launcher's exit status."""
        (self.folder / "stop").touch()
        return self.launcher.wait(timeout=HANG)

    def listening(self) -> set[Address]:
        """List the addresses that the job's processes listen on."""
        found: set[Address] = set()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                inodes = socket_inodes(process.pid)
                found |= listening_unix(inodes) | listening_tcp(process)
        return found


@contextlib.contextmanager
def stepping_job(
    folder: Path, ranks: int = 2, hosts: int = 1, env: dict[str, str] | None = None
) -> Iterator[Job]:
    """Run stepping.py under hvdlite-run, and kill everything that is left of it at the end."""
    worker = [sys.executable, str(STEPPING), str(folder), str(hosts)]
    launcher = start_launcher(
        "-np", str(ranks), *worker, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    job = Job(launcher, folder)
    try:
        yield job
    finally:
        for process in reversed(job.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        end_launcher(launcher)


def socket_inodes(pid: int) -> set[str]:
    """List the inodes of a process's sockets."""
    targets = [target for target in open_files(pid) if target.startswith("socket:[")]
    return {target[8:-1] for target in targets}


def open_files(pid: int) -> list[str]:
    """List what the descriptors of a process refer to; nothing if it has ended."""
    targets = []
    with contextlib.suppress(OSError):  # It may end while its folder is read.
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                targets.append(str(Path(f"/proc/{pid}/fd/{name}").readlink()))
    return targets


def listening_unix(inodes: set[str]) -> set[Address]:
    """List listening Unix sockets, abstract ones with a leading NUL."""
    found: set[Address] = set()
    accepts_connections = 0x10000
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and int(fields[3], 16) & accepts_connections and fields[6] in inodes:
            found.add((socket.AF_UNIX, fields[7].replace("@", "\0", 1)))
    return found


def listening_tcp(process: psutil.Process) -> set[Address]:
    """List listening TCP sockets."""
    return {
        (connection.family, (connection.laddr.ip, connection.laddr.port))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def shared_files(processes: list[psutil.Process]) -> set[str]:
    """List the files in /dev/shm that processes have open or mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            found |= {line[line.index("/dev/shm/") :] for line in maps if "/dev/shm/" in line}
        found |= {path for path in open_files(process.pid) if path.startswith("/dev/shm/")}
    return found
