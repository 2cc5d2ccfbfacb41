"""A signal ends all ranks after the same step, with a status that says: run me again."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest

import hvdlite
from fakes.ssh import fake_ssh
from hvdlite.errors import RankFailedError
from launch.marked import MarkedJob, python
from launcher import run_launcher

# Ranks that reduce, sleep, and ask, step after step; `act` may do something in a step.
PRELUDE = """
import ctypes, os, signal, subprocess, sys, time
from hvdlite import _core, basics, stop
from hvdlite.rendezvous.environment import EXIT_STOPPED
stop.stop_on()
basics.init()
rank = basics.rank()
memory = (ctypes.c_float * 64)(1.0)
address = ctypes.addressof(memory)
tensor = _core.Tensor("step", _core.DTYPES["float32"], [64], address, address)
def reduce():
    basics.engine().allreduce("step", [tensor], _core.REDUCE_OPS["average"], keep=memory).wait()
def say(*words):
    print(*words, flush=True)
def loop(act=lambda step: None, every=1):
    for step in range(100_000):
        act(step)
        reduce()
        time.sleep(0.002 * (1 + rank))
        if why := stop.stop_requested(every):
            say("stopped after", step, "by", why)
            return
reduce()
say("ready", os.getpid())
"""
ENV = {"OMP_NUM_THREADS": "1"}
STOPPED = (
    "hvdlite-run: ranks 0, 1, 2 stopped by request (exit status 75); "
    "the job has not failed: run it again to go on\n"
)


def steps_in(stdout: str) -> set[str]:
    """Return where the ranks stopped, and why: one item if they agree."""
    return set(re.findall(r"stopped after .*", stdout))


def stop_by_signal(
    number: int, ranks: int, code: str, *flags: str, ready: int, env: dict[str, str] = ENV
) -> tuple[str, str]:
    """Signal the launcher of a job that is ready; return what the stopped job has printed."""
    with MarkedJob(ranks, *flags, *python(PRELUDE + code), env=env) as job:
        job.wait_until_ready(ready)
        job.signal(number)
        status, stdout, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 75, stderr
    return stdout, stderr


def test_all_ranks_stop_at_the_step_in_which_one_gets_the_signal() -> None:
    code = (
        PRELUDE + "loop(lambda step: rank == 1 and step == 20 and os.kill(os.getpid(), "
        "signal.SIGUSR1))\nsys.exit(EXIT_STOPPED)"
    )
    result = run_launcher("-np", "3", *python(code), env=ENV)
    assert result.returncode == 75
    assert steps_in(result.stdout) == {"stopped after 20 by rank 1: SIGUSR1"}
    assert result.stdout.count("stopped after") == 3
    assert result.stderr == STOPPED


@pytest.mark.parametrize("every", [1, 7])
def test_signal_to_the_launcher_stops_all_at_one_step(every: int) -> None:
    code = f"loop(every={every})\nsys.exit(EXIT_STOPPED)"
    stdout, stderr = stop_by_signal(signal.SIGTERM, 3, code, ready=3)
    assert len(steps_in(stdout)) == 1 and stdout.count("stopped after") == 3, stdout
    assert stderr.endswith(STOPPED)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_reaches_the_ranks_of_another_host(number: int, tmp_path: Path) -> None:
    child = "child = subprocess.Popen(['sleep', '600'])\n"
    code = f"{child}loop()\nsay('child', child.poll())\nsys.exit(EXIT_STOPPED)"
    env = {**ENV, "PATH": fake_ssh(tmp_path)}
    stdout, _ = stop_by_signal(number, 2, code, "-H", "far1:2", ready=2, env=env)
    assert len(steps_in(stdout)) == 1 and stdout.count("child None") == 2, stdout


def test_rank_that_fails_while_the_others_save_fails_the_job() -> None:
    code = PRELUDE + (
        "loop(lambda step: rank == 0 and step == 5 and os.kill(os.getpid(), signal.SIGUSR1))\n"
        "if rank == 1: raise OSError('the disk is full')\nsys.exit(EXIT_STOPPED)"
    )
    result = run_launcher("-np", "3", *python(code), env=ENV)
    assert result.returncode == 1
    assert result.stderr.endswith("    OSError: the disk is full\n")
    assert "by request" not in result.stderr


def test_function_that_stops_by_request_has_no_result() -> None:
    def stop() -> None:
        raise SystemExit(75)

    with pytest.raises(RankFailedError, match="stopped by request .exit status 75.; run it again"):
        hvdlite.run(stop, np=2, env={**os.environ, **ENV})


ELASTIC = """
from pathlib import Path
from hvdlite.elastic.run import run
from hvdlite.elastic.state import ObjectState
from hvdlite.objects import broadcast_object
worker, folder = int(os.environ["HVDLITE_WORKER"]), Path(os.environ["TEST_FOLDER"])
state = ObjectState(broadcast_object, basics.rank, step=0)
@run
def train(state):
    while True:
        reduce()
        time.sleep(0.002)
        if why := stop.stop_requested(EVERY):
            say("stopped after", state.step, "by", why, "of", basics.size())
            sys.exit(EXIT_STOPPED)
        if state.step == 10 and worker == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step == 20 and worker == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if worker >= 3 and not (folder / f"joined.{worker}").exists():
            (folder / f"joined.{worker}").touch()
            say("ready")
        state.step += 1
        if state.step % 5 == 0:
            state.check_host_updates()
train(state)
"""


@pytest.mark.parametrize(("signal_to", "every"), [("worker", 1), ("launcher", 3)])
def test_request_survives_deaths_and_joins(signal_to: str, every: int, tmp_path: Path) -> None:
    """Worker 1 dies; worker 0 gets SIGTERM and leaves; others join in their places."""
    code = PRELUDE.partition("reduce()\nsay")[0] + ELASTIC.replace("EVERY", str(every))
    env = {**ENV, "TEST_FOLDER": str(tmp_path)}
    with MarkedJob(3, "--min-np", "2", *python(code), env=env) as job:
        job.wait_until_ready(2)
        if signal_to == "worker":
            os.kill(job.alive("HVDLITE_WORKER=3")[0], signal.SIGUSR1)
        else:
            job.signal(signal.SIGTERM)
        status, stdout, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 75, stderr
    [where] = steps_in(stdout)
    why = r"rank [12]: SIGUSR1" if signal_to == "worker" else "all ranks: SIGTERM"
    assert re.search(f" by {why} of 3$", where)
    assert f"worker 0 (host {socket.gethostname()}) left: it got SIGTERM" in stderr
    assert "stopped by request" in stderr
