"""Sparse gradients in PyTorch: gathered by rows, always equal to the dense mean."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, on_hosts, run_all
from parallel.torch.small_models import assert_close, assert_same_everywhere, counters, raises

PRELOAD = ("torch._dynamo",)
ROWS, WIDTH = 50, 3


def sparse_of(rank: int, entries: int = 4, seed: int = 0) -> torch.Tensor:
    """Make a rank's sparse tensor; an index occurs twice."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    index = torch.randint(0, ROWS, (entries,), generator=generator)
    index[-1:] = index[:1]
    values = torch.randn(entries, WIDTH, generator=generator, dtype=torch.float64)
    return torch.sparse_coo_tensor(index.unsqueeze(0), values, (ROWS, WIDTH))


def scenario_sparse_allreduce() -> None:
    for entries in (4, 0, None):
        counts = [rank if entries is None else entries for rank in range(hvd.size())]
        tensors = [sparse_of(rank, count) for rank, count in enumerate(counts)]
        total = sum(tensor.to_dense() for tensor in tensors)
        mine = tensors[hvd.rank()]
        handle = hvd.sparse_allreduce_async(mine, "named", hvd.Sum)
        result = hvd.synchronize(handle)
        assert result.is_sparse and result.is_coalesced()
        assert_close([result.to_dense()], [total])
        assert handle() is result
        mean = hvd.sparse_allreduce_async(mine, op=hvd.Average, prescale_factor=2.0)()
        assert_close([mean.to_dense()], [2 * total / hvd.size()])


def scenario_tensors_of_several_sparse_dimensions_and_types() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64):
        dense = torch.eye(4).to(dtype) * (hvd.rank() + 1)
        result = hvd.sparse_allreduce_async(dense.to_sparse(), op=hvd.Sum)()
        expected = torch.eye(4).to(dtype) * sum(range(1, hvd.size() + 1))
        assert result.dtype == dtype and torch.equal(result.to_dense(), expected)


def scenario_misuse_says_what_to_do() -> None:
    with raises("is not a sparse"):
        hvd.sparse_allreduce_async(torch.ones(2))
    with raises("op=hvd.Max cannot be gathered"):
        hvd.sparse_allreduce_async(torch.ones(2).to_sparse(), op=hvd.Max)


def make_table(rows: int = ROWS) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(rows, WIDTH, sparse=True)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.SparseAdam(list(params), lr=0.1),
}


def words_of(rank: int, step: int, count: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, rows, (count,), generator=generator)


def loss_of(table: nn.Embedding, words: torch.Tensor) -> torch.Tensor:
    """Use some words; every third one has no effect on the loss, so its row is zero."""
    return (table(words).sin().square() * (words % 3 > 0).unsqueeze(-1)).sum()


def plain_training(
    kind: str, steps: int, count: int, rows: int, weights: list[float], idle: Any
) -> torch.Tensor:
    """Train in one process with the (weighted) mean of the ranks' gradients, made sparse."""
    table = make_table(rows)
    optimizer = OPTIMIZERS[kind](table.parameters())
    for step in range(steps):
        gradients = torch.zeros_like(table.weight)
        touched = torch.zeros(rows, dtype=torch.bool)
        for rank, weight in enumerate(weights):
            if idle(rank, step):
                continue
            words = words_of(rank, step, count, rows)
            optimizer.zero_grad()
            loss_of(table, words).backward()
            gradients += table.weight.grad.to_dense() * weight / sum(weights)
            touched[words] |= weight > 0
        index = touched.nonzero().t()
        if index.numel() == 0:
            continue
        table.weight.grad = torch.sparse_coo_tensor(index, gradients[index[0]], gradients.shape)
        optimizer.step()
    return table.weight.detach()


def train(
    kind: str, steps: int, count: int, rows: int, weight: float | None, idle: Any, **arguments: Any
) -> torch.Tensor:
    table = make_table(rows)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](table.parameters()), table.named_parameters(), **arguments
    )
    optimizer.weight = weight
    for step in range(steps):
        optimizer.zero_grad()
        if not idle(hvd.rank(), step):
            loss_of(table, words_of(hvd.rank(), step, count, rows)).backward()
        optimizer.step()
        assert table.weight.grad is None or table.weight.grad.is_sparse
    assert_same_everywhere(table)
    return table.weight.detach()


def scenario_training_equals_that_of_one_process() -> None:
    for kind in OPTIMIZERS:
        for count, rows in ((3, 200), (40, 20)):  # rows of few and of all words
            plain = plain_training(kind, 5, count, rows, [1.0] * hvd.size(), lambda *_: False)
            ours = train(kind, 5, count, rows, None, lambda *_: False)
            assert_close([ours], [plain])
    for count, rows in ((3, 200), (40, 20)):  # SparseAdam takes no other gradients
        plain = plain_training("adam", 3, count, rows, [1.0] * hvd.size(), lambda *_: False)
        ours = train("adam", 3, count, rows, None, lambda *_: False, sparse_as_dense=True)
        assert_close([ours], [plain])


def scenario_ranks_without_a_gradient_give_no_rows() -> None:
    def idle(rank: int, step: int) -> bool:
        return (rank + step) % hvd.size() == 0 or step == 3

    for count, rows in ((3, 200), (40, 20)):
        plain = plain_training("adam", 6, count, rows, [1.0] * hvd.size(), idle)
        assert_close([train("adam", 6, count, rows, None, idle)], [plain])


def scenario_weights() -> None:
    weights = [float(rank) for rank in range(hvd.size())] if hvd.size() > 1 else [2.0]
    # Adam also moves a row whose gradient is zero, if it had another one before.
    for kind, (count, rows) in itertools.product(OPTIMIZERS, ((3, 200), (4, 60), (40, 20))):
        plain = plain_training(kind, 12, count, rows, weights, lambda *_: False)
        ours = train(kind, 12, count, rows, weights[hvd.rank()], lambda *_: False)
        assert_close([ours], [plain])


def scenario_predivide_and_compression() -> None:
    plain = plain_training("sgd", 3, 3, 200, [1.0] * hvd.size(), lambda *_: False)
    divided = train("sgd", 3, 3, 200, None, lambda *_: False, gradient_predivide_factor=4.0)
    assert_close([divided], [plain])
    narrow = train("sgd", 3, 3, 200, None, lambda *_: False, compression=hvd.Compression.fp16)
    assert_close([narrow], [plain], rtol=1e-2)


def scenario_rows_are_what_is_sent_from_the_second_step_on() -> None:
    table = make_table(5000)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](table.parameters()))
    sizes = []
    for step in range(3):
        before = counters()["bytes"]
        optimizer.zero_grad()
        loss_of(table, words_of(hvd.rank(), step, 3, 5000)).backward()
        optimizer.step()
        hvd.barrier()
        sizes.append(counters()["bytes"] - before)
    dense = table.weight.numel() * 4
    assert sizes[0] >= dense and max(sizes[1:]) < 100


def scenario_dense_and_sparse_parameters_in_one_bucket() -> None:
    for view in (False, True):
        check_one_bucket(view)


def check_one_bucket(view: bool) -> None:
    torch.manual_seed(0)
    table, layer = nn.Embedding(200, WIDTH, sparse=True), nn.Linear(WIDTH, 2)
    params = [*table.parameters(), *layer.parameters()]
    sgd = torch.optim.SGD(params, lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, gradient_as_bucket_view=view)

    def loss(rank: int, step: int) -> torch.Tensor:
        return layer(table(words_of(rank, step, 4, 200))).square().sum()

    for step in range(4):
        expected = [torch.zeros_like(param) for param in params]
        for rank in range(hvd.size()):
            for total, one in zip(
                expected, torch.autograd.grad(loss(rank, step), params), strict=True
            ):
                total += one.to_dense() / hvd.size()
        optimizer.zero_grad()
        loss(hvd.rank(), step).backward()
        optimizer.synchronize()
        assert_close([param.grad.to_dense() for param in params], expected)
        optimizer.step()


def scenario_layouts_are_what_backward_made() -> None:
    table = make_table()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](table.parameters()))
    table.weight.grad = torch.full_like(table.weight, float(hvd.rank()))
    optimizer.synchronize()
    assert table.weight.grad.layout == torch.strided
    assert_close([table.weight.grad], [torch.full((ROWS, WIDTH), (hvd.size() - 1) / 2)])
    for step in range(2):
        optimizer.zero_grad()
        mean = sum(gradient_of(table, rank, step) for rank in range(hvd.size())) / hvd.size()
        loss_of(table, words_of(hvd.rank(), step, 3, ROWS)).backward()
        optimizer.synchronize()
        assert table.weight.grad.is_sparse
        assert_close([table.weight.grad.to_dense()], [mean])


def scenario_rows_of_zeros_arrive_from_the_second_step_on() -> None:
    for rows, count in ((1000, 3), (8, 3)):
        table = make_table(rows)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](table.parameters()))
        for step in range(4):
            optimizer.zero_grad()
            every = [words_of(rank, step, count, rows) for rank in range(hvd.size())]
            idle = step == 2  # then only the last rank has a gradient
            if not idle or hvd.rank() == hvd.size() - 1:
                (0 * table(every[hvd.rank()]).sum()).backward()
            optimizer.step()
            expected = torch.cat(every[-1:] if idle else every).unique() if step else torch.ones(0)
            assert table.weight.grad.is_coalesced() and table.weight.grad.values().sum() == 0
            assert table.weight.grad.indices().flatten().tolist() == expected.tolist(), step


def scenario_several_sparse_dimensions_in_the_optimizer() -> None:
    for size in (3, 40):
        weight = nn.Parameter(torch.zeros(size, 4))
        optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam([weight]))
        for step in range(4):
            weight.grad = None
            if hvd.rank() == hvd.size() - 1 or step == 1:
                weight.grad = torch.eye(size, 4).to_sparse()
            optimizer.step()
            part = 1.0 if step == 1 else 1 / hvd.size()
            assert weight.grad.sparse_dim() == 2 and weight.grad._nnz() == min(size, 4)
            assert_close([weight.grad.to_dense()], [part * torch.eye(size, 4)])


def scenario_dense_here_and_sparse_there() -> None:
    for size in (6, 400):
        weight = nn.Parameter(torch.zeros(size, 2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0))
        mine = torch.zeros(size, 2)
        mine[2 * hvd.rank()] = 1.0
        for _ in range(3):
            weight.grad = mine.clone() if hvd.rank() == 0 else mine.to_sparse(1)
            optimizer.step()
            assert weight.grad.is_sparse == (hvd.size() > 1)
            expected = hvd.allreduce(mine)
            assert_close([weight.grad.to_dense()], [expected])
            if weight.grad.is_sparse:
                assert weight.grad.indices().flatten().tolist() == list(range(0, 2 * hvd.size(), 2))


def gradient_of(table: nn.Embedding, rank: int, step: int) -> torch.Tensor:
    words = words_of(rank, step, 3, len(table.weight))
    (gradient,) = torch.autograd.grad(loss_of(table, words), [table.weight])
    return gradient.to_dense()


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.enable()
    return run_all(globals())


test_sparse = make_tests(body, on_hosts([0], [0, 0], [0, 0, 1]))
