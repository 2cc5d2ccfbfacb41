"""Autotune in real jobs: it ends, prints its result, and changes all ranks together."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from harness import run_world
from hvdlite import _core, basics
from launcher import run_launcher

PRELOAD = ("numpy",)

SIZES = {"bias": 10, "layer": 4000, "embedding": 200_000}
STEPS = 150
QUICK = {
    "HVDLITE_AUTOTUNE": "1",
    "HVDLITE_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HVDLITE_AUTOTUNE_STEPS_PER_SAMPLE": "1",
    "HVDLITE_AUTOTUNE_TRIALS": "4",
}


def step(number: int) -> bool:
    """Sum tensors of several sizes over the ranks; return whether the result is exact."""
    time.sleep(0.005)  # the shortest sample
    ranks = basics.size()
    handles, memories = [], []
    for name, count in SIZES.items():
        values = array("f", [basics.rank() + number]) * count
        memory = (ctypes.c_float * count).from_buffer(values)
        address = ctypes.addressof(memory)
        tensor = _core.Tensor(name, _core.DTYPES["float32"], [count], address, address)
        sum_ = _core.REDUCE_OPS["sum"]
        handles.append(basics.engine().allreduce(name, [tensor], sum_, keep=memory))
        memories.append(memory)
    for handle in handles:
        handle.wait()
    expected = float(number * ranks + ranks * (ranks - 1) // 2)
    return all(memory[0] == memory[len(memory) - 1] == expected for memory in memories)


def train(steps: int) -> tuple[bool, dict[str, int]]:
    basics.init()
    exact = [step(number) for number in range(steps)]
    # The last settings of rank 0 reach the others before the next collective.
    basics.engine().barrier("end").wait()
    settings = basics.engine().tunables()
    basics.shutdown()
    return all(exact), settings


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("ranks", [2, 3])
def test_search_ends_and_ranks_agree(tmp_path: Path, ranks: int) -> None:
    log = tmp_path / "autotune.jsonl"
    results = run_world(ranks, train, STEPS, env={**QUICK, "HVDLITE_AUTOTUNE_LOG": str(log)})
    assert all(result.value[0] for result in results)
    settings = results[0].value[1]
    assert all(result.value[1] == settings for result in results)
    rows = rows_of(log)
    end = rows[-1]
    assert (end["event"], end["finished"]) == ("result", True)
    assert {knob: end[knob] for knob in settings} == settings
    samples = [row for row in rows if row["event"] == "sample"]
    assert len(samples) == end["samples"] <= 1 + 4 * 6 + 12
    assert [row["phase"] for row in samples[:2]] == ["warmup", "trial"]
    assert all(row["bytes_per_second"] > 0 for row in samples)
    assert sum(row["event"] == "trial" for row in rows) == end["trials"] <= 4
    changed = end["gain"] > 0
    assert changed == (settings != {knob: samples[0][knob] for knob in settings})
    assert results[0].stderr.count("autotune: ") == 1
    assert ("stays" in results[0].stderr) and not any(result.stderr for result in results[1:])


def test_job_that_ends_early_says_what_it_found(tmp_path: Path) -> None:
    log = tmp_path / "Autotune.jsonl"
    flags = ["--autotune", "--autotune-log-file", str(log), "--autotune-warmup-samples", "1"]
    program = "import parallel.core.test_autotune as test; assert test.train(40)[0]"
    result = run_launcher(
        *["-np", "2", *flags, "--autotune-steps-per-sample", "5"],
        *[sys.executable, "-c", program],
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert result.returncode == 0, result.stderr
    ended = "hvdlite [0] autotune: the job, or an epoch of it, ended before the search"
    assert ended in result.stderr
    assert "best so far, not checked yet" in result.stderr
    assert rows_of(log)[-1]["finished"] is False


def train_without_a_log() -> bool:
    return train(5)[0]


def test_log_that_cannot_be_written_is_warned_of() -> None:
    env = {**QUICK, "HVDLITE_AUTOTUNE_LOG": "/no/such/folder/log"}
    results = run_world(2, train_without_a_log, env=env)
    assert all(result.value for result in results)
    assert "cannot write /no/such/folder/log (No such file or directory)" in results[0].stderr
