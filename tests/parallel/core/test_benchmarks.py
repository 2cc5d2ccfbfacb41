"""Each benchmark runs and prints its rows; no test checks their figures.

Importing torch takes most of the time of such a run. So only some start as a user starts them; of
the others the ranks are forked.
"""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import base_environment, run_world

PRELOAD = ("torch._dynamo",)
TENSORFLOW = ("keras", "tensorflow")
pytestmark = pytest.mark.long

DOCS = Path(__file__).resolve().parents[3] / "docs"
BENCHMARKS = DOCS.parent / "benchmarks"

# What the last row of a benchmark has: what it measured, and figures.
RANKS: Mapping[str, tuple[Mapping[str, object], list[str]]] = {
    "latency.py": (
        {"bytes": 4096, "way": "grouped"},
        ["hvdlite_us", "without_fast_path_us", "gloo_us", "gloo_cpu_us"],
    ),
    "c10d.py --only all_reduce,reduce_scatter,ddp": (
        {"model": "ddp"},
        ["hvdlite_us", "gloo_cpu_us", "faster_than_gloo", "floor_us"],
    ),
    "c10d.py --replace --only ddp_small,trainer": (
        {"model": "trainer", "over": "gloo"},
        ["us", "cpu_us"],
    ),
    "step.py --model transformer --modes --views": (
        {"model": "transformer", "tensors": 200},
        ["compute_ms", "hvdlite_ms", "ddp_ms", "one_copy_ms", "kept_ms"],
    ),
    "step.py --model transformer --only one_copy": (
        {"benchmark": "step_memory", "kind": "one_copy"},
        ["pss_mib"],
    ),
    "gpu_step.py --device cpu --small": (
        {"model": "transformer", "hvdlite_kernels": None},
        ["bare_host_ms", "hvdlite_step_ms", "ddp_step_ms", "views_step_ms", "kept_step_ms"],
    ),
    "hosts.py --verbs alltoall --sizes 65536": (
        {"verb": "alltoall", "bytes": 65536},
        ["hvdlite_us", "gloo_us", "sockets_4_us", "of_sockets"],
    ),
    "overhead.py --only timeline": ({"what": "timeline"}, ["off_ms", "on_ms", "on_to_off"]),
    "overhead.py --only replicas": ({"what": "replicas"}, ["off_ms", "on_ms", "noise"]),
    "tensorflow_ops.py --role ops": ({"tensors": 161}, ["alone_us", "hvdlite_us"]),
    "tensorflow_ops.py --role hvdlite": ({}, ["compute", "hvdlite"]),
    "tensorflow_ops.py --role keras": (
        {"model": "digits"},
        ["silent_ms", "barrier_ms", "hvdlite_ms", "hvdlite_to_barrier"],
    ),
}
# The same of benchmarks that are started as a user starts them.
PROGRAMS: Mapping[str, tuple[Mapping[str, object], list[str]]] = {
    "allreduce.py --fp16 --gradients": (
        {"np": 2, "bytes": 1 << 20},
        ["hvdlite_us", "memcpy_us", "gloo_us", "fp16_us", "gradients_us", "faster_than_gloo"],
    ),
    "elastic.py --only kill": (
        {"benchmark": "elastic_kill", "lost": 0, "twice": 0, "wrong": 0},
        ["p50_ms", "steps"],
    ),
    "overhead.py --only live": ({"what": "live"}, ["off_ms", "on_ms", "off_again_ms"]),
    "peers.py": (
        {"bytes": 4, "pause_ms": 5},
        ["hvdlite_us", "mpich_us", "openmpi_to_hvdlite", "gloo_to_hvdlite"],
    ),
}


def be_rank(script: str, *arguments: str) -> None:
    """Run a benchmark as Python would; this is a rank."""
    sys.modules.pop("sklearn", None)  # `worker_main` hides it.
    sys.path.insert(0, str(BENCHMARKS))
    sys.argv = [str(BENCHMARKS / script), *arguments]
    with pytest.raises(SystemExit) as end:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert not end.value.code


def check(output: str, known: Mapping[str, object], figures: list[str]) -> None:
    """Look at the last row that a benchmark has printed."""
    row: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert known.items() <= row.items()
    for figure in figures:
        assert row[figure] > 0, figure


@pytest.mark.parametrize("command", RANKS)
def test_ranks_of_a_benchmark_print_the_documented_figures(command: str, tmp_path: Path) -> None:
    script, *arguments = command.split()
    worker = ["--worker", "--store", str(tmp_path / "store"), "--quick", *arguments]
    preload = TENSORFLOW if script.startswith("tensorflow") else PRELOAD
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    results = run_world(2, be_rank, script, *worker, env=env, preload=preload)
    check(results[0].stdout, *RANKS[command])


@pytest.mark.parametrize("command", PROGRAMS)
def test_benchmark_starts_its_ranks_and_prints_their_rows(command: str) -> None:
    script, *arguments = command.split()
    result = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--quick", *arguments],
        env=base_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    check(result.stdout, *PROGRAMS[command])


def test_rows_of_steps_are_drawn_and_the_picture_of_performance_shows_its_table(
    tmp_path: Path,
) -> None:
    rows, page = tmp_path / "rows.jsonl", DOCS / "performance.md"
    row = {"benchmark": "step", "np": 2, "model": "mlp"}
    for column, time in (("compute", 80.0), ("one_copy", 90.5), ("hvdlite", 101.0), ("ddp", 150.0)):
        row |= {f"{column}_ms": time, f"{column}_range_ms": [time - 1.0, time + 1.0]}
    rows.write_text(json.dumps(row))
    drawn = {}
    for source in (rows, page):
        picture = tmp_path / f"{source.stem}.svg"
        command = [sys.executable, str(BENCHMARKS / "plot.py"), str(source), str(picture)]
        subprocess.run(command, check=True)
        drawn[source] = labels_of(picture)
    assert {"90", "share_parameters=True"} <= set(drawn[rows])
    assert drawn[page] == labels_of(DOCS / "performance.svg"), "run benchmarks/plot.py"
    table = re.findall(
        r"^\| (25 M parameters) \| (\d+) \|.* (\d+) \|$", page.read_text(), re.MULTILINE
    )
    ((model, compute, added),) = table
    assert {model, compute, str(int(compute) + int(added))} <= set(drawn[page])


def labels_of(picture: Path) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]+)</text>", picture.read_text())
