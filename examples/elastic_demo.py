"""Kill ranks of examples/torch_elastic.py while it trains, and draw what happened.

    python examples/elastic_demo.py

hvdlite-run starts the example with four ranks. Every few seconds this program kills one of them,
unless only two are left; hvdlite-run starts others in their place. demo-output/elastic.png shows
processes, steps and loss over time. This file does not use hvdlite.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

EXAMPLE = Path(__file__).with_name("torch_elastic.py")
RANKS, FEWEST = 4, 2
PAUSE = 0.04  # seconds for which the example sleeps in each step, as if its model were larger


def read(log: Path) -> list[dict]:
    """Read the rows of the log, one for each step of each rank; the last may be incomplete."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kill_ranks(job: subprocess.Popen, log: Path, every: float) -> dict[int, float]:
    """Kill a random rank every few seconds until the job ends; return the times by process."""
    kills: dict[int, float] = {}
    chooser, last = random.Random(0), None
    while job.poll() is None:
        time.sleep(0.2)
        rows = read(log)
        last = last or (rows[0]["time"] if rows else None)
        train = [row["pid"] for row in rows if row["step"] == rows[-2]["step"]] if rows[1:] else []
        train = [pid for pid in train if pid not in kills]
        if last and time.time() - last >= every and len(train) > FEWEST:
            pid, last = chooser.choice(train), time.time()
            kills[pid] = last
            with suppress(ProcessLookupError):  # It has ended by itself.
                os.kill(pid, signal.SIGKILL)
    return kills


def summary(rows: list[dict], kills: dict[int, float]) -> str:
    """Say in words what the log shows."""
    ends: dict[int, float] = {}
    for row in rows:
        ends[row["step"]] = max(row["time"], ends.get(row["step"], 0))
    lost = max(ends) - len(ends)
    repeated = len(rows) - len({(row["pid"], row["step"]) for row in rows})
    times = [ends[step] for step in sorted(ends)]
    longest = max(after - before for before, after in pairwise(times))
    joined = len({row["pid"] for row in rows}) - RANKS
    return (
        f"{len(kills)} ranks killed, {joined} joined; {len(ends)} steps: {lost} lost, {repeated} "
        f"done twice; at most {longest:.2f} s from one step to the next"
    )


def draw(rows: list[dict], kills: dict[int, float], picture: Path) -> None:
    """Draw when each process trained, and the steps and the loss of all."""
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")
    begin = min(row["time"] for row in rows)
    trained, losses = defaultdict(list), defaultdict(list)
    for row in rows:
        trained[row["pid"]].append(row["time"] - begin)
        losses[row["step"]].append((row["time"] - begin, row["loss"]))
    figure, (lanes, steps, curve) = pyplot.subplots(
        3, sharex=True, figsize=(9, 8), layout="constrained", height_ratios=(2, 1, 1)
    )
    for lane, (pid, times) in enumerate(trained.items()):
        lanes.plot(times, [lane] * len(times), "|", color=f"C{lane}")
        if pid in kills:
            lanes.plot(kills[pid] - begin, lane, "x", color="red", markersize=10)
    lanes.set(ylabel="process", title="a mark: a step of this process; x: it was killed")
    when = [max(time for time, _ in losses[step]) for step in losses]
    steps.plot(when, list(losses))
    steps.set(ylabel="step")
    mean = [sum(loss for _, loss in losses[step]) / len(losses[step]) for step in losses]
    curve.plot(when, mean)
    curve.set(xlabel="seconds", ylabel="loss", yscale="log")
    for moment in kills.values():
        for axes in (steps, curve):
            axes.axvline(moment - begin, color="red", linewidth=0.5)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="kill ranks while they train")
    parser.add_argument("--every", type=float, default=2, help="seconds from kill to kill")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    log, picture = options.output / "elastic.jsonl", options.output / "elastic.png"
    log.unlink(missing_ok=True)
    launcher = ["hvdlite-run", "-np", str(RANKS), "--min-np", str(FEWEST), sys.executable]
    example = [EXAMPLE, "--epochs", str(options.epochs), "--pause", str(PAUSE), "--log", log]
    with subprocess.Popen([*launcher, *map(str, example)]) as job:
        kills = kill_ranks(job, log, options.every)
    if job.returncode:
        sys.exit(job.returncode)
    draw(read(log), kills, picture)
    print(f"{summary(read(log), kills)}\nprocesses, steps and loss over time: {picture}")
