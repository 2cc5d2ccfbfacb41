"""With `late=` each gradient is in one step, all ranks step alike, and the record can be replayed.

Each rank's gradient of a step has a one in a place of its own in a *tracer* parameter, so that a
result tells which gradients are in it.
"""

from __future__ import annotations

import datetime
import time
import warnings
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.torch.optimizers import late_gradients
from parallel.scenarios import make_tests, on_hosts, run_all
from parallel.torch.small_models import assert_close, assert_same_everywhere, raises
from references.late_gradients import train as replay

PRELOAD = ("torch._dynamo",)
STEPS = 24
BOUND = 3
SOON = datetime.timedelta(milliseconds=4)
Included = list[tuple[int, int]]  # rank, and the step of its gradient


def late(**arguments: Any) -> Any:
    return hvd.Late(**{"grace": SOON, "bound": BOUND, **arguments})


class Traced(nn.Module):
    """Two layers, each with a tracer that is reduced in the bucket of its layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)
        self.tracers = nn.ParameterList(
            nn.Parameter(torch.zeros(hvd.size(), 4 * STEPS)) for _ in range(2)
        )

    def groups(self) -> list[list[torch.Tensor]]:
        """Return the parameters of each bucket."""
        layers = zip((self.first, self.last), self.tracers, strict=True)
        return [[*layer.parameters(), tracer] for layer, tracer in layers]

    def included(self) -> list[dict[tuple[int, int], float]]:
        """Return, by bucket, the gradients that are in the last result, and their shares."""
        found = []
        for tracer in self.tracers:
            gradient = torch.zeros(1, 1) if tracer.grad is None else tracer.grad
            places = gradient.nonzero().tolist()
            found.append({(rank, step): float(gradient[rank, step]) for rank, step in places})
        return found


def loss_of(model: Traced, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1000 * rank + step))
    loss = (model.last(model.first(inputs).tanh()).sum(1) - inputs.sum(1).sin()).square().mean()
    return loss + torch.stack([tracer[rank, step] for tracer in model.tracers]).sum()


def hiccups(rank: int, step: int) -> float:
    """Return the seconds that a rank sleeps: another rank in each third step."""
    return 0.03 if step % 3 == 0 and (step // 3) % hvd.size() == rank else 0.0


def always_slow(rank: int, step: int) -> float:
    return 0.01 if rank == hvd.size() - 1 else 0.0


class Run:
    """One training; `steps` has what was in each step, by bucket."""

    def __init__(self, model: Traced, lateness: Any, **arguments: Any) -> None:
        self.model = model
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.passes = arguments.get("backward_passes_per_step", 1)
        self.optimizer = hvd.DistributedOptimizer(
            sgd, model.named_parameters(), groups=model.groups(), late=lateness, **arguments
        )
        self.steps: list[list[dict[tuple[int, int], float]]] = []
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
    """Check what late gradients promise; return the record of the first bucket."""
    facts = (run.steps, run.computed, run.bits)
    everyone = hvd.allgather_object(facts)
    computed = {one for _, theirs, _ in everyone for one in theirs}
    for steps, _, bits in everyone:
        assert steps == run.steps and bits == run.bits
    for bucket in range(2):
        seen: set[tuple[int, int]] = set()
        for step, parts in enumerate(run.steps):
            included = parts[bucket]
            assert seen.isdisjoint(included), f"step {step}: {seen.intersection(included)} again"
            seen.update(included)
            for rank, origin in included:
                assert 0 <= step - origin <= (BOUND + 1 if fold else 0), (rank, origin, step)
            if not fold:
                assert all(origin == step for _, origin in included)
        assert seen <= computed
        lost = {origin for _, origin in computed - seen}
        assert not fold or not lost or min(lost) >= len(run.steps) - BOUND - 2, lost
    return [sorted(parts[0]) for parts in run.steps]


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


def one_bucket(record: list[Included], run: Run) -> bool:
    """Whether both buckets have the same gradients, so that one record tells all."""
    return all(sorted(parts[1]) == one for parts, one in zip(run.steps, record, strict=True))


def scenario_the_record_is_replayed() -> None:
    for delay in (hiccups, always_slow):
        for arguments in ({}, {"gradient_as_bucket_view": True}):
            run = Run(Traced(), late(), **arguments)
            run.go(delay=delay)
            record = check(run)
            for parts in run.steps:
                for included in parts:
                    expected = pytest.approx(1.0 / max(len(included), 1))
                    assert all(share == expected for share in included.values())
            if one_bucket(record, run):
                expect(run, record)
            assert lateness_of(run) > 0


def scenario_one_bucket_is_always_replayed() -> None:
    for careful in (True, False):
        model = Traced()
        run = Run(model, late())
        run.optimizer = None
        run.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), late=late(), num_groups=1
        )
        run.go(careful=careful)
        expect(run, check(run))
        rows = run.optimizer.attendance
        assert [row.rank for row in rows] == list(range(hvd.size()))
        assert rows[hvd.rank()].folded is not None
        assert rows[hvd.rank() - 1].folded is None


def scenario_dropped_gradients_are_in_no_step() -> None:
    with told_of_drop():
        run = Run(Traced(), late(policy="drop"))
    run.go()
    record = check(run, fold=False)
    if one_bucket(record, run):
        expect(run, record)
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
    record = check(run)
    for parts in run.steps:
        total = sum(weight_of(*one) for one in parts[0])
        for one, share in parts[0].items():
            assert share == pytest.approx(weight_of(*one) / total)
    if one_bucket(record, run):
        expect(run, record, weight_of=weight_of)


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
        record = check(run)
        if one_bucket(record, run):
            expect(run, record, near)


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
        record = check(run)
        if one_bucket(record, run):
            expect(run, record)
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


def scenario_sparse_gradients_become_dense() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(6, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), late=late())
    for step in range(8):
        optimizer.zero_grad()
        if not optimizer.behind:
            time.sleep(hiccups(hvd.rank(), step))
            table(torch.tensor([hvd.rank(), step % 6])).square().sum().backward()
        optimizer.step()
        assert table.weight.grad is None or not table.weight.grad.is_sparse
    assert_same_everywhere(table)


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

    def refused(text: str, **arguments: Any) -> None:
        sgd = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        with raises(text):
            hvd.DistributedOptimizer(sgd, **{"late": late(), **arguments})

    refused("give hvd.Late", late=0.5)
    for op in (hvd.Sum, hvd.Adasum):
        refused("late= cannot be combined with op=hvd.", op=op)
    model = Traced()
    with raises("ShardedOptimizer cannot be combined with late="):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        hvd.ShardedOptimizer(sgd, late=late())
    optimizer = Run(model, late()).optimizer
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
