"""The launcher's part of an elastic job on this host, with workers that do not train."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest

import hvdlite
from launch.elastic import driver
from launch.elastic.jobs import ElasticJob, rewrite
from launch.marked import process_state
from patience import wait_until


def test_dead_worker_is_replaced_by_one_with_a_new_number(tmp_path: Path) -> None:
    code = "wait_for('end')"
    with ElasticJob(tmp_path, 2, code, "--min-np", "1") as job:
        os.kill(job.pid(1), signal.SIGKILL)
        job.pid(2)
        job.make("end")
        status, _, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 0
    assert "hvdlite-run: world 1: workers [0]\n" in stderr
    assert f"hvdlite-run: worker 2 starts on {socket.gethostname()}\n" in stderr
    assert "hvdlite-run: world 2: workers [0, 2]\n" in stderr
    assert job.told()[:5] == [
        "limits 2 1 None 3 60",  # A worker may be silent for 20 heartbeats.
        "expect 0 False",
        "expect 1 False",
        "ended 1 False died of SIGKILL",
        "expect 2 True",
    ]


def test_environment_of_workers_and_of_a_joiner(tmp_path: Path) -> None:
    code = """
names = "ELASTIC WORKER JOINER ELASTIC_HEARTBEAT RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_SIZE NODE"
values = [os.environ.get("HVDLITE_" + name, "-") for name in names.split()]
say("environment", *values, os.environ["HVDLITE_RENDEZVOUS"], os.environ["HOROVOD_ELASTIC"])
if worker == 0:
    wait_for("dead")
    sys.exit(3)
wait_for("end")
"""
    with ElasticJob(tmp_path, 2, code, "--max-np", "2", "--elastic-heartbeat", "1.5") as job:
        first, second = sorted(job.read_until("environment") for _ in range(2))
        job.make("dead")
        third = job.read_until("environment")
        job.make("end")
        assert job.finish()[0] == 0
    assert first == "[0] environment 1 0 - 1.5 0 2 0 2 1 0 unix:/nowhere 1\n"
    assert second == "[1] environment 1 1 - 1.5 1 2 1 2 1 0 unix:/nowhere 1\n"
    assert third == "[1] environment 1 2 1 1.5 1 2 0 2 1 0 unix:/nowhere 1\n"


def test_death_kills_the_children_at_once_also_those_in_other_sessions(tmp_path: Path) -> None:
    code = """
import subprocess
if worker == 1:
    for new_session in (False, True):
        child = subprocess.Popen(["sleep", "600"], start_new_session=new_session)
        (folder / f"child.{int(new_session)}").write_text(str(child.pid))
    say("children")
wait_for("end")
"""
    with ElasticJob(tmp_path, 2, code, "--min-np", "1", TEST_EVENTS="[]") as job:
        job.read_until("children")
        children = [int((tmp_path / f"child.{n}").read_text()) for n in (0, 1)]
        os.kill(job.pid(1), signal.SIGKILL)
        job.noted("ended 1")
        gone = ("", "Z")
        wait_until(lambda: all(process_state(pid) in gone for pid in children), "dead children")
        job.make("end")
        assert job.finish()[0] == 0


def test_nothing_piles_up_in_the_launcher(tmp_path: Path) -> None:
    code = """
if 1 <= worker <= 4:
    wait_for("die")
    os.kill(os.getpid(), signal.SIGKILL)
wait_for("end")
"""
    with ElasticJob(tmp_path, 3, code, "--min-np", "1") as job:
        for worker in (0, 1, 2):
            job.pid(worker)
        fds = Path(f"/proc/{job.process.pid}/fd")
        # The launcher opens one for a moment when it looks at a process.
        before = min(len(list(fds.iterdir())) for _ in range(20))
        job.make("die")
        for worker in (5, 6):
            job.pid(worker)
        assert zombies_of(job.process.pid) == []
        wait_until(lambda: len(list(fds.iterdir())) == before, "as many descriptors as before")
        job.make("end")
        assert job.finish()[0] == 0


def test_report_names_who_went_first_as_the_registrar_saw_it(tmp_path: Path) -> None:
    code = "if worker == 1: wait_for('end')\nsys.exit(f'boom {worker}')"
    events = "[Went(1, __import__('time').monotonic())]"
    with ElasticJob(tmp_path, 2, code, "--min-np", "1", TEST_EVENTS=events) as job:
        job.noted("ended 0")
        job.make("end")
        status, _, stderr, _ = job.finish()
    assert status == 1
    assert stderr.endswith("last lines of worker 1's stderr:\n    boom 1\n")


def test_worker_that_has_raised_is_killed_only_after_the_drain_timeout(tmp_path: Path) -> None:
    code = """
if worker == 0:
    wait_for("end")
    sys.exit(3)
try:
    raise ValueError("a bug")
except ValueError:
    __import__("traceback").print_exc()
(folder / "events").touch()
time.sleep(600)
"""
    flags = ("--min-np", "1", "--drain-timeout", "0.5", "--elastic-heartbeat", "0.4")
    events = "[Raised(1, 'raised ValueError: a bug')]"
    env = {"TEST_EVENTS": events, "TEST_EVENTS_WAIT": "1"}
    with ElasticJob(tmp_path, 2, code, *flags, **env) as job:
        job.noted("ended 1")
        job.make("end")
        status, _, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 1
    assert "hvdlite-run: worker 1 has not ended in time, and is killed\n" in stderr
    assert "failed first: raised ValueError: a bug, and did not end within 0.5 s\n" in stderr
    assert stderr.endswith("ValueError: a bug\n")


def test_too_few_before_the_first_epoch_end_the_job_as_one(tmp_path: Path) -> None:
    code = "sys.exit(4) if worker == 1 else time.sleep(600)"
    with ElasticJob(tmp_path, 2, code, "--min-np", "2", TEST_NEVER_FORMED="1") as job:
        status, _, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 4
    assert "worker 1 (host" in stderr and "failed first: exit status 4" in stderr


def test_failure_after_others_have_finished_is_the_jobs(tmp_path: Path) -> None:
    code = "if worker == 0: sys.exit(0)\nwait_for('end')\nsys.exit(6)"
    with ElasticJob(tmp_path, 2, code, "--min-np", "1", "--max-np", "4") as job:
        job.noted("ended 0 True")
        job.make("end")
        assert job.finish()[0] == 6
        assert not any(line.endswith("expect 4 True") for line in job.told())


def test_registrar_ends_the_job_with_its_reason(tmp_path: Path) -> None:
    events = "[Warn('rank 1 is late'), Failed('three worlds without a committed step')]"
    with ElasticJob(tmp_path, 2, "time.sleep(600)", "--min-np", "1", TEST_EVENTS=events) as job:
        status, _, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 1
    assert "hvdlite-run: rank 1 is late\n" in stderr
    assert "hvdlite-run: three worlds without a committed step; start the job again from" in stderr


def test_joiners_that_wait_end_quietly_when_the_job_is_over(tmp_path: Path) -> None:
    code = "wait_for('end' if worker == 0 else 'never')"
    env = {"TEST_NEVER_FORMED": "1", "TEST_ENTERED": "1"}
    with ElasticJob(tmp_path, 1, code, "--max-np", "2", **env) as job:
        job.pid(0)
        job.pid(1)
        job.make("end")
        status, stdout, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 0
    assert "Traceback" not in stdout
    assert re.findall("worker 1.*", stderr) == [f"worker 1 starts on {socket.gethostname()}"]


def test_refused_joiner_is_named_and_its_end_is_not_the_jobs(tmp_path: Path) -> None:
    code = "if worker == 0: wait_for('end')\nsys.exit(5 if worker else 0)"
    events = "[Entered(), Refused(1, 'another model')]"
    env = {"TEST_NEVER_FORMED": "1", "TEST_ENTERED": "1"}
    with ElasticJob(tmp_path, 1, code, "--max-np", "2", TEST_EVENTS=events, **env) as job:
        job.noted("ended 1 False exit status 5")
        job.make("end")
        status, _, stderr, _ = job.finish()
    assert status == 0
    assert "hvdlite-run: worker 1 cannot join: another model\n" in stderr
    assert "failed first" not in stderr


def test_worker_that_does_not_leave_in_time_is_killed(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    script = ("--host-discovery-script", f"cat {hosts}", "--min-np", "1", "--drain-timeout", "0.3")
    with ElasticJob(tmp_path, 2, "wait_for('end')", *script, TEST_EVENTS="[]") as job:
        job.pid(1)
        rewrite(hosts, "localhost:1\n")
        job.noted("ended 1 True died of SIGKILL")
        job.make("end")
        status, _, stderr, _ = job.finish()
    assert status == 0
    assert "worker 1 has not ended in time, and is killed" in stderr


def test_death_that_the_job_survived_leaves_the_others_the_grace(tmp_path: Path) -> None:
    code = """
def save(*_):
    time.sleep(2.5)  # longer than the grace after a failure
    say("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
say("can save", worker)
while True:
    time.sleep(0.05)
"""
    with ElasticJob(tmp_path, 2, code, "--min-np", "1") as job:
        os.kill(job.pid(1), signal.SIGKILL)
        job.pid(2)
        for worker in (0, 2):
            if not any(f"can save {worker}" in line for line in job.lines):
                job.read_until(f"can save {worker}")
        job.signal(signal.SIGTERM)
        status, stdout, stderr, _ = job.finish()
    assert status == 143
    assert "[0] saved" in stdout and "[1] saved" in stdout
    assert "the grace is over" not in stderr


def test_death_of_the_launcher_ends_workers_of_any_age(tmp_path: Path) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"{deaf}\nos.fork()\nsay('deaf', worker)\ntime.sleep(600)"
    with ElasticJob(tmp_path, 2, code, "--min-np", "1") as job:
        os.kill(job.pid(1), signal.SIGKILL)
        while any(sum(f"deaf {worker}\n" in line for line in job.lines) < 2 for worker in (0, 2)):
            job.read_until("deaf")
        job.signal(signal.SIGKILL)
        assert job.seconds_until_gone() < 8


def test_run_returns_the_results_of_the_last_epochs_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.job, "Registrar", driver.FakeRegistrar)
    monkeypatch.setenv("TEST_LOG", str(tmp_path / "log"))
    folder = str(tmp_path)

    def number() -> int:
        import os
        import signal
        import time
        from pathlib import Path

        worker = int(os.environ["HVDLITE_WORKER"])
        if worker == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if worker == 2:
            (Path(folder) / "joined").touch()
        while not (Path(folder) / "joined").exists():
            time.sleep(0.02)
        time.sleep(0.5)
        return worker * 10

    assert hvdlite.run(number, np=2, min_np=1) == [10, 20]


def test_run_raises_the_failure_that_ended_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.job, "Registrar", driver.FakeRegistrar)
    monkeypatch.setenv("TEST_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("TEST_EVENTS", "[]")

    def fail() -> None:
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        hvdlite.run(fail, np=2, min_np=1)


def zombies_of(parent: int) -> list[int]:
    """List the children of a process that have ended and are not reaped."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, ppid = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state == "Z" and int(ppid) == parent:
            found.append(int(folder.name))
    return found
