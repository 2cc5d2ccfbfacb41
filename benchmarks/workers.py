"""Functions with which a benchmark starts its own ranks, and prints its rows.

A benchmark is one file that runs in two roles. The user runs it; `run_ranks` then starts it again
on N ranks by hvdlite-run, with `--worker`, and passes on the JSON lines that rank 0 prints. With
`--worker`, it measures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

END_SECONDS = 1800
PREFIXED_ROW = re.compile(r"^(?:\[[^]]*\]\s*)?(\{.*\})\s*$")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that every benchmark has."""
    parser.add_argument("--np", type=int, default=2, metavar="N", help="number of ranks (2)")
    parser.add_argument("--quick", action="store_true", help="a smoke run: few sizes, few rounds")
    parser.add_argument("--output", type=Path, help="also append the JSON lines to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)


def run_ranks(
    script: str, ranks: int, output: Path | None, arguments: list[str], *flags: str
) -> int:
    """Start `script --worker` on `ranks` ranks and print the JSON lines of rank 0.

    `flags` are those of hvdlite-run.
    """
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory(prefix="hvdlite-benchmark-") as folder:
        launcher = [sys.executable, "-m", "hvdlite.launch", "-np", str(ranks), *flags]
        worker = [sys.executable, script, "--worker", "--store", f"{folder}/store", *arguments]
        job = subprocess.Popen(
            [*launcher, *worker], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert job.stdout is not None
        try:
            for line in job.stdout:
                hand_on(line, output)
        finally:
            job.terminate()
            job.wait()
    return job.returncode


def run_on_hosts(
    script: str,
    ranks: int,
    hosts: int,
    output: Path | None,
    arguments: list[str],
    rate: str = "",
) -> int:
    """Do what `run_ranks` does on so many simulated hosts, whose links may have a rate."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from multihost.bed import Bed, end, why_not

    if reason := why_not():
        sys.exit(f"no hosts can be simulated here: {reason}")
    if ranks % hosts:
        sys.exit(f"{ranks} ranks cannot be divided evenly among {hosts} hosts")
    with (
        tempfile.TemporaryDirectory(prefix="hvdlite-benchmark-") as folder,
        Bed(hosts) as bed,
    ):
        for host in range(hosts if rate else 0):
            bed.limit_rate(host, rate)
        slots = ",".join(f"{name}:{ranks // hosts}" for name in bed.names)
        worker = [sys.executable, str(Path(script).resolve()), "--worker", *arguments]
        own_settings = {
            name: one for name, one in os.environ.items() if name.startswith("HVDLITE_")
        }
        job = bed.start_launcher(
            *("-H", slots, *worker, "--store", f"{folder}/store"),
            env={"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **own_settings},
            stderr=None,
        )
        try:
            assert job.stdout is not None
            for line in job.stdout:
                hand_on(line.decode(), output)
            return job.wait(END_SECONDS)
        finally:
            end(job)


def hand_on(line: str, output: Path | None) -> None:
    """Print a row of rank 0 without its prefix; send everything else to stderr."""
    row = PREFIXED_ROW.match(line)
    if row is None:
        sys.stderr.write(line)
        return
    print(row[1], flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(row[1] + "\n")


def machine(framework: str) -> dict[str, Any]:
    """Describe the machine of a row, and the version of the framework's package."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "machine": platform.machine(),
        framework: version(framework),
    }


def print_row(row: dict[str, Any], framework: str = "torch") -> None:
    """Print one JSON line; only rank 0 calls this."""
    print(json.dumps({**row, **machine(framework)}), flush=True)
