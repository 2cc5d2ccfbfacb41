"""Kill ranks of examples/torch_elastic.py while it trains, and draw what happened.

    python examples/elastic_demo.py

hvdlite-run starts the example with four ranks. Every two seconds this program kills one of them,
unless only two are left or training is about to end; hvdlite-run starts others in their place.
demo-output/elastic.png shows what happened. At the end one process trains alone, and must have the
same parameters after each step, to the bit.
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
    ends = {row["step"]: row["time"] for row in rows}
    repeated = len(rows) - len({(row["pid"], row["step"]) for row in rows})
    longest = max(after - before for before, after in pairwise(sorted(ends.values())))
    joined = len({row["pid"] for row in rows}) - RANKS
    return (
        f"{len(kills)} ranks killed, {joined} joined; {len(ends)} steps: {max(ends) - len(ends)} "
        f"lost, {repeated} done twice; at most {longest:.2f} s from one step to the next"
    )


def draw(rows: list[dict], kills: dict[int, float], picture: Path) -> None:
    """Draw when each process trained, and the steps and the loss of all."""
    from matplotlib.figure import Figure

    begin, trained, last = rows[0]["time"], defaultdict(list), {}
    for row in rows:
        trained[row["pid"]].append(row["time"] - begin)
        last[row["step"]] = row
    figure = Figure(figsize=(9, 8), layout="constrained")
    lanes, steps, curve = figure.subplots(3, sharex=True, height_ratios=(2, 1, 1))
    for lane, (pid, times) in enumerate(trained.items()):
        lanes.plot(times, [lane] * len(times), "|", color=f"C{lane}")
        lanes.plot([kills[pid] - begin] if pid in kills else [], [lane] * (pid in kills), "xr")
    lanes.set(ylabel="process", title="a mark: a step of this process; x: it was killed")
    when = [row["time"] - begin for row in last.values()]
    for axes, label in ((steps, "step"), (curve, "loss")):
        axes.plot(when, [row[label] for row in last.values()])
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
    log, alone = options.output / "elastic.jsonl", options.output / "elastic_alone.jsonl"
    picture = options.output / "elastic.png"
    for file in (log, alone):
        file.unlink(missing_ok=True)
    launcher = ["hvdlite-run", "-np", f"{RANKS}", "--min-np", f"{FEWEST}"]
    training = [sys.executable, EXAMPLE, "--epochs", f"{options.epochs}", "--log"]
    with subprocess.Popen([*launcher, *training, log, "--pause", f"{PAUSE}"]) as job:
        kills = kill_ranks(job, log, options.every)
    if job.returncode:
        sys.exit(job.returncode)
    draw(read(log), kills, picture)
    print(f"{summary(read(log), kills)}\nprocesses, steps and loss over time: {picture}")
    subprocess.run([*training, alone], check=True)
    job_made, made = ({(row["step"], row["sha256"]) for row in read(one)} for one in (log, alone))
    assert job_made == made, "the parameters are not those of one process that nothing disturbs"
    print(f"after each of {len(made)} steps, the SHA-256 of one process alone: {max(made)[1]}")
