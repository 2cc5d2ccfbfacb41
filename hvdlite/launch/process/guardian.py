"""End a job's processes when its launcher is gone.

Run by path as `python -I -S guardian.py`, one per job, in a session of its own so that what kills
the launcher's group does not reach it. Its standard input is a pipe from the launcher, one line
each: the job id, then the process group of every worker. The line "end" means that the launcher
has cleaned up. A plain end of file means that it died: then the groups are killed, and whatever
else carries the job id in its environment (a worker's child in a session of its own).
"""

from __future__ import annotations

import os
import signal
import sys
import time

_GIVE_UP_AFTER = 5.0


def processes_with(variable: str) -> list[int]:
    """List the live processes that were started with `variable` ("NAME=value") in the environment.

    Zombies have no environment any more and are not listed; nor are other users' processes.
    """
    wanted = variable.encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as environ:
                variables = environ.read().split(b"\0")
        except OSError:
            continue  # It is gone, or another user's.
        if wanted in variables:
            found.append(int(name))
    return found


def job_processes(job_id: str) -> list[int]:
    """List the live processes of a job, whatever group or session they are in."""
    return processes_with(f"HVDLITE_JOB_ID={job_id}")


def signal_job(job_id: str, number: int) -> int:
    """Send a signal to every live process of the job; return how many there are."""
    processes = job_processes(job_id)
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
    """Wait for the launcher's end, then finish what it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    lines = [line.strip() for line in sys.stdin]
    if not lines or lines[-1] == "end":
        return
    for group in lines[1:]:
        signal_group(int(group), signal.SIGKILL)
    give_up = time.monotonic() + _GIVE_UP_AFTER
    while signal_job(lines[0], signal.SIGKILL) and time.monotonic() < give_up:
        time.sleep(0.02)


if __name__ == "__main__":
    main()
