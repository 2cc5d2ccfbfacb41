"""Agents that something disturbs: output on their stdout, or odd modules in their folder.

The ssh of these tests is a script that runs its command on this machine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from launch.marked import MarkedJob, python
from launcher import run_launcher

# Like ssh, it starts in the home folder, and a shell interprets the command.
SSH = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
shift 2
cd "$HOME"
SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22" exec sh -c "$*"
"""
# A working agent, and a thread that writes to its stdout once there is a file `noise`.
TALKING = """
import os, sys, threading, time
from hvdlite.launch import agent
def disturb():
    while not os.path.exists({file!r}):
        time.sleep(0.01)
    os.write(1, {noise!r})
threading.Thread(target=disturb, daemon=True).start()
sys.exit(agent.main())
"""
WAITING = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def environment(home: Path) -> dict[str, str]:
    return {"PATH": f"{home.parent / 'bin'}{os.pathsep}{os.environ['PATH']}", "HOME": str(home)}


@pytest.mark.parametrize("noise", [b"somebody prints here\n", b"\n" * 40], ids=["text", "newlines"])
def test_noise_among_frames_ends_the_job_and_is_shown(home: Path, noise: bytes) -> None:
    talking = home.parent / "python"
    script = home.parent / "talking.py"
    script.write_text(TALKING.format(noise=noise, file=str(home.parent / "noise")))
    # A line "#!PYTHON" would not work here, because it cannot name a path with a space.
    talking.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    talking.chmod(0o755)
    flags = ("-H", "elsewhere:1", "--remote-python", str(talking))
    with MarkedJob(1, *flags, *python(WAITING), env=environment(home)) as job:
        job.wait_until_ready(1)
        (home.parent / "noise").touch()
        status, _, stderr, _ = job.finish()
    assert status == 255
    assert "something besides hvdlite's agent writes to its stdout there: b'" in stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_modules_in_the_home_folder_are_not_the_agents(home: Path) -> None:
    for name in ("selectors", "socket", "json"):
        (home / f"{name}.py").write_text("raise SystemExit('a module of the home folder')")
    code = "import os, sys; print('safe', os.environ.get('PYTHONSAFEPATH'), sys.flags.safe_path)"
    result = run_launcher("-H", "elsewhere:1", *python(code), env=environment(home))
    assert result.returncode == 0, result.stderr
    # The rank itself runs as the user's Python does.
    assert "[0] safe None False" in result.stdout
