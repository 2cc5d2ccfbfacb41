"""Measure what a live view costs: the same steps of 200 tensors with and without it, in turns.

    python benchmarks/live.py --np 2

Each turn is a job of its own on a terminal: without a view ("off"), with `--live` ("on"), and
without one again ("off_again"). It prints one JSON line: the medians of the turns' mean times of a
step, the median of the ratios of "on" to "off" of one turn, and of "off_again" to "off", which
shows how much noise there is; and how much of a core the launcher used.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from workers import PREFIXED_ROW, add_common_arguments, hand_on, machine

TENSORS, FLOATS = 200, 12_500  # 2.5 M parameters, as many as the small transformer of step.py
TURNS, QUICK_TURNS = 7, 1
SECONDS, QUICK_SECONDS = 8.0, 0.5
FIRST_STEPS = 10
WAYS = ("off", "on", "off_again")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(QUICK_SECONDS if arguments.quick else SECONDS)
        return 0
    turns = [
        {way: run(way, arguments.np, arguments.quick) for way in WAYS}
        for _ in range(QUICK_TURNS if arguments.quick else TURNS)
    ]
    row: dict[str, Any] = {"np": arguments.np, "tensors": TENSORS, "turns": len(turns)}
    for way in WAYS:
        row[f"{way}_ms"] = round(1e3 * statistics.median(turn[way]["step"] for turn in turns), 3)
        row[f"{way}_launcher_cpu"] = round(
            statistics.median(turn[way]["launcher_cpu"] for turn in turns), 4
        )
    row["on_to_off"] = ratio(turns, "on")
    row["noise"] = ratio(turns, "off_again")
    hand_on(json.dumps({**row, **machine("torch")}), arguments.output)
    return 0


def ratio(turns: list[dict[str, dict[str, float]]], way: str) -> float:
    """Return the median over the turns of the time of a step, relative to "off"."""
    return round(statistics.median(turn[way]["step"] / turn["off"]["step"] for turn in turns), 4)


def run(way: str, ranks: int, quick: bool) -> dict[str, float]:
    """Run one job with a terminal as stderr; return what rank 0 has measured."""
    flags = ["--live"] if way == "on" else []
    worker = [sys.executable, __file__, "--worker", *["--quick"] * quick]
    master, slave = pty.openpty()
    job = subprocess.Popen(
        [sys.executable, "-m", "hvdlite.launch", *flags, "-np", str(ranks), *worker],
        env=dict(os.environ, OMP_NUM_THREADS="1", TERM="xterm"),
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
    )
    os.close(slave)
    reader = threading.Thread(target=drain, args=(master,))
    reader.start()
    output, _ = job.communicate()
    reader.join()
    found = next(filter(None, map(PREFIXED_ROW.match, output.splitlines())), None)
    if found is None:
        raise SystemExit(f"the job ended with status {job.returncode} and without a result")
    result: dict[str, float] = json.loads(found[1])
    return result


def drain(master: int) -> None:
    """Read a terminal to its end."""
    with contextlib.suppress(OSError):  # It has no writer any more.
        while os.read(master, 1 << 16):
            pass
    os.close(master)


def measure(seconds: float) -> None:
    """Run one rank; rank 0 prints the mean time of a step."""
    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    gradients = [torch.zeros(FLOATS) for _ in range(TENSORS)]
    launcher = Path(f"/proc/{os.getppid()}/stat")

    def step() -> None:
        handles = [
            hvd.allreduce_async_(gradient, name=f"gradient.{i}")
            for i, gradient in enumerate(gradients)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    for _ in range(FIRST_STEPS):  # They fill caches.
        step()
    started = time.monotonic()
    for _ in range(FIRST_STEPS):
        step()
    a_step = (time.monotonic() - started) / FIRST_STEPS
    count = hvd.broadcast_object(max(1, int(seconds / a_step)), root_rank=0)
    cpu, started = cpu_seconds(launcher), time.monotonic()
    for _ in range(count):
        step()
    taken = time.monotonic() - started
    if hvd.rank() == 0:
        used = (cpu_seconds(launcher) - cpu) / taken
        print(json.dumps({"step": taken / count, "launcher_cpu": used}), flush=True)


def cpu_seconds(stat: Path) -> float:
    """Return the CPU time of a process from its /proc/PID/stat."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
