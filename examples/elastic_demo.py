"""Kill ranks of examples/torch_elastic.py while it trains, and draw what happened.

    python examples/elastic_demo.py

hvdlite-run starts the example with four ranks. Every two seconds this program kills one of them,
unless only two are left or training is about to end; hvdlite-run starts others in their place.
demo-output/elastic.png shows processes, steps and loss over time.
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
    """Kill a rank whenever the same ones have trained for a while; return times by process."""
    kills, before, since = {}, set(), 0.0
    while job.poll() is None:
        time.sleep(0.2)
        now = time.time()
        new = [row for row in read(log) if row["time"] > now - 0.5 and row["epochs_left"] > 2]
        train = {row["pid"] for row in new} - kills.keys()
        before, since = train, since if train == before else now
        if now - since >= every and len(train) > FEWEST:
            pid = random.choice(sorted(train))
            kills[pid] = now
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
    begin, trained, losses = rows[0]["time"], defaultdict(list), defaultdict(list)
    for row in rows:
        trained[row["pid"]].append(row["time"] - begin)
        losses[row["step"]].append((row["time"] - begin, row["loss"]))
    figure, (lanes, steps, curve) = pyplot.subplots(
        3, sharex=True, figsize=(9, 8), layout="constrained", height_ratios=(2, 1, 1)
    )
    for lane, (pid, times) in enumerate(trained.items()):
        lanes.plot(times, [lane] * len(times), "|", color=f"C{lane}")
        lanes.plot([kills[pid] - begin] if pid in kills else [], [lane] * (pid in kills), "xr")
    lanes.set(ylabel="process", title="a mark: a step of this process; x: it was killed")
    when = [max(moment for moment, _ in pairs) for pairs in losses.values()]
    mean = [sum(loss for _, loss in pairs) / len(pairs) for pairs in losses.values()]
    for axes, values, label in ((steps, list(losses), "step"), (curve, mean, "loss")):
        axes.plot(when, values)
        axes.set(ylabel=label)
        for moment in kills.values():
            axes.axvline(moment - begin, color="red", linewidth=0.5)
    curve.set(xlabel="seconds", yscale="log")
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="kill ranks while they train")
    parser.add_argument("--every", type=float, default=2, help="seconds from kill to kill")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    log, picture = options.output / "elastic.jsonl", options.output / "elastic.png"
    log.unlink(missing_ok=True)
    launcher = ["hvdlite-run", "-np", RANKS, "--min-np", FEWEST, sys.executable, EXAMPLE]
    settings = ["--epochs", options.epochs, "--pause", PAUSE, "--log", log]
    with subprocess.Popen([str(word) for word in (*launcher, *settings)]) as job:
        kills = kill_ranks(job, log, options.every)
    if job.returncode:
        sys.exit(job.returncode)
    draw(read(log), kills, picture)
    print(f"{summary(read(log), kills)}\nprocesses, steps and loss over time: {picture}")
