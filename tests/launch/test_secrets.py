"""A job shows no secret on a command line, and opens no socket to the network."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from fakes.ssh import fake_ssh
from launch.marked import MarkedJob, python

SHOW_TOKEN = """
import os, time
print("token", os.environ["HVDLITE_TOKEN"], flush=True)
print("ready", flush=True)
time.sleep(600)
"""


def test_no_secret_and_no_environment_on_any_command_line(tmp_path: Path) -> None:
    secret = f"a-secret-of-the-user-{secrets.token_hex(16)}"
    env = {"API_TOKEN": secret, "PATH": fake_ssh(tmp_path)}
    with MarkedJob(2, "-H", "localhost,far1", *python(SHOW_TOKEN), env=env) as job:
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
