"""The guardian: a process that kills a job's processes when its launcher has died.

The launcher starts one guardian for each job, by path as `python -I -S guardian.py`. The guardian
has a session of its own, so that a signal to the launcher's process group does not reach it. Its
stdin is a pipe from the launcher. The first line is the *mark*, a variable "NAME=value" that all
processes here have: the job id, or one of this agent in an elastic job. Then comes a line for the
process group of every rank that starts. The line "-N" takes group N back: the launcher writes it
before it reaps the rank, because the number may belong to a foreign process afterwards. The line
"end" means that the launcher has cleaned up. An end of file without it means that the launcher
died. Then the guardian kills the groups, and every other process with the mark in its environment
(such as a rank's child with a session of its own).
"""

from __future__ import annotations

import os
import signal
import sys
import time

_GIVE_UP_AFTER = 5.0


def processes_with(*variables: str) -> list[int]:
    """List the live processes that were started with all `variables` ("NAME=value") set.

    Zombies are not listed, because they have no environment. Processes of other users are not
    listed either.
    """
    wanted = {variable.encode() for variable in variables}
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as environ:
                found_there = environ.read().split(b"\0")
        except OSError:
            continue  # The process has ended, or belongs to another user.
        if wanted.issubset(found_there):
            found.append(int(name))
    return found


def job_mark(job_id: str) -> str:
    """Return the variable that every process of a job has."""
    return f"HVDLITE_JOB_ID={job_id}"


def signal_worker(job_id: str, worker: int, number: int) -> int:
    """Send a signal to every live process of one worker of an elastic job; return how many."""
    found = processes_with(job_mark(job_id), f"HVDLITE_WORKER={worker}")
    return signal_processes(found, number)


def signal_processes(processes: list[int], number: int) -> int:
    """Send a signal to processes that may have ended; return how many there were."""
    for pid in processes:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
    return len(processes)


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group that may be empty."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass


def main() -> None:
    """Wait until the launcher has ended, then kill what it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    mark = sys.stdin.readline().strip()
    groups: set[int] = set()
    for line in map(str.strip, sys.stdin):
        if line == "end":
            return
        if line.startswith("-"):
            groups.discard(int(line[1:]))
        else:
            groups.add(int(line))
    for group in groups:
        signal_group(group, signal.SIGKILL)
    give_up = time.monotonic() + _GIVE_UP_AFTER
    while mark and time.monotonic() < give_up:
        if not signal_processes(processes_with(mark), signal.SIGKILL):
            break
        time.sleep(0.02)


if __name__ == "__main__":
    main()
