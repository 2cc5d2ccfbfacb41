"""ssh is one of several remote launchers: jobs run the same over any other one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import base_environment
from hvdlite.launch.remote.channels import ProcessChannel

TESTS = Path(__file__).parents[1]
PLACEMENT = str(TESTS / "launch" / "other_launchers" / "report_placement.py")

# A job of two ranks on each of two other hosts, whose agents are reached by sockets.
JOB = """
import sys
from fakes.remote_launcher import Sockets
from hvdlite.launch.description import Description, Elastic
from hvdlite.launch.hosts import read_hosts
from hvdlite.launch.job import run_job

hosts, elastic, *command = sys.argv[1:]
what = Description(
    command=[sys.executable, *command],
    ranks=4,
    environment={"PYTHONPATH": __PATH__, "OMP_NUM_THREADS": "1"},
    hosts=read_hosts(hosts),
    remote_launcher=Sockets(),
    elastic=Elastic(min_np=4) if elastic == "elastic" else None,
)
try:
    sys.exit(run_job(what).status)
except OSError as error:
    sys.exit(f"not started: {error}")
"""


def run(hosts: str, kind: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = base_environment()
    path = os.pathsep.join([str(TESTS), environment.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", JOB.replace("__PATH__", repr(path)), hosts, kind, *command],
        env={**environment, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("kind", ["ordinary", "elastic"])
def test_job_runs_over_a_remote_launcher_that_is_not_ssh(kind: str) -> None:
    done = run("far1:2,far2:2", kind, PLACEMENT)
    assert done.returncode == 0, done.stderr
    lines = [line.partition("placement ")[2].split() for line in done.stdout.splitlines()]
    assert sorted(line[:3] for line in lines if line) == [[str(r), "4", "6"] for r in range(4)]


@pytest.mark.parametrize("kind", ["ordinary", "elastic"])
def test_host_that_is_not_there_is_explained_by_its_remote_launcher(kind: str) -> None:
    done = run("far1:2,gone:2", kind, PLACEMENT)
    assert done.returncode != 0
    assert "not started: gone has dialled off ('', None)" in done.stderr


def test_failure_over_a_remote_launcher_that_is_not_ssh_is_reported() -> None:
    code = (
        "import os, sys, time\n"
        "sys.exit('bad') if os.environ['HVDLITE_RANK'] == '3' else time.sleep(600)"
    )
    done = run("far1:2,far2:2", "ordinary", "-c", code)
    assert done.returncode == 1
    assert "rank 3" in done.stderr and "far2" in done.stderr and "bad" in done.stderr


def test_channel_of_a_command_tells_how_the_command_ended() -> None:
    channel = ProcessChannel(["sh", "-c", "echo 'no such host' >&2; exit 7"])
    assert os.read(channel.read_fd, 10) == b""
    assert (channel.end(), channel.said()) == (7, "no such host\n")
    channel.hang_up()
    assert (channel.end(), channel.said()) == (7, "no such host\n")
    channel.cut()


def test_channel_of_a_command_is_cut_with_its_children() -> None:
    """ssh may have a child that carries the connection (ProxyCommand)."""
    channel = ProcessChannel(["sh", "-c", "sleep 600 & wait"])
    channel.cut()
    assert os.read(channel.read_fd, 10) == b""  # The child held this pipe, too.
    assert channel.end() == -9
    channel.hang_up()
