"""Elastic jobs on several hosts: agents, their silence, and hosts that come and go."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from fakes.ssh import agent_of, fake_ssh
from hvdlite.launch.agents import RemoteHost
from hvdlite.launch.channels import ProcessChannel, Ssh
from launch.elastic.jobs import ElasticJob, rewrite, short_heartbeat
from patience import HANG, Stopwatch, wait_until

WAIT = "wait_for('end')"
LEAVE = """
while not (folder / "end").exists():
    if (folder / f"leave.{worker}").exists():
        sys.exit(0)
    time.sleep(0.02)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return fake_ssh(tmp_path)


def test_death_of_an_agent_is_the_death_of_its_workers(tmp_path: Path, path: str) -> None:
    flags = ("-H", "far1:1,far2:2", "--min-np", "1", "--blacklist-cooldown-range", "1", "2")
    with ElasticJob(tmp_path, 3, WAIT, *flags, PATH=path) as job:
        pids = [job.pid(worker) for worker in range(3)]
        os.kill(agent_of(tmp_path, "far2"), signal.SIGKILL)
        for worker in (1, 2):
            assert job.noted(f"ended {worker}").startswith(f"ended {worker} False lost the conn")
        for worker in (3, 4):  # The host is connected to again after a while.
            job.pid(worker)
        job.make("end")
        status, _, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 0
    assert "host far2 takes no part now: lost the connection to its host" in stderr
    assert pids


def test_silent_agent_is_given_up_and_ends_its_workers_itself(tmp_path: Path, path: str) -> None:
    heartbeat = short_heartbeat()
    flags = ("-H", "far1:1,far2:1", "--min-np", "1", "--elastic-heartbeat", heartbeat)
    with ElasticJob(tmp_path, 2, WAIT, *flags, PATH=path, TEST_EVENTS="[]") as job:
        job.pid(0)
        job.pid(1)
        os.kill(agent_of(tmp_path, "far2"), signal.SIGSTOP)
        assert f"its host: it was silent for {heartbeat} s" in job.noted("ended 1 False")
        job.make("end")
        assert job.finish()[0] == 0


def test_workers_outlive_a_launcher_that_is_stopped_for_a_while(tmp_path: Path, path: str) -> None:
    heartbeat = short_heartbeat()
    flags = ("-H", "far1:1,far2:1", "--min-np", "1", "--elastic-heartbeat", heartbeat)
    with ElasticJob(tmp_path, 2, WAIT, *flags, PATH=path, TEST_EVENTS="[]") as job:
        for worker in (0, 1):
            job.pid(worker)
        job.signal(signal.SIGSTOP)
        time.sleep(3 * float(heartbeat))
        job.signal(signal.SIGCONT)
        job.make("end")
        assert job.finish()[0] == 0
        assert not any(line.startswith("ended") and "True" not in line for line in job.told())


@pytest.mark.long
def test_agents_kill_their_workers_when_the_launcher_stays_silent(
    tmp_path: Path, path: str
) -> None:
    flags = ("-H", "far1:1,far2:1", "--min-np", "1", "--elastic-heartbeat", short_heartbeat())
    with ElasticJob(tmp_path, 2, WAIT, *flags, PATH=path, TEST_EVENTS="[]") as job:
        pids = [job.pid(worker) for worker in (0, 1)]
        job.signal(signal.SIGSTOP)
        gone = "the end of the workers"
        wait_until(lambda: not any(pid in job.alive() for pid in pids), gone, 5 * HANG)
        job.signal(signal.SIGCONT)
        assert job.finish()[0] != 0


def test_hosts_of_the_script_come_and_go(tmp_path: Path, path: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("far1:1\n")
    script = ("--host-discovery-script", f"cat {hosts}", "--min-np", "1")
    with ElasticJob(tmp_path, 1, LEAVE, *script, PATH=path) as job:
        job.pid(0)
        rewrite(hosts, "far1:1\nfar2:1\n")
        job.pid(1)
        rewrite(hosts, "far2:1\n")
        job.noted("drain 0 its host is not listed any more")
        job.noted("ended 0 True exit status 0")
        first = agent_of(tmp_path, "far1")
        wait_until(lambda: not Path(f"/proc/{first}").exists(), "the end of the first agent")
        job.make("end")
        status, _, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 0, stderr


def test_sigterm_to_an_agent_drains_its_host(tmp_path: Path, path: str) -> None:
    flags = ("-H", "far1:1,far2:1", "--min-np", "1")
    with ElasticJob(tmp_path, 2, LEAVE, *flags, PATH=path) as job:
        job.pid(0)
        job.pid(1)
        second = agent_of(tmp_path, "far2")
        os.kill(second, signal.SIGTERM)
        assert job.noted("drain 1") == "drain 1 its host is taken away"
        job.noted("ended 1 True exit status 0")
        wait_until(lambda: not Path(f"/proc/{second}").exists(), "the end of the second agent")
        job.make("end")
        status, _, stderr, _ = job.finish()
    assert status == 0
    assert "host far2 is taken away (SIGTERM to its agent)" in stderr
    assert not any(line.startswith("expect 2") for line in job.told())


def test_host_that_cannot_be_reached_later_is_named_and_tried_again(
    tmp_path: Path, path: str
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("far1:1\n")
    script = ("--host-discovery-script", f"cat {hosts}", "--min-np", "1")
    (tmp_path / "down.far2").touch()
    flags = (*script, "--blacklist-cooldown-range", "1", "1")
    with ElasticJob(tmp_path, 1, WAIT, *flags, PATH=path) as job:
        job.pid(0)
        rewrite(hosts, "far1:1\nfar2:1\n")
        job.wait_for_stderr("host far2 takes no part now")
        (tmp_path / "down.far2").unlink()
        job.pid(1)
        job.make("end")
        assert job.finish()[0] == 0


class StuckSsh(Ssh):
    """An ssh that never reads what is sent to its host."""

    def open(self, host: str) -> ProcessChannel:
        return ProcessChannel(["sleep", "600"])


def test_message_to_a_stuck_ssh_holds_nobody_up() -> None:
    host = RemoteHost("far", StuckSsh())
    watch = Stopwatch()
    for _ in range(8):
        host.frames.send(b"x" * (1 << 20))
    assert watch.seconds() < 5
    host.close()
    assert watch.seconds() < 15


def test_host_that_cannot_be_reached_at_first_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "down.far2").touch()
    with ElasticJob(tmp_path, 2, WAIT, "-H", "far1:1,far2:1", "--min-np", "1", PATH=path) as job:
        status, _, stderr, _ = job.finish()
    assert status == 1
    assert "cannot start on host far2: connection refused" in stderr


def test_listed_host_that_cannot_be_reached_is_named_and_may_join_later(
    tmp_path: Path, path: str
) -> None:
    (tmp_path / "down.far1").touch()
    listed = ("--host-discovery-script", "printf 'far1:1\\nfar2:1\\n'")
    with ElasticJob(tmp_path, 2, WAIT, *listed, "--min-np", "1", PATH=path) as job:
        job.pid(0)
        (tmp_path / "down.far1").unlink()
        job.pid(1)
        job.make("end")
        status, _, stderr, _ = job.finish()
    assert status == 0, stderr
    line = "takes no part now: cannot start on host far1: connection refused"
    assert f"host far1 {line}" in stderr
    assert job.told()[0].startswith("limits 1 1")
