"""`hvdlite-run --report`: what it says of jobs with a planted fault, and of jobs that fail."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from launch.marked import MarkedJob, python
from launcher import run_launcher
from patience import wait_until

# Steps with two gradients. `before` and `inside` are what a rank does before the first one, and
# between both.
TRAINING = """
import ctypes, hashlib, os, sys, threading, time
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


def run_training(np: int, body: str, path: Path, *flags: str) -> dict[str, Any]:
    """Train with a report, and return what the file beside it says."""
    result = run_launcher("-np", str(np), "--report", str(path), *flags, *python(TRAINING + body))
    assert result.returncode == 0, result.stderr
    said = json.loads(path.with_suffix(".json").read_text())
    first = said["findings"][0]["says"]
    told = re.sub(r" \[HVD\d+\]\n$", "\n", result.stderr)
    assert told.endswith(f"hvdlite-run: report in {path}: {first}\n")
    assert first[1:] in path.read_text().replace("&#x27;", "'")
    assert said["end"] == {"status": 0, "why": ""}
    return dict(said)


@pytest.mark.parametrize(
    ("where", "phase"), [("before", "data or forward"), ("inside", "backward")]
)
def test_a_planted_straggler_is_the_first_finding(tmp_path: Path, where: str, phase: str) -> None:
    said = run_training(2, f"train(60, {where}=sleep)", tmp_path / "out.html")
    first = said["findings"][0]
    assert (first["rule"], first["rank"]) == ("straggler", 1), said["findings"]
    assert f" late in {phase};" in first["says"]
    assert said["figures"]["total_steps"] == 58  # What follows the last ones is not known.


# What a rank does, with what flags, and the rule, a part of its sentence and one of its remedy.
CAUSES = {
    "a batch of three times the size": (
        """
from hvdlite.observed import observe
def batch():
    time.sleep(0.03 if late else 0.01)
    observe(samples=48 if late else 16)
train(60, before=batch)
""",
        (),
        ("straggler", "rank 1 on ", " times as many samples in each step"),
    ),
    "now one rank is late and now the other": (
        """
step = iter(range(10**9))
train(80, before=lambda: time.sleep(0.03 if next(step) % 2 == late else 0.005))
""",
        (),
        ("noise", "it is not always the same one", "sort batches by their length"),
    ),
    "tensors that are large for what is computed": (
        """
memory = (ctypes.c_float * (1 << 24))(1.0)
def large():
    address = ctypes.addressof(memory)
    tensor = _core.Tensor("large", _core.DTYPES["float32"], [1 << 24], address, address)
    basics.engine().allreduce("large", [tensor], _core.REDUCE_OPS["average"], keep=memory).wait()
for step in range(12): large()
""",
        (),
        ("communicating", "exchanging gradients takes ", "compression=hvd.Compression.bf16"),
    ),
    "a NaN": (
        "from hvdlite import finite\ntrain(20)\nfinite.look('g', [('w', not late)])",
        ("--check-finite", "2"),
        ("nonfinite", "rank 1: 'w' has a NaN or an infinity in step 1", "look at the data"),
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_that_is_made_for_real_is_found(tmp_path: Path, cause: str) -> None:
    body, flags, (rule, says, remedy) = CAUSES[cause]
    findings = run_training(2, body, tmp_path / "out.html", *flags)["findings"]
    # On a busy machine other programs may come before it.
    found = next((finding for finding in findings if finding["rule"] == rule), None)
    assert found is not None, findings
    assert says in found["says"]
    assert remedy in found["remedy"]


@pytest.mark.long
@pytest.mark.parametrize("does", ["time.sleep(1e6)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_wait_that_is_interrupted_is_found(tmp_path: Path, does: str) -> None:
    path = tmp_path / "out.html"
    body = f"import signal\ntrain(20)\nprint('ready', flush=True)\nif late: {does}\ntrain(1)"
    flags = ("--report", str(path), "--stall-warning", "7", "--grace", "1")
    with MarkedJob(2, *flags, *python(TRAINING + body)) as job:
        job.wait_until_ready(2)
        job.wait_for_stderr("warning: ")
        job.signal(signal.SIGINT)
        job.finish()
    findings = json.loads(path.with_suffix(".json").read_text())["findings"]
    assert any(
        "rank 0 is in '" in finding["says"] and "see what rank 1 does instead" in finding["remedy"]
        for finding in findings
    ), findings


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


def test_a_baseline_says_where_the_missing_speed_up_is(tmp_path: Path) -> None:
    run_training(1, "train(80, before=sleep)", tmp_path / "one.html")
    flags = ("--baseline", str(tmp_path / "one.json"))
    said = run_training(2, "train(60, before=sleep)", tmp_path / "two.html", *flags)
    first, second = said["findings"][:2]
    assert (first["rule"], second["rule"]) == ("baseline", "straggler"), said["findings"]
    numbers = re.findall(r"-?\d+\.\d\d", first["says"])
    assert sum(round(100 * float(number)) for number in numbers) == 200
    assert "steps x ranks" in first["remedy"]


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


def test_a_killed_launcher_leaves_its_last_state(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    body = "train(10)\nprint('ready', flush=True)\ntrain(10**9, before=sleep)"
    with MarkedJob(2, "--report", str(path), *python(TRAINING + body)) as job:
        job.wait_until_ready(2)
        steps = re.compile(r"<dt>steps</dt><dd>\d\d")
        wait_until(lambda: path.exists() and steps.search(path.read_text()), "a state with steps")
        job.signal(signal.SIGKILL)
        job.seconds_until_gone()
    text = path.read_text()
    assert "running, written " in text
    assert text.endswith("</html>\n")
    assert text.count("<svg") >= 1


def test_ctrl_c_leaves_a_report(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    body = "train(10)\nprint('ready', flush=True)\ntrain(10**9, before=sleep)"
    with MarkedJob(2, "--report", str(path), *python(TRAINING + body)) as job:
        job.wait_until_ready(2)
        job.signal(signal.SIGINT)
        status, _, stderr, _ = job.finish()
        assert job.alive() == []
    assert status == 130
    assert f"report in {path}" in stderr
    assert json.loads(path.with_suffix(".json").read_text())["end"]["status"] == 130
    assert "The job ended with status 130" in path.read_text()


def test_a_script_without_hvdlite_has_a_report(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    result = run_launcher("-np", "2", "--report", str(path), *python("print(7)"))
    assert result.returncode == 0
    assert result.stderr.endswith(f"hvdlite-run: report in {path}\n")
    assert "No rank has said anything" in path.read_text()


def test_a_folder_that_goes_away_does_not_fail_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    # The launcher may write a state between the two parts of removing a folder.
    body = f"import os, shutil\nwhile os.path.exists({str(folder)!r}):\n"
    body += f"    shutil.rmtree({str(folder)!r}, ignore_errors=True)\n"
    result = run_launcher("-np", "1", "--report", str(folder / "out.html"), *python(body))
    assert result.returncode == 0, result.stderr
    assert f"there is no report in {folder}/out.html: No such file" in result.stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--report", "missing/out.html"), "no file can be written there: No such file"),
        (("--report", "out.txt"), "the name has to end with .html"),
        (("--report", "out.html", "--baseline", "one.json"), "No such file"),
        (("--report", "out.html", "--baseline", "other.json"), "this is not the JSON file"),
        (("--baseline", "other.json"), "give --report, too"),
    ],
)
def test_what_cannot_be_written_or_read_ends_it_at_once(
    tmp_path: Path, flags: tuple[str, ...], reason: str
) -> None:
    (tmp_path / "other.json").write_text("{}")
    result = run_launcher("-np", "2", *flags, *python("print('started')"), cwd=tmp_path)
    assert result.returncode == 2
    assert reason in result.stderr
    assert "started" not in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["other.json"]
