"""The benchmarks run and print their rows; no test checks their figures.

Importing torch takes most of the time of such a run. So only some start as a user starts them; of
the others the driver and the ranks are forked.
"""

from __future__ import annotations

import importlib
import json
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import base_environment, run_world
from pythons import python_with

PRELOAD = ("torch._dynamo",)
TENSORFLOW = ("keras", "tensorflow")
pytestmark = pytest.mark.long

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
# Runs a script as `python` does, but has it start its ranks by the Python of the first argument.
BY_PYTHON = """
import pathlib, runpy, sys
sys.executable, *sys.argv = sys.argv[1:]
sys.path[0] = str(pathlib.Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def rows_of(script: str, *arguments: str, forks: bool = False) -> list[dict[str, Any]]:
    python = python_with("torch") if forks else sys.executable
    begin = ["-c", BY_PYTHON, python] if forks else []
    result = subprocess.run(
        [python, *begin, str(BENCHMARKS / script), "--quick", *arguments],
        env={**base_environment(), **({"OMP_NUM_THREADS": "1"} if forks else {})},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def run_script(script: str, *arguments: str) -> None:
    """Run a benchmark as Python would; this is a rank."""
    sys.modules.pop("sklearn", None)  # `worker_main` hides it.
    sys.argv = [str(BENCHMARKS / script), *arguments]
    with pytest.raises(SystemExit) as end:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert not end.value.code


def ranks_asked_for(script: str, *arguments: str) -> tuple[int, list[str]]:
    """Run a benchmark's driver; return how many ranks it starts, and with which arguments."""
    asked: list[tuple[int, list[str]]] = []
    sys.path.insert(0, str(BENCHMARKS))
    workers: Any = importlib.import_module("workers")
    workers.run_ranks = lambda _, ranks, output, passed_on: asked.append((ranks, passed_on))
    run_script(script, *arguments)
    return asked[0]


def be_rank(script: str, store: str, arguments: list[str]) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    run_script(script, "--worker", "--store", store, *arguments)


def forked_rows_of(
    script: str, *arguments: str, preload: Sequence[str] = PRELOAD
) -> list[dict[str, Any]]:
    """Do what `rows_of` does where `workers.run_ranks` starts the ranks, without a launcher."""
    (driver,) = run_world(1, ranks_asked_for, script, "--quick", *arguments)
    ranks, passed_on = driver.value
    with tempfile.TemporaryDirectory() as folder:
        env = {"GLOO_SOCKET_IFNAME": "lo"}
        own = script, f"{folder}/store", passed_on
        results = run_world(ranks, be_rank, *own, env=env, preload=preload)
    return [json.loads(line) for line in results[0].stdout.splitlines()]


@pytest.fixture(scope="module")
def allreduce_rows() -> list[dict[str, Any]]:
    return forked_rows_of("allreduce.py", "--np", "2", "--fp16")


@pytest.fixture(scope="module")
def step_rows() -> list[dict[str, Any]]:
    return forked_rows_of("step.py", "--np", "2")


def test_allreduce_prints_a_row_per_size(allreduce_rows: list[dict[str, Any]]) -> None:
    assert [row["bytes"] for row in allreduce_rows] == [4, 4096, 1 << 20]
    for row in allreduce_rows:
        assert row["np"] == 2
        for contestant in ("hvdlite", "memcpy", "gloo", "fp16", "fp16_by_hand"):
            assert row[f"{contestant}_us"] > 0
        assert row["times_memcpy"] > 0 and row["faster_than_gloo"] > 0


def test_parameter_server_prints_its_throughput() -> None:
    (row,) = rows_of("parameter_server.py", "--part", "throughput", forks=True)
    assert row["bytes"] == 1_000_000
    assert row["hvdlite_ms"] > 0 and row["hvdlite_gigabytes_per_second"] > 0


def test_latency_prints_a_row_per_size_and_pause_and_one_per_way() -> None:
    printed = forked_rows_of("latency.py", "--np", "2")
    rows = [row for row in printed if row["benchmark"] == "latency"]
    single = [(row["bytes"], row["pause_ms"]) for row in rows if row["tensors"] == 1]
    assert single == [(4, 0), (4, 0.5), (4096, 0), (4096, 0.5)]
    assert [row["way"] for row in rows[len(single) :]] == ["one by one", "in flight", "grouped"]
    for row in rows:
        for contestant in ("hvdlite", "without_fast_path", "gloo"):
            assert row[f"{contestant}_us"] >= row[f"{contestant}_best_us"] > 0
            assert row[f"{contestant}_switches"] >= 0
    for row in printed[len(rows) :]:
        assert row["benchmark"] == "latency_phases"
        assert row["call_us"] > row["negotiate_us"] > 0 and row["batches"] > 0
    assert len(printed) == len(rows) + 5


def test_peers_prints_rows_of_libraries_that_take_turns() -> None:
    rows = rows_of("peers.py", "--np", "2", "--contestants", "hvdlite,mpich,openmpi")
    single = [(row["bytes"], row["pause_ms"]) for row in rows if row["tensors"] == 1]
    assert single == [(4, 0), (4096, 0), (4, 0.5), (4, 5)]
    assert [row["way"] for row in rows[len(single) :]] == ["one by one", "in flight", "grouped"]
    for row in rows:
        own = ["hvdlite"] if row.get("way") == "grouped" else ["hvdlite", "mpich", "openmpi"]
        for contestant in own:
            assert row[f"{contestant}_us"] >= row[f"{contestant}_best_us"] > 0


def test_step_prints_a_row_per_model(step_rows: list[dict[str, Any]]) -> None:
    assert [(row["model"], row["tensors"]) for row in step_rows] == [
        ("mlp", 10),
        ("resnet", 161),
        ("transformer", 200),
    ]
    for row in step_rows:
        assert row["parameters"] > 2_400_000
        for figure in ("compute_ms", "hvdlite_ms", "ddp_ms"):
            assert row[figure] > 0


def test_replica_check_is_measured_beside_the_same_steps_without_it() -> None:
    [row] = forked_rows_of("step.py", "--np", "2", "--model", "transformer", "--check-replicas")
    assert row["check_ms"] > 0 and row["watched_ratio"] > 0


def test_memory_of_the_ranks_is_measured() -> None:
    options = ("--np", "2", "--model", "transformer", "--memory")
    [row] = forked_rows_of("step.py", *options)  # the first of five jobs
    assert row["kind"] == "alone" and row["pss_mib"] > 0


def test_keras_steps_are_measured_beside_ranks_that_only_meet() -> None:
    (row,) = forked_rows_of("keras_step.py", "--np", "2", preload=TENSORFLOW)
    assert row["model"] == "digits" and row["hvdlite_to_barrier"] > 0
    for contestant in ("silent", "barrier", "hvdlite"):
        assert row[f"{contestant}_ms"] > 0


def test_operations_and_steps_of_tensorflow_are_measured() -> None:
    (row,) = forked_rows_of("tensorflow_ops.py", preload=TENSORFLOW)
    assert row["tensors"] == 161 and row["alone_us"] > 0 and row["hvdlite_us"] > 0
    assert "hvdlite_us_per_tensor" in row  # Under load the difference of the two may be negative.
    step = ["--mode", "hvdlite", "--quick"]
    results = run_world(2, be_rank, "tensorflow_ops.py", "", step, preload=TENSORFLOW)
    (medians,) = map(json.loads, results[0].stdout.splitlines())
    assert medians["compute"] > 0 and medians["hvdlite"] > 0


def test_modes_print_a_row_for_each_mode_and_delay() -> None:
    rows = forked_rows_of("modes.py", "--np", "2")
    delays = ("hiccup", "tail", "slow")
    named = [(row["delay"], row["mode"]) for row in rows]
    modes = ("localsgd", "late")
    assert named == [(delay, mode) for delay in delays for mode in modes]
    for row in rows:
        assert row["effective_speed_up"] > 0 and row["synchronous_step_ms"] > 0
        assert 0 < row["share_done"] <= 1


def test_timeline_prints_a_row_per_kind_of_work() -> None:
    rows = forked_rows_of("timeline.py", "--np", "2")
    assert [row["work"] for row in rows] == ["4 B", "200 x 4 KiB", "16 MiB"]
    for row in rows:
        for figure in ("off_us", "on_us", "off_again_us", "on_to_off", "noise"):
            assert row[figure] > 0


def test_blame_prints_how_often_the_view_is_right() -> None:
    (row,) = rows_of("blame.py", "--np", "2", forks=True)
    assert row["looks"] > 0
    assert 0 <= row["right"] <= 1


def test_live_prints_what_the_view_costs() -> None:
    (row,) = rows_of("live.py", "--np", "2", forks=True)
    assert row["tensors"] == 200 and row["turns"] == 1
    for figure in ("off_ms", "on_ms", "off_again_ms", "on_to_off", "noise"):
        assert row[figure] > 0


def test_gpu_step_runs_without_a_gpu() -> None:
    rows = forked_rows_of("gpu_step.py", "--np", "1", "--device", "cpu", "--small")
    assert [row["model"] for row in rows] == ["resnet50", "transformer"]
    for row in rows:
        for contestant in ("bare", "hvdlite", "ddp", "views", "kept"):
            assert row[f"{contestant}_host_ms"] > 0 and row[f"{contestant}_step_ms"] > 0
            assert row[f"{contestant}_kernels"] is None


def test_autotune_prints_what_it_found() -> None:
    (row,) = rows_of("autotune.py", "--np", "2", "--model", "transformer", forks=True)
    assert row["finished"] is True and row["gain"] == 0
    assert row["samples"] == 2 and row["training_steps"] > 0


def test_rows_are_drawn(
    allreduce_rows: list[dict[str, Any]], step_rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "picture.png"
    rows.write_text("\n".join(map(json.dumps, allreduce_rows + step_rows)))
    subprocess.run(
        [sys.executable, str(BENCHMARKS / "plot.py"), str(rows), str(picture)], check=True
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_picture_of_performance_shows_the_table_of_the_page(tmp_path: Path) -> None:
    drawn, docs = tmp_path / "performance.svg", BENCHMARKS.parent / "docs"
    page = docs / "performance.md"
    subprocess.run([sys.executable, str(BENCHMARKS / "plot.py"), str(page), str(drawn)], check=True)
    labels = [
        re.findall(r"<text [^>]*>([^<]+)</text>", picture.read_text())
        for picture in (drawn, docs / "performance.svg")
    ]
    assert labels[0] == labels[1], "run the command of benchmarks/plot.py"
    table = re.findall(
        r"^\| (25 M parameters) \| (\d+) \|.* (\d+) \|$", page.read_text(), re.MULTILINE
    )
    ((model, compute, added),) = table
    assert {model, compute, str(int(compute) + int(added))} <= set(labels[0])


def test_a_copy_for_each_host_is_drawn_where_it_was_measured(tmp_path: Path) -> None:
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "picture.svg"
    row = {"benchmark": "step", "np": 2, "model": "mlp"}
    for column, time in (("compute", 80.0), ("one_copy", 90.5), ("hvdlite", 101.0), ("ddp", 150.0)):
        row |= {f"{column}_ms": time, f"{column}_range_ms": [time - 1.0, time + 1.0]}
    rows.write_text(json.dumps(row))
    subprocess.run(
        [sys.executable, str(BENCHMARKS / "plot.py"), str(rows), str(picture)], check=True
    )
    text = picture.read_text()
    assert ">90</text>" in text and "share_parameters=True" in text


def test_c10d_prints_rows_for_collectives_and_models() -> None:
    rows = forked_rows_of("c10d.py", "--np", "2", "--only", "all_reduce,reduce_scatter,ddp")
    assert [row.get("collective") or row["model"] for row in rows] == [
        *("all_reduce", "all_reduce", "reduce_scatter", "reduce_scatter", "ddp")
    ]
    for row in rows:
        assert row["hvdlite_us"] > 0 and row["gloo_cpu_us"] > 0 and row["faster_than_gloo"] > 0
    assert all(row["cpu_times_plain"] > 0 for row in rows[:2])
