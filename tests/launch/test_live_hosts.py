"""`hvdlite-run --live` over several hosts, in node mode, and over an elastic job."""

from __future__ import annotations

import os
import re
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.ssh import fake_ssh
from faults.ports import free_port
from launch.elastic.jobs import DRIVER, PRELUDE
from launch.live_ranks import SAMPLES, live
from launch.marked import python
from launch.on_terminal import TerminalJob
from launcher import end_launcher, start_launcher
from patience import HANG

WAIT = (
    "while not os.path.exists(os.environ['TEST_END']):\n"
    "    n += 1; report(n, samples=100 * n); time.sleep(0.2)\n"
)


@pytest.fixture
def end(tmp_path: Path) -> Iterator[Path]:
    """The file for which ranks wait."""
    file = tmp_path / "end"
    yield file
    file.touch()


def test_samples_of_other_nodes_reach_node_0(tmp_path: Path, end: Path) -> None:
    env = {"HVDLITE_TOKEN": secrets.token_hex(32), "TEST_END": str(end)}
    where = ("--nodes", "2", "--meet", f"127.0.0.1:{free_port()}", "--node-rank")
    code = SAMPLES + "rank == 1 and report(1, samples=0)\n" + WAIT
    with TerminalJob(*live(1, code, *where, "0"), width=120, env=env) as job:
        other = start_launcher(*live(1, code, *where, "1"), env={"OMP_NUM_THREADS": "1", **env})
        try:
            job.wait_for("\n0    ", "\n1    ", "np 2", "straggler")
            end.touch()
            job.finish()
            _, stderr = other.communicate(timeout=HANG)
            assert job.process.returncode == other.returncode == 0
        finally:
            end_launcher(other)
    assert b"step/s" not in stderr, "only node 0 has a view"


def test_workers_of_other_hosts_that_die_and_come_are_events(tmp_path: Path, end: Path) -> None:
    env = {
        "PATH": fake_ssh(tmp_path),
        "TEST_END": str(end),
        "TEST_LOG": str(tmp_path / "log"),
    }
    flags = ("--live", "--min-np", "1", "--max-np", "2", "-H", "far1,far2,far3")
    command = python(PRELUDE + SAMPLES + WAIT)
    with TerminalJob("-np", "2", *flags, *command, width=120, env=env, program=DRIVER) as job:
        job.wait_for("rank host", "\n0    far1", "\n1    far2")
        ready = re.compile(r"\[1\] ready 1 (\d+)\n")
        job.wait_until(lambda shown: ready.search("\n".join(shown)) is not None)
        pid = ready.findall("\n".join(job.screen.text))[0]
        os.kill(int(pid), signal.SIGKILL)
        job.wait_for("s ago: world 2: workers [0, 2]")
        end.touch()
        shown = job.finish()
    assert job.process.returncode == 0
    assert "hvdlite-run: world 2: workers [0, 2]" in shown
    assert not any("s ago" in line for line in shown)
