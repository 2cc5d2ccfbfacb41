"""Compression.int8 gives the bits of its reference on all ranks, and packs between hosts alone."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite import ops
from parallel.scenarios import make_tests, on_hosts, run_all
from parallel.torch.small_models import assert_same_everywhere, counters, make, raises
from references.int8_between_hosts import allreduce as reference

PRELOAD = ("torch._dynamo",)
INT8 = hvd.Compression.int8
SHAPES = [(3, 300), (1,), (256,), (0,), (257,), (40, 70)]


@functools.cache
def hosts() -> list[int]:
    names = hvd.allgather_object(os.environ["HVDLITE_HOST_ID"])
    return [sorted(set(names)).index(name) for name in names]


def tensors_of(rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(rank)
    made = [torch.randn(shape, generator=numbers) * 10.0**i for i, shape in enumerate(SHAPES)]
    return [one.to(dtype) for one in made]


def expected(all_ranks: Sequence[Sequence[torch.Tensor]], **how: Any) -> list[torch.Tensor]:
    """Reduce the tensors of all ranks, one after the other."""
    place = hosts()
    return [
        torch.from_numpy(reference([one.detach().numpy() for one in column], place, **how))
        for column in zip(*all_ranks, strict=True)
    ]


def assert_equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.detach(), b), (a, b)


def bytes_to_other_hosts() -> int:
    return counters()["bytes_to_other_hosts"]


def scenario_bits_of_the_reference() -> None:
    everyone = [tensors_of(rank) for rank in range(hvd.size())]
    mine = everyone[hvd.rank()]
    means = expected(everyone)
    assert_equal(hvd.grouped_allreduce(mine, compression=INT8), means)
    # One by one: nothing depends on what else travels.
    assert_equal([hvd.allreduce(one, compression=INT8()) for one in mine], means)
    sums = expected(everyone, average=False, postscale=0.3)
    ours = [hvd.allreduce(m, op=hvd.Sum, postscale_factor=0.3, compression=INT8) for m in mine]
    assert_equal(ours, sums)
    weights = [1.0 + rank for rank in range(hvd.size())]
    shares = [weight / sum(weights) for weight in weights]
    weighted = hvd.grouped_allreduce(mine, compression=INT8, weight=weights[hvd.rank()])
    assert_equal(weighted, expected(everyone, average=False, shares=shares))


def scenario_other_types() -> None:
    everyone = [tensors_of(rank, torch.float64) for rank in range(hvd.size())]
    exact = [sum(column) / hvd.size() for column in zip(*everyone, strict=True)]
    for dtype in (torch.float16, torch.bfloat16):
        mine = [one.to(dtype) for one in everyone[hvd.rank()][:3]]
        for ours, mean in zip(hvd.grouped_allreduce(mine, compression=INT8), exact, strict=False):
            assert ours.dtype == dtype
            most = max(float(one.abs().max()) for column in everyone for one in column[:3])
            assert float((ours.double() - mean).abs().max()) < 0.03 * most
            for theirs in hvd.allgather(ours.unsqueeze(0)):
                assert torch.equal(theirs, ours)
    for ours, mean in zip(
        hvd.grouped_allreduce(everyone[hvd.rank()], compression=INT8), exact, strict=True
    ):
        assert torch.allclose(ours, mean, rtol=1e-12)
    whole = torch.arange(1000) + hvd.rank()
    assert torch.equal(
        hvd.allreduce(whole, op=hvd.Sum, compression=INT8),
        hvd.size() * torch.arange(1000) + sum(range(hvd.size())),
    )


def scenario_infinities_do_not_vanish() -> None:
    packs = len(set(hosts())) > 1
    for culprit in range(hvd.size()):
        for value in (float("inf"), float("nan")):
            tensor = torch.ones(600)
            if hvd.rank() == culprit:
                tensor[300] = value
            mean = hvd.allreduce(tensor, compression=INT8)
            assert not mean[256:512].isfinite().all()
            assert not (packs and mean[256:512].isfinite().any())
            assert torch.equal(mean[:256], torch.ones(256)) and mean[512:].isfinite().all()


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 70), nn.Tanh(), nn.Linear(70, 11)).to(dtype)


def backward(model: nn.Module, rank: int, step: int) -> None:
    numbers = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(12, 9, generator=numbers).to(next(model.parameters()).dtype)
    (model(x) - rank).square().mean().backward()


def gradients_of(model: nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    copy = nn.Sequential(nn.Linear(9, 70), nn.Tanh(), nn.Linear(70, 11))
    copy.load_state_dict(model.state_dict())
    backward(copy, rank, step)
    return [param.grad for param in copy.parameters() if param.grad is not None]


def scenario_optimizer() -> None:
    for arguments in (
        {},
        {"bucket_cap_mb": 0.001},
        {"gradient_as_bucket_view": True},
        {"num_groups": 1},
        {"gradient_predivide_factor": 2.0},
        {"op": hvd.Sum},
    ):
        model = model_of()
        optimizer = make(model, lr=0.01, compression=INT8, **arguments)
        for step in range(3):
            everyone = [gradients_of(model, rank, step) for rank in range(hvd.size())]
            how: dict[str, Any] = {"average": arguments.get("op") is not hvd.Sum}
            if "gradient_predivide_factor" in arguments:
                shares = [0.5] * hvd.size()
                how = {"average": False, "shares": shares, "postscale": 2.0 / hvd.size()}
            optimizer.zero_grad()
            backward(model, hvd.rank(), step)
            means = expected(everyone, **how)
            if "gradient_predivide_factor" in arguments:
                for param, mean in zip(model.parameters(), means, strict=True):
                    assert param.grad is not None
                    assert torch.allclose(param.grad, mean, rtol=1e-5, atol=1e-7)
            else:
                assert_equal([p.grad for p in model.parameters() if p.grad is not None], means)
            optimizer.step()
        assert_same_everywhere(model)


def scenario_optimizers_of_other_kinds() -> None:
    model = model_of(torch.bfloat16)
    optimizer = make(model, compression=INT8, weight=1.0 + hvd.rank())
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            backward(model, hvd.rank(), step)
        backward(model, hvd.rank(), 7 + step)
        optimizer.step()
    assert_same_everywhere(model)


def scenario_sparse_gradients() -> None:
    tables = []
    for compression in (INT8, hvd.Compression.none):
        torch.manual_seed(1)
        table = nn.Embedding(50, 4, sparse=True)
        sgd = torch.optim.SGD(table.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, table.named_parameters(), compression=compression)
        for step in range(4):
            optimizer.zero_grad()
            table(torch.tensor([hvd.rank(), step])).square().sum().backward()
            optimizer.step()
        assert_same_everywhere(table)
        tables.append(table.weight.detach())
    # The first step sends the rows dense, and so packed.
    assert torch.allclose(*tables, atol=0.01)


def scenario_a_quarter_of_the_bytes_between_hosts() -> None:
    def sent(compression: Any) -> int:
        model = nn.Linear(300, 100)
        optimizer = make(model, compression=compression)
        totals = []
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
            totals.append(bytes_to_other_hosts())
        return totals[2] - totals[1]

    exact, packed = sent(hvd.Compression.none), sent(INT8)
    if len(set(hosts())) == 1:
        assert exact == packed == 0
    assert packed <= 0.27 * exact


def scenario_a_rank_has_joined() -> None:
    if hvd.rank() > 0:
        mean = hvd.allreduce(torch.full((300,), 4.0), name="uneven", compression=INT8)
        assert torch.allclose(mean, torch.full((300,), 4.0), rtol=1e-6)
    hvd.join()


def scenario_refusals() -> None:
    for op in (hvd.Min, hvd.Max, hvd.Product):
        name = ops.op_name(op).lower()
        with raises(f"int8 between hosts goes with an allreduce by .*, not with .* by {name}"):
            hvd.allreduce(torch.ones(3), name="refused", op=op, compression=INT8)
    for refused in (
        lambda: hvd.allreduce(torch.ones(3), op=hvd.Adasum, compression=INT8),
        lambda: hvd.reducescatter(torch.ones(8), compression=INT8),
    ):
        with raises("Compression.int8 packs what an allreduce by hvd.Average or hvd.Sum sends"):
            refused()
    compression = INT8 if hvd.rank() else hvd.Compression.none
    with raises("ranks disagree about the wire dtype: rank .* has int8"):
        hvd.allreduce(torch.ones(3), name="other", compression=compression)


def scenario_float32_blocks_of_small_numbers_are_zeros() -> None:
    tiny = np.float32(2.0**-130)
    mean = hvd.allreduce(torch.full((300,), float(tiny)), compression=INT8)
    assert float(mean.max()) == (0.0 if len(set(hosts())) > 1 else tiny)


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals(), hvd.init)


test_int8 = make_tests(body, on_hosts([0, 0], [0, 1, 1], [0, 1, 0, 2]))
