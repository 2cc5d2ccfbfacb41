"""Ranks on other hosts: they are named, and a silent host ends a fixed job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fakes.ssh import agent_of, fake_ssh
from launch.marked import MarkedJob, python

WAIT = "import os, time; print('ready', os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.long
def test_silent_host_ends_the_job(tmp_path: Path) -> None:
    env = {"PATH": fake_ssh(tmp_path)}
    with MarkedJob(2, "-H", "far1,far2", *python(WAIT), env=env) as job:
        job.wait_until_ready(2)
        os.kill(agent_of(tmp_path, "far2"), signal.SIGSTOP)
        status, _, stderr, _ = job.finish()
        job.seconds_until_gone()
    assert status == 255
    assert "rank 1 (host far2, pid " in stderr
    assert "failed first: lost the connection to its host: it was silent for 15 s" in stderr


def test_processes_are_named_with_their_hosts(tmp_path: Path) -> None:
    env = {"PATH": fake_ssh(tmp_path)}
    command = python("import os; print(os.getpid())")
    flags = ("--independent", "--verbose", "-H", "localhost,far1")
    with MarkedJob(2, *flags, *command, env=env) as job:
        status, stdout, stderr, _ = job.finish()
    assert status == 0
    pids = dict(line.removeprefix("[").split("] ") for line in stdout.splitlines())
    assert f"hvdlite-run: rank 0: pid {pids['0']}: " in stderr
    assert f"hvdlite-run: rank 1: pid {pids['1']} on far1: " in stderr


def test_signal_of_the_user_reaches_all_through_an_agent(tmp_path: Path) -> None:
    """SIGUSR1 to the agent of one host is passed on to the ranks of all, in an elastic job, too."""
    env = {"PATH": fake_ssh(tmp_path), "TEST_FOLDER": str(tmp_path)}
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(0.05)"
    )
    flags = ("--independent", "--min-np", "1", "-H", "localhost,far1")
    with MarkedJob(2, *flags, *python(code), env=env) as job:
        job.wait_until_ready(2)
        os.kill(agent_of(tmp_path, "far1"), signal.SIGUSR1)
        assert job.finish()[0] == 0
