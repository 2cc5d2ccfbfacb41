"""Workers of another job, or with a number that is not theirs, at an elastic job's registrar."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import base_environment
from hvdlite.launch.process.processes import processes_with
from launcher import end_launcher, run_launcher, start_launcher
from patience import HANG

# Rank 0 tells the others when the job is over. Before that, every average is 1.
STEADY = """
import ctypes, os, pathlib, sys
import hvdlite
from hvdlite import _core, basics
basics.init()
memory = (ctypes.c_float * 1024)()
address = ctypes.addressof(memory)
tensor = _core.Tensor("step", _core.DTYPES["float32"], [1024], address, address)
over, steps = False, 0
while not over:
    over = basics.rank() == 0 and pathlib.Path(sys.argv[1]).exists()
    memory[:] = [1.0 + 2 * over] * 1024
    basics.engine().allreduce("step", [tensor], _core.REDUCE_OPS["average"], keep=memory).wait()
    over = memory[0] == 2.0
    assert memory[:] == [1.0 + over] * 1024, memory[0]
    steps += 1
    if steps == 10:
        print("steady", flush=True)
print("epochs", [(epoch.number, epoch.workers) for epoch in hvdlite.elastic.history()])
"""
INIT = "from hvdlite import basics; basics.init(); print('is in')"


@dataclass
class First:
    """A job of two workers that must not notice anything."""

    launcher: subprocess.Popen[bytes]
    go: Path
    environment: dict[str, str]  # of worker 0

    def check(self) -> None:
        """End the job; check that nothing has happened to it."""
        assert self.launcher.poll() is None
        self.go.touch()
        stdout, stderr = self.launcher.communicate(timeout=2 * HANG)
        assert self.launcher.returncode == 0, stderr
        lines = sorted(line for line in stdout.decode().splitlines() if "epochs" in line)
        assert lines == [f"[{worker}] epochs [(0, (0, 1))]" for worker in (0, 1)]
        # The registrar may say once that strangers come.
        assert all(line.endswith(b"(said once)") for line in stderr.splitlines()), stderr


@pytest.fixture
def first(tmp_path: Path) -> Iterator[First]:
    """Start the job, and wait until it trains."""
    mark, go = f"TEST_MARK={tmp_path}", tmp_path / "go"
    launcher = start_launcher(
        *("-np", "2", "--min-np", "1", sys.executable, "-c", STEADY, str(go)),
        env={"TEST_MARK": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    try:
        assert launcher.stderr is not None and launcher.stdout is not None
        assert b"world 0: 2 ranks start" in launcher.stderr.readline()
        for _ in range(2):
            assert b"steady" in launcher.stdout.readline()
        (pid,) = processes_with(mark, "HVDLITE_WORKER=0")
        pairs = Path(f"/proc/{pid}/environ").read_text().rstrip("\0").split("\0")
        yield First(launcher, go, dict(pair.split("=", 1) for pair in pairs))
    finally:
        end_launcher(launcher)


def test_second_job_at_the_same_endpoint_is_refused(first: First) -> None:
    change = f'HVDLITE_RENDEZVOUS="{first.environment["HVDLITE_RENDEZVOUS"]}" exec "$@"'
    worker = ("sh", "-c", change, "sh", sys.executable, "-c", INIT)
    second = run_launcher("-np", "2", "--min-np", "1", *worker)
    assert second.returncode != 0
    assert "is in" not in second.stdout
    assert "it belongs to another job, or another user" in second.stderr
    first.check()


SECRET = "a1" * 32
STRANGERS: dict[str, tuple[Mapping[str, str], str]] = {
    "another secret": ({"HVDLITE_TOKEN": SECRET}, "it belongs to another job, or another user"),
    "another job": ({"HVDLITE_JOB_ID": SECRET[:32]}, "it belongs to another job, or another user"),
    "unknown worker": ({"HVDLITE_WORKER": "7"}, "worker 7 is not of this job, or not any more"),
    "worker that lives": ({}, "worker 0 has a connection already"),
    "another epoch": (
        {"HVDLITE_ELASTIC": "0", "HVDLITE_EPOCH": "1"},
        "rank 0 belongs to epoch 1 of the job, its peer to epoch 0",
    ),
}


@pytest.mark.parametrize("changes, message", STRANGERS.values(), ids=STRANGERS.keys())
def test_stranger_is_refused_with_a_reason(
    first: First, changes: Mapping[str, str], message: str
) -> None:
    stranger = subprocess.run(
        [sys.executable, "-c", INIT],
        env={**base_environment(), **first.environment, **changes},
        capture_output=True,
        text=True,
        timeout=2 * HANG,
        check=False,
    )
    assert stranger.returncode != 0
    assert message in stranger.stderr.splitlines()[-1]
    first.check()
