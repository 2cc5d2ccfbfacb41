"""A job shows no secret on a command line, and opens no socket to the network."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from launch.marked import MarkedJob, listening_inodes, python, sockets_of

SHOW_TOKEN = """
import os, time
print("token", os.environ["HVDLITE_TOKEN"], flush=True)
print("ready", flush=True)
time.sleep(600)
"""


def test_no_secret_and_no_environment_on_any_command_line() -> None:
    secret = f"a-secret-of-the-user-{secrets.token_hex(16)}"
    with MarkedJob(2, *python(SHOW_TOKEN), env={"API_TOKEN": secret}) as job:
        assert job.process.stdout is not None
        token = job.process.stdout.readline().split()[-1].decode()
        assert len(token) == 64
        job.wait_until_ready(1)
        lines = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    lines[int(entry.name)] = (entry / "cmdline").read_text(errors="replace")
                except OSError:
                    continue  # It has ended.
        own = set(job.alive())
        assert own <= set(lines)
    shown = "\n".join(lines.values())
    assert token not in shown
    assert secret not in shown
    # Other programs on this machine, such as other tests, may name the variables.
    shown = "\n".join(lines[pid] for pid in own)
    assert "HVDLITE_TOKEN=" not in shown
    assert "HVDLITE_RANK=" not in shown


def test_rank_shows_up_as_its_own_command() -> None:
    with MarkedJob(1, *python(SHOW_TOKEN)) as job:
        job.wait_until_ready(1)
        (rank,) = (pid for pid in job.alive() if pid != job.process.pid)
        command = Path(f"/proc/{rank}/cmdline").read_text().split("\0")
    assert command[:2] == [sys.executable, "-c"]


def test_a_job_on_one_machine_listens_on_no_tcp_port() -> None:
    with MarkedJob(2, *python(SHOW_TOKEN)) as job:
        job.wait_until_ready(2)
        assert not listening_inodes() & sockets_of(job.alive())
