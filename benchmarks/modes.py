"""Measure modes that do not wait for slow ranks, beside synchronous training in the same run.

    python benchmarks/modes.py --np 8 > modes.jsonl

The ranks train a small network on real digits, and their compute is a sleep, so that more ranks
than cores do not distort it. In units of a step's compute, with 5 % of noise, ranks are late by

- `hiccup`: 4 % of the steps of a rank take longer by a time from Exp(1);
- `tail`: a step takes 0.7 and a time from Exp(0.3);
- `slow`: rank 0 takes 1.5 times as long.

Each mode is trained in turns with synchronous training:

- `localsgd`: `hvd.LocalSGD(every=16)`;
- `late`: `late=hvd.Late()`, which measures the first 20 steps, and waits in them.

`step_ms` is the mean step. `effective_speed_up` is the share of the samples that was used, times
the synchronous step, divided by the mode's. `late` is the share of the gradients that came late, in
modes that have them. `loss` is that of the training data at the end, and
`accuracy` that of digits that were held out, in percent.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from workers import add_common_arguments, print_row, run_ranks

MODES = ("localsgd", "late")
DELAYS = ("hiccup", "tail", "slow")
TRAINED = 1440  # The model trains on so many digits.
BATCH = 8  # A rank's batch has so many samples.
EVERY = 16
ROUND = 2 * EVERY  # A turn has so many steps.

Batch = tuple[torch.Tensor, torch.Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--mode", choices=MODES, help="this one only")
    parser.add_argument("--delay", choices=DELAYS, help="this one only")
    parser.add_argument("--steps", type=int, default=448, help="of each contestant (448)")
    parser.add_argument("--step-ms", type=float, default=40.0, help="compute of a step (40)")
    arguments = parser.parse_args()
    if not arguments.worker:
        passed_on = ["--quick"] * arguments.quick
        for name in ("mode", "delay", "steps", "step_ms"):
            value = getattr(arguments, name)
            passed_on += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
        return run_ranks(__file__, arguments.np, arguments.output, passed_on)
    measure_all(arguments)
    return 0


def measure_all(arguments: argparse.Namespace) -> None:
    """Run one rank: let each mode take turns with synchronous training, print rows on rank 0."""
    import hvdlite.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    seconds = arguments.step_ms / 1000
    if arguments.quick:
        arguments.steps, seconds = ROUND, 0.004
    for delay in [arguments.delay] if arguments.delay else DELAYS:
        for mode in [arguments.mode] if arguments.mode else MODES:
            contestants = [Synchronous(hvd, delay, seconds), CONTESTANTS[mode](hvd, delay, seconds)]
            for _ in range(math.ceil(arguments.steps / ROUND)):
                for one in contestants:
                    one.take_turn()
            figures = [one.figures() for one in contestants]
            if hvd.rank() == 0:
                synchronous, own = figures
                faster = synchronous["step_ms"] / own["step_ms"]
                row = {
                    "benchmark": "modes",
                    "mode": mode,
                    "delay": delay,
                    "np": hvd.size(),
                    "steps": contestants[0].steps,
                    "effective_speed_up": round(own["share_done"] * faster, 3),
                    **own,
                    **{f"synchronous_{key}": value for key, value in synchronous.items()},
                }
                print_row(row)
    hvd.shutdown()


class Synchronous:
    """Training as usual; the modes override a step."""

    def __init__(self, hvd: Any, delay: str, seconds: float) -> None:
        self.hvd = hvd
        self.steps = 0
        self._seconds = 0.0  # The slowest rank took so long in all turns.
        self._compute = compute_times(delay, seconds, hvd.rank())
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        images, digits = load_digits(return_X_y=True)
        self._images = torch.tensor(images, dtype=torch.float32) / 16
        self._digits = torch.tensor(digits)
        self.batches = self._draw()
        self.optimizer = self.make(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))

    def make(self, optimizer: torch.optim.Optimizer) -> Any:
        """Distribute the optimizer."""
        return self.hvd.DistributedOptimizer(optimizer)

    def _draw(self) -> Iterator[Batch]:
        """Draw batches at random, other ones on each rank."""
        generator = torch.Generator().manual_seed(1 + self.hvd.rank())
        while True:
            chosen = torch.randint(TRAINED, (BATCH,), generator=generator)
            yield self._images[chosen], self._digits[chosen]

    def take_turn(self) -> None:
        """Make some steps, and time them."""
        self.hvd.barrier()
        begin = time.perf_counter()
        for _ in range(ROUND):
            self.optimizer.zero_grad()
            self.step()
            self.steps += 1
        passed = torch.tensor(time.perf_counter() - begin)
        self._seconds += float(self.hvd.allreduce(passed, op=self.hvd.Max, name="passed"))

    def step(self) -> None:
        """Train on a batch."""
        self.learn(next(self._compute))
        self.optimizer.step()

    def learn(self, compute: float) -> None:
        """Compute the gradient of a batch, in so many seconds."""
        time.sleep(compute)
        images, digits = next(self.batches)
        nn.functional.cross_entropy(self.model(images), digits).backward()

    def share_done(self) -> float:
        """Return the share of the samples that counted."""
        return 1.0

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """Return what this contestant has reached; every rank calls it."""
        results = self.model(self._images)
        loss = nn.functional.cross_entropy(results[:TRAINED], self._digits[:TRAINED])
        right = results[TRAINED:].argmax(1) == self._digits[TRAINED:]
        return {
            "step_ms": round(1000 * self._seconds / self.steps, 2),
            "share_done": round(self.share_done(), 3),
            "loss": round(float(loss), 4),
            "accuracy": round(100 * float(right.float().mean()), 1),
        }


class LocalSGD(Synchronous):
    """Ranks average parameters, once in so many steps."""

    def make(self, optimizer: torch.optim.Optimizer) -> Any:
        """Let the optimizer average."""
        return self.hvd.LocalSGD(optimizer, every=EVERY)


class LateGradients(Synchronous):
    """Steps go on without ranks that are late."""

    _computed = 0  # It counts steps.

    def make(self, optimizer: torch.optim.Optimizer) -> Any:
        """Let the optimizer leave out who is late."""
        return self.hvd.DistributedOptimizer(optimizer, late=self.hvd.Late())

    def step(self) -> None:
        """Train on a batch, unless the others are ahead."""
        compute = next(self._compute)
        if not self.optimizer.behind:
            self._computed += 1
            self.learn(compute)
        self.optimizer.step()

    def share_done(self) -> float:
        """Return the share of the steps for which a rank has computed a gradient."""
        share = torch.tensor(self._computed / self.steps)
        return float(self.hvd.allreduce(share, name="computed"))

    def figures(self) -> dict[str, float]:
        """Return what this contestant has reached; every rank calls it."""
        late = sum(row.late for row in self.optimizer.attendance)
        return {**super().figures(), "late": round(late / self.steps / self.hvd.size(), 3)}


CONTESTANTS = {"localsgd": LocalSGD, "late": LateGradients}


def compute_times(delay: str, seconds: float, rank: int) -> Iterator[float]:
    """Draw the seconds of compute of one step after the other."""
    draw = random.Random(rank)
    while True:
        units = draw.lognormvariate(0.0, 0.05)
        if delay == "hiccup" and draw.random() < 0.04:
            units += draw.expovariate(1.0)
        elif delay == "tail":
            units *= 0.7 + draw.expovariate(1 / 0.3)
        elif delay == "slow" and rank == 0:
            units *= 1.5
        yield seconds * units


if __name__ == "__main__":
    sys.exit(main())
