"""Find processes by a variable of their environment, and signal processes and their groups.

A rank's child may have a session of its own, but it inherits the rank's variables.
"""

from __future__ import annotations

import os
import signal
import time

_GIVE_UP_AFTER = 5.0  # seconds for which new processes are killed
_LONGEST_EXEC = 1.0  # seconds that a look at all processes waits for those that are inside exec
_KERNEL_THREAD = 0x200000  # PF_KTHREAD in the flags of /proc/PID/stat


def processes_with(*variables: str) -> list[int]:
    """List the live processes that were started with all `variables` ("NAME=value") set."""
    # Zombies are not listed, because they have no environment. Processes of other users are not
    # listed either.
    wanted = {variable.encode() for variable in variables}
    # Nor are any where this process can open no more files: a job that runs does not end for that.
    give_up = time.monotonic() + _LONGEST_EXEC
    found: list[int] = []
    try:
        names = os.listdir("/proc")
    except OSError:
        return found
    for name in names:
        if not name.isdigit():
            continue
        try:
            found_there = _environment(name, give_up)
        except OSError:
            continue  # The process has ended, or belongs to another user.
        if wanted.issubset(found_there):
            found.append(int(name))
    return found


def _environment(pid: str, give_up: float) -> list[bytes]:
    """Return the variables of a process; wait until `give_up` if it is inside exec."""
    text = _read(pid, "environ")
    if not text:
        while _is_in_exec(pid) and time.monotonic() < give_up:
            time.sleep(0.001)
        text = _read(pid, "environ")
    return text.split(b"\0")


def _is_in_exec(pid: str) -> bool:
    """Return whether a process has left its old program, and its new one has no environment yet."""
    # `subprocess.Popen` returns before that: it waits until exec closes a pipe, which comes
    # earlier.
    fields = _read(pid, "stat").rpartition(b")")[2].split()  # The name may contain anything.
    state, flags, environment_ends = fields[0], int(fields[6]), fields[48]
    has_program = state not in (b"Z", b"X") and not flags & _KERNEL_THREAD
    return has_program and environment_ends == b"0"


def _read(pid: str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def job_mark(job_id: str) -> str:
    """Return the variable that every process of a job has."""
    return f"HVDLITE_JOB_ID={job_id}"


def kill_processes(*variables: str) -> None:
    """Kill the processes that `processes_with` lists, and those that they start meanwhile."""
    give_up = time.monotonic() + _GIVE_UP_AFTER
    killed: set[int] = set()
    while time.monotonic() < give_up:
        found = [pid for pid in processes_with(*variables) if pid not in killed]
        if not found:
            break
        signal_processes(found, signal.SIGKILL)
        killed.update(found)


def signal_processes(processes: list[int], number: int) -> None:
    """Send a signal to processes that may have ended."""
    for pid in processes:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group that may be empty."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass
