"""Training with parameter servers under hvdlite-run, while SIGKILL ends workers and servers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness import base_environment
from launch.marked import MarkedJob, python
from patience import HANG, wait_until
from pythons import python_with

ROOT = Path(__file__).resolve().parents[3]
# A worker that hears of a failure says so and ends, also if SIGTERM of the launcher comes first.
TRAIN = """
import os, signal, time
from pathlib import Path
import torch
import hvdlite.torch as hvd
folder = Path(os.environ["TEST_FOLDER"])
with hvd.parameter_server.connect() as group:
    print("ready", os.getpid(), flush=True)
    if group.serves:
        sgd = lambda params: torch.optim.SGD(params, lr=0.1 / group.workers)
        group.serve(sgd, save=folder / "ps.ckpt", save_every=0.1)
        raise SystemExit
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    model = torch.nn.Linear(4, 1)
    replica = group.replica(model.named_parameters())
    steps = 0
    while not (folder / "end").exists():
        model(torch.ones(8, 4)).square().mean().backward()
        replica.step()
        steps += 1
        if steps == 20:
            print("trains", flush=True)
        time.sleep(0.01)
    print("pushes", sum(one.pushes for one in group.report().servers[0].workers.values()))
"""


class TrainingJob(MarkedJob):
    """A job with one server, whose workers train until `end` exists in `folder`."""

    def __init__(self, folder: Path, workers: int) -> None:
        env = {"TEST_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
        # Torch is imported within the start timeout, by several processes at the same time.
        flags = ("--servers", "1", "--start-timeout", "200")
        super().__init__(1 + workers, *flags, *python(TRAIN), env=env)
        self.pids: dict[int, int] = {}
        self.training: set[int] = set()

    def wait_until_it_trains(self, number: int) -> None:
        """Read stdout until a process has done some steps."""
        assert self.process.stdout is not None
        while number not in self.training:
            line = self.process.stdout.readline().decode()
            match = re.match(r"\[(\d+)\] (ready|trains) ?(\d*)", line)
            assert match, f"hvdlite-run ended, or said {line!r}"
            if match[2] == "ready":
                self.pids[int(match[1])] = int(match[3])
            else:
                self.training.add(int(match[1]))


def test_killed_worker_is_started_again_and_no_push_is_lost(tmp_path: Path) -> None:
    with TrainingJob(tmp_path, 2) as job:
        job.wait_until_it_trains(1)
        job.wait_until_it_trains(2)
        os.kill(job.pids[1], signal.SIGKILL)
        job.wait_until_it_trains(3)
        (tmp_path / "end").touch()
        status, stdout, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 0, stderr
    assert "worker 1 (host " in stderr and "): killed by SIGKILL; 1 of 2 workers go on" in stderr
    assert int(stdout.split("pushes")[1].split()[0]) >= 60
    assert (tmp_path / "ps.ckpt.0-of-1").stat().st_size > 0


def test_killed_server_ends_the_job_with_its_name_and_checkpoint(tmp_path: Path) -> None:
    with TrainingJob(tmp_path, 1) as job:
        job.wait_until_it_trains(1)
        wait_until((tmp_path / "ps.ckpt.0-of-1").exists, "the first checkpoint")
        os.kill(job.pids[0], signal.SIGKILL)
        status, _, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 137
    assert f"hvdlite-run: server 0 (host {os.uname().nodename}, pid {job.pids[0]}) failed" in stderr
    assert "RankFailedError: parameter server 0 died: its connection to this worker" in stderr


def run_example(name: str, ranks: int, *arguments: str) -> str:
    """Run an example with one server, all forked; return its output."""
    example = str(ROOT / "examples" / name)
    python = python_with("torch._dynamo", "sklearn.datasets")
    launcher = [sys.executable, "-m", "hvdlite.launch", "-np", str(ranks), "--servers", "1"]
    done = subprocess.run(
        [*launcher, python, example, *arguments],
        env={**base_environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=4 * HANG,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_digits_are_learned() -> None:
    flags = ("--straggler", "5", "--staleness", "3", "--steps", "800")
    output = run_example("parameter_server.py", 4, *flags)
    accuracy = re.search(r"test accuracy ([\d.]+)%", output)
    assert accuracy and float(accuracy[1]) >= 95.0, output
    assert "server 0: " in output and " pulls, age " in output
