"""With `late=` each gradient is in one step, all ranks step alike, and the record can be replayed.

Each rank's gradient of a step has a one in a place of its own in a *tracer* parameter, so that a
result tells which gradients are in it.
"""

from __future__ import annotations

import datetime
import os
import signal
import time
import warnings
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from harness import run_world
from hvdlite.torch import late as late_gradients
from parallel.scenarios import make_tests, on_hosts, run_all
from parallel.torch.small_models import assert_close, raises
from patience import wait_until
from references.late_gradients import train as replay

PRELOAD = ("torch._dynamo",)
STEPS = 24
BOUND = 3
SOON = datetime.timedelta(milliseconds=4)
Included = list[tuple[int, int]]  # rank, and the step of its gradient


def late(**arguments: Any) -> Any:
    return hvd.Late(**{"grace": SOON, "bound": BOUND, **arguments})


class Traced(nn.Module):
    """Two layers and a tracer, which are one bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)
        self.tracer = nn.Parameter(torch.zeros(hvd.size(), 4 * STEPS))

    def included(self) -> dict[tuple[int, int], float]:
        """Return the gradients that are in the last result, and their shares."""
        gradient = torch.zeros(1, 1) if self.tracer.grad is None else self.tracer.grad
        places = gradient.nonzero().tolist()
        return {(rank, step): float(gradient[rank, step]) for rank, step in places}


def loss_of(model: Traced, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1000 * rank + step))
    loss = (model.last(model.first(inputs).tanh()).sum(1) - inputs.sum(1).sin()).square().mean()
    return loss + model.tracer[rank, step]


def hiccups(rank: int, step: int) -> float:
    """Return the seconds that a rank sleeps: another rank in each third step."""
    return 0.03 if step % 3 == 0 and (step // 3) % hvd.size() == rank else 0.0


def always_slow(rank: int, step: int) -> float:
    return 0.01 if rank == hvd.size() - 1 else 0.0


class Run:
    """One training; `steps` has what was in each step."""

    def __init__(self, model: Traced, lateness: Any, **arguments: Any) -> None:
        self.model = model
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.passes = arguments.get("backward_passes_per_step", 1)
        self.optimizer = hvd.DistributedOptimizer(
            sgd, model.named_parameters(), late=lateness, **arguments
        )
        self.steps: list[dict[tuple[int, int], float]] = []
        self.computed: Included = []
        self.bits: list[int] = []

    def go(
        self,
        steps: int = STEPS,
        delay: Callable[[int, int], float] = hiccups,
        careful: bool = True,
        weight_of: Callable[[int, int], float] | None = None,
    ) -> None:
        """Train; a rank that is not careful computes also when it is behind."""
        begin = len(self.steps)
        for step in range(begin, begin + steps):
            self.optimizer.zero_grad()
            if not (careful and self.optimizer.behind):
                time.sleep(delay(hvd.rank(), step))
                if weight_of is not None:
                    self.optimizer.weight = weight_of(hvd.rank(), step)
                for _ in range(self.passes):
                    loss = loss_of(self.model, hvd.rank(), step) / self.passes
                    loss.backward()
                self.computed.append((hvd.rank(), step))
            self.optimizer.step()
            self.steps.append(self.model.included())
            flat = torch.cat([p.detach().flatten() for p in self.model.parameters()])
            self.bits.append(zlib.crc32(flat.numpy().tobytes()))


def check(run: Run, fold: bool = True) -> list[Included]:
    """Check what late gradients promise; return the record."""
    facts = (run.steps, run.computed, run.bits)
    everyone = hvd.allgather_object(facts)
    computed = {one for _, theirs, _ in everyone for one in theirs}
    for steps, _, bits in everyone:
        assert steps == run.steps and bits == run.bits
    seen: set[tuple[int, int]] = set()
    for step, included in enumerate(run.steps):
        assert seen.isdisjoint(included), f"step {step}: {seen.intersection(included)} again"
        seen.update(included)
        for rank, origin in included:
            assert 0 <= step - origin <= (BOUND + 1 if fold else 0), (rank, origin, step)
    assert seen <= computed
    lost = {origin for _, origin in computed - seen}
    assert not fold or not lost or min(lost) >= len(run.steps) - BOUND - 2, lost
    return [sorted(included) for included in run.steps]


def lateness_of(run: Run) -> int:
    """Return how often ranks were late, all together."""
    return sum(row.late for row in run.optimizer.attendance)


def expect(
    run: Run, record: list[Included], near: float = 1e-5, weight_of: Any = lambda rank, step: 1.0
) -> None:
    """Compare with one process that replays the record."""
    model = Traced()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    replay(model, sgd, record, loss_of, weight_of)
    assert_close(list(run.model.parameters()), list(model.parameters()), near)


def scenario_the_record_is_replayed() -> None:
    many_buckets = {"bucket_cap_mb": 1e-6}  # The record is that of the tracer's bucket.
    for arguments in ({}, {"gradient_as_bucket_view": True}, many_buckets):
        for delay, careful in ((hiccups, True), (always_slow, True), (hiccups, False)):
            run = Run(Traced(), late(), **arguments)
            run.go(delay=delay, careful=careful)
            record = check(run)
            for included in run.steps:
                expected = pytest.approx(1.0 / max(len(included), 1))
                assert all(share == expected for share in included.values())
            if arguments is not many_buckets:
                expect(run, record)
            assert lateness_of(run) > 0
            rows = run.optimizer.attendance
            assert [row.rank for row in rows] == list(range(hvd.size()))
            assert rows[hvd.rank()].folded is not None
            assert rows[hvd.rank() - 1].folded is None


def scenario_dropped_gradients_are_in_no_step() -> None:
    with told_of_drop():
        run = Run(Traced(), late(policy="drop"))
    run.go()
    expect(run, check(run, fold=False))
    assert lateness_of(run) > 0


@contextmanager
def told_of_drop() -> Any:
    if hvd.rank() > 0:
        yield
        return
    with pytest.warns(hvd.LateGradientsWarning, match="forgets late gradients"):
        yield


def scenario_late_gradients_keep_their_weight() -> None:
    def weight_of(rank: int, step: int) -> float:
        return 1.0 + (rank + step) % 3

    run = Run(Traced(), late())
    run.go(weight_of=weight_of)
    for included in run.steps:
        total = sum(weight_of(*one) for one in included)
        for one, share in included.items():
            assert share == pytest.approx(weight_of(*one) / total)
    expect(run, check(run), weight_of=weight_of)


def scenario_other_arguments() -> None:
    cases: list[tuple[dict[str, Any], float]] = [
        ({"backward_passes_per_step": 2}, 1e-5),
        ({"gradient_predivide_factor": 2.0}, 1e-5),
        ({"compression": hvd.Compression.bf16}, 5e-2),
        ({"compression": hvd.Compression.fp16}, 1e-2),
    ]
    for arguments, near in cases:
        run = Run(Traced(), late(), **arguments)
        run.go()
        expect(run, check(run), near)


def scenario_the_grace_is_a_share_of_the_measured_step() -> None:
    kept, late_gradients.MEASURED = late_gradients.MEASURED, 4
    try:
        run = Run(Traced(), hvd.Late(grace=0.2, bound=BOUND))
        run.go(steps=4)
        late = run.optimizer._reducer.exchange
        seconds = late.step_seconds
        assert lateness_of(run) == 0 and seconds > 0.0
        assert hvd.allgather(torch.tensor([seconds], dtype=torch.float64)).unique().numel() == 1
        run.go(steps=STEPS)
        expect(run, check(run))
        state = run.optimizer.state_dict()
        torch.optim.SGD(run.model.parameters(), lr=0.1).load_state_dict(state)
        again = Run(Traced(), hvd.Late(grace=0.2, bound=BOUND))
        if hvd.rank() == 0:  # The others get the time from this rank.
            again.optimizer.load_state_dict({**again.optimizer.state_dict(), **state})
        hvd.broadcast_optimizer_state(again.optimizer, root_rank=0)
        again.go(steps=2)
        assert again.optimizer._reducer.exchange._settled
        assert again.optimizer._reducer.exchange.step_seconds == seconds
    finally:
        late_gradients.MEASURED = kept


def scenario_a_rank_that_is_always_late_is_named() -> None:
    kept, late_gradients.REVIEWED = late_gradients.REVIEWED, 5
    try:
        run = Run(Traced(), late(bound=2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.go(steps=20, delay=lambda rank, _: 0.03 * (rank == hvd.size() - 1), careful=False)
        texts = [str(one.message) for one in caught]
        assert bool(texts) == (hvd.rank() == 0), texts
        for text in texts:
            assert f"without a gradient of rank {hvd.size() - 1}" in text
    finally:
        late_gradients.REVIEWED = kept


def scenario_refusals() -> None:
    for arguments, text in [
        ({"quorum": 0.0}, "the share of the ranks for which a step waits"),
        ({"quorum": 1.5}, "the share of the ranks for which a step waits"),
        ({"grace": -0.1}, "give a share of the median step"),
        ({"grace": datetime.timedelta(seconds=-1)}, "give a share of the median step"),
        ({"bound": 0}, "the number of steps that a rank may be behind"),
        ({"policy": "keep"}, "use 'fold' or 'drop'"),
    ]:
        with raises(text):
            hvd.Late(**arguments)

    with raises("give hvd.Late"):
        sgd = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        hvd.DistributedOptimizer(sgd, late=0.5)
    optimizer = Run(Traced(), late()).optimizer
    with raises("with late= a rank that is behind computes nothing"):
        optimizer.step(lambda: None)
    with raises("late= cannot be combined with SyncBatchNorm"):
        hvd.SyncBatchNorm(3)(torch.ones(4, 3))
    del optimizer
    hvd.SyncBatchNorm(3)(torch.ones(4, 3))
    plain = hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    assert plain.behind == 0 and plain.attendance == []


def scenario_ranks_with_other_terms_get_an_error() -> None:
    run = Run(Traced(), late(bound=2 + hvd.rank() % 2))
    with pytest.raises(hvd.MismatchError):
        run.go(steps=1)


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_late_gradients = make_tests(body, on_hosts([0, 0], [0, 1, 1]))


def train_until_the_last_rank(ending: str, folder: str) -> str:
    """Train until the last rank ends in this way; return the error of the others."""
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    late = hvd.Late(grace=datetime.timedelta(milliseconds=1), bound=2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), late=late)
    for step in range(40):
        optimizer.zero_grad()
        if hvd.rank() == 2 and step == 10:
            time.sleep(0.1)  # The others go on, as far as the bound.
            if ending == "death":
                os.kill(os.getpid(), signal.SIGKILL)
            wait_until(lambda: len(list(Path(folder).iterdir())) == 2, "errors of the others")
        try:
            if not optimizer.behind:
                model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
        except hvd.HvdliteError as error:
            (Path(folder) / str(hvd.rank())).touch()
            return f"step {step}: {error}"
    hvd.shutdown()
    return "no error"


@pytest.mark.parametrize("ending", ["death", "stall"])
def test_the_others_get_an_error_at_the_bound(ending: str, tmp_path: Path) -> None:
    # On a crowded machine a rank of the others may be late by a second.
    env = {"HVDLITE_STALL_SHUTDOWN": "5"} if ending == "stall" else {}
    results = run_world(
        3, train_until_the_last_rank, ending, str(tmp_path), env=env, expect_failure=True
    )
    for result in results[:2]:
        assert result.value.startswith("step "), result
        assert "rank 2" in result.value, result.value
