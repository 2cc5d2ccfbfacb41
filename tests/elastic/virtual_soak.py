"""A long test of virtual ranks in elastic jobs: `python tests/elastic/virtual_soak.py --jobs 50`.

Each job begins with 2 to 6 ranks, on one or two hosts. Its workers die at random points of random
steps, or up to 5 ms after these, and others join. All that are left must have the SHA-256 of one
process that nothing disturbs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from elastic.jobs import run_job
from elastic.plans import Fault, Plan
from elastic.test_virtual_deaths import SCRIPT, alone

POINTS = ("forward", "backward", "buffers", "question", "answer", "before step", "after step")
EPOCHS = 3
STEPS = 15  # of 18: a worker that dies at the end of the job would make it fail
JOINERS = 8  # So many workers that join have a fault, too, if they come to it.


def random_job(folder: str, chance: random.Random) -> tuple[int, Plan]:
    """Return the number of ranks of a job, one of which lives on, and its plan."""
    hosts = chance.choice((1, 1, 2))
    ranks = chance.randint(2, 6 if hosts == 1 else 4)
    spared = chance.randrange(ranks)
    # More deaths in one step would be three epochs in a row without a step, which ends a job.
    steps = chance.sample([*range(STEPS)] * 2, ranks + JOINERS)
    faults = [
        Fault(
            worker,
            chance.choice(POINTS),
            step,
            chance.choice(("kill", "soon")),
            chance.uniform(0.0, 0.005),
        )
        for worker, step in enumerate(steps)
        if worker != spared
    ]
    hold_until = chance.randint(1, ranks)
    plan = Plan(
        folder, EPOCHS, tuple(faults), hosts, chance.randint(1, 4), hold_at=4, hold_until=hold_until
    )
    return ranks, plan


def run_random_job(chance: random.Random, expected: str) -> Counter[str]:
    """Run a job, compare the hashes, and count what has happened."""
    with tempfile.TemporaryDirectory() as folder:
        ranks, plan = random_job(folder, chance)
        job = run_job(SCRIPT, ranks, plan, preload=("torch._dynamo",))
        ends = [one.end["hash"] for one in job.journeys.values() if one.end is not None]
        assert ends, plan
        assert {*ends} == {expected}, f"{plan}\n{ends}"
        again = sum(len(one.times("again")) for one in job.journeys.values())
        deaths = sum(len(one.times("fault")) for one in job.journeys.values())
        joined = len(job.journeys) - ranks
        return Counter(jobs=1, deaths=deaths, joined=joined, redone=again, ends=len(ends))


def main() -> int:
    """Run the jobs, and print a JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=50, help="jobs to run (50)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the deaths")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    expected = alone(Plan("", EPOCHS))
    total: Counter[str] = Counter()
    for _ in range(arguments.jobs):
        total += run_random_job(chance, expected)
        print(json.dumps({"soak": "virtual ranks", "seed": arguments.seed, **total}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
