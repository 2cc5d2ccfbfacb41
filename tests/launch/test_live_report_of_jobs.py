"""`hvdlite-run --report`: what it says of jobs with a planted fault, and of jobs that fail."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

from launch.marked import MarkedJob, python
from launcher import run_launcher

# Steps with two gradients. `before` and `inside` are what a rank does before the first one, and
# between both.
TRAINING = """
import ctypes, hashlib, itertools, os, sys, threading, time
from hvdlite import _core, basics
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
basics.init()
memory = (ctypes.c_float * 1024)(1.0)
address = ctypes.addressof(memory)
def reduce(name):
    tensor = _core.Tensor(name, _core.DTYPES["float32"], [1024], address, address)
    return basics.engine().allreduce(name, [tensor], _core.REDUCE_OPS["average"], keep=memory)
def train(steps, before=lambda: None, inside=lambda: None):
    for step in range(steps):
        before()
        first = reduce("g0")
        inside()
        reduce("g1").wait()
        first.wait()
late = basics.rank() == 1
def sleep(): time.sleep(0.03 if late else 0.005)
"""


def run_training(np: int, body: str, path: Path) -> dict[str, Any]:
    """Train with a report, and return what the file beside it says."""
    result = run_launcher("-np", str(np), "--report", str(path), *python(TRAINING + body))
    assert result.returncode == 0, result.stderr
    said = json.loads(path.with_suffix(".json").read_text())
    first = said["findings"][0]["says"]
    assert result.stderr.endswith(f"hvdlite-run: report in {path}: {first}\n")
    assert first[1:] in path.read_text().replace("&#x27;", "'")
    assert said["end"] == {"status": 0, "why": ""}
    return dict(said)


def test_too_many_threads_are_the_first_finding(tmp_path: Path) -> None:
    body = (
        "block = bytes(16 << 20)\n"
        "def compute():\n"
        "    hash = lambda: hashlib.sha256(block).digest()\n"
        "    threads = [threading.Thread(target=hash) for _ in range(4)]\n"
        "    for thread in threads: thread.start()\n"
        "    for thread in threads: thread.join()\n"
        "train(30, inside=compute)\n"
    )
    said = run_training(4, body, tmp_path / "out.html")
    first = said["findings"][0]
    cores = min(2, len(os.sched_getaffinity(0)))
    assert first["rule"] == "preempted", said["findings"]
    assert f"share {cores} core" in first["says"]
    ranks = "2 ranks" if cores == 2 else "1 rank"
    assert first["remedy"] == f"Set OMP_NUM_THREADS=1, and start at most {ranks} on that host."


def test_a_late_rank_is_the_first_finding(tmp_path: Path) -> None:
    said = run_training(2, "train(60, before=sleep)", tmp_path / "out.html")
    first = said["findings"][0]
    assert (first["rule"], first["rank"]) == ("straggler", 1), said["findings"]
    assert " late in data or forward;" in first["says"]
    assert said["figures"]["total_steps"] == 58  # What follows the last ones is not known.


def test_what_if_is_what_a_job_without_the_rank_does(tmp_path: Path) -> None:
    """Rank 1 holds the others up in every other step."""
    body = "times = itertools.cycle({}[basics.rank()])\ntrain(40, lambda: time.sleep(next(times)))"
    first, late, last = (0.08,), (0.14, 0.06), (0.10,)
    said = run_training(3, body.format((first, late, last)), tmp_path / "with.html")
    without = run_training(2, body.format((first, last)), tmp_path / "without.html")
    supposed = re.match(r"What if\? Without rank 1: ([\d.]+) times", said["what_if"])
    assert supposed is not None, said["what_if"]
    ratio = said["figures"]["step"] / without["figures"]["step"]
    assert 0.9 * ratio < float(supposed[1]) < 1.1 * ratio


def test_a_killed_rank_leaves_a_report(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    # The rank that is left says what it has seen, also if SIGTERM of the launcher comes first.
    body = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntrain(10)\n"
    body += "print('ready', os.getpid(), flush=True)\ntrain(10**9, before=sleep)"
    with MarkedJob(2, "--report", str(path), *python(TRAINING + body)) as job:
        assert job.process.stdout is not None
        lines = [job.process.stdout.readline().decode().split() for _ in range(2)]
        victim = next(int(pid) for rank, _, pid in lines if rank == "[1]")
        os.kill(victim, signal.SIGKILL)
        status, _, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 128 + signal.SIGKILL
    assert f"hvdlite-run: report in {path}: " in stderr
    said = json.loads(path.with_suffix(".json").read_text())
    assert said["end"]["status"] == status
    assert "rank 1 (host " in said["end"]["why"]
    assert "killed by SIGKILL" in said["end"]["why"]
    assert "The job ended with status 137: rank 1 (host " in path.read_text()
    assert said["figures"]["total_steps"] >= 5
    assert any(event["kind"] == "error" for event in said["events"]), said["events"]


def test_what_cannot_be_written_ends_it_at_once(tmp_path: Path) -> None:
    flags = ("--report", "missing/out.html")
    result = run_launcher("-np", "2", *flags, *python("print('started')"), cwd=tmp_path)
    assert result.returncode == 2
    assert "no file can be written there: No such file" in result.stderr
    assert "started" not in result.stdout
    assert list(tmp_path.iterdir()) == []
