"""Plain gradients are read in one call of the core, and reduced to the bits that others get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import hvdlite.torch as hvd
from hvdlite.torch.collectives import fast_path
from hvdlite.torch.collectives.tensors import spec
from hvdlite.torch.exchange import bucket
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import Branches, backward, gradients, inputs, make, make_model
from parallel.torch.test_torch_fast_path import Watching

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no fast path"
)
PRELOAD = ("torch._dynamo",)


def parameters() -> list[nn.Parameter]:
    """Make parameters with gradients of 1.0."""
    params = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def read(params: list[nn.Parameter], dtype: torch.dtype = torch.float32) -> Any:
    """Read gradients as a bucket does, for tensors of the parameters' shapes and a dtype."""
    tensors = [spec("p", torch.zeros(param.shape, dtype=dtype), None) for param in params]
    return fast_path.read_gradients(params, tensors)


@contextmanager
def counted() -> Iterator[list[bool]]:
    """Note down for each bucket that is submitted whether its gradients were plain."""
    taken: list[bool] = []

    def look(*arguments: Any) -> Any:
        found = before(*arguments)
        taken.append(found is not None)
        return found

    before, bucket.fast_path.read_gradients = bucket.fast_path.read_gradients, look
    try:
        yield taken
    finally:
        bucket.fast_path.read_gradients = before


def scenario_gradients_are_plain() -> None:
    params = parameters()
    found = read(params)
    assert all(one is param.grad for one, param in zip(found.gradients, params, strict=True))
    assert found.first_changed() == -1
    assert read([]) is not None


def scenario_gradients_are_not_plain() -> None:
    class Own(torch.Tensor):
        pass

    unusual: list[Callable[[torch.Tensor], torch.Tensor | None]] = [
        lambda _: None,
        lambda one: torch.ones(3, 2).t() if one.dim() == 2 else None,
        lambda one: one.clone().requires_grad_(),
        lambda one: one.to_sparse(),
        lambda one: one.clone().as_subclass(Own),
        lambda one: torch.zeros_like(one, dtype=torch.complex64).imag,
    ]
    for make_gradient in unusual:
        params = parameters()
        params[0].grad = make_gradient(params[0].grad)
        assert read(params) is None
    params = parameters()
    assert read(params, torch.float64) is None
    assert fast_path.read_gradients(params, []) is None
    with fast_path.off():
        assert read(params) is None
    with Watching():
        assert read(params) is None
    assert read(params) is not None


def scenario_changes_are_found() -> None:
    def write(param: nn.Parameter) -> None:
        param.grad.add_(1)

    def replace(param: nn.Parameter) -> None:
        param.grad = param.grad.clone()

    def move(param: nn.Parameter) -> None:
        param.grad.data = torch.ones_like(param)

    def drop(param: nn.Parameter) -> None:
        param.grad = None

    for change in (write, replace, move, drop):
        for position in (0, 1):
            params = parameters()
            found = read(params)
            change(params[position])
            assert found.first_changed() == position


def scenario_memory_lives_as_long_as_what_was_read() -> None:
    params = parameters()
    storages = [StorageWeakRef(param.grad.untyped_storage()) for param in params]
    found = read(params)
    for param in params:
        param.grad.data = torch.empty(0)
    assert not any(storage.expired() for storage in storages)
    del found
    assert all(storage.expired() for storage in storages)


def trained(**options: Any) -> list[torch.Tensor]:
    """Return the parameters of a model after four steps."""
    model = make_model()
    optimizer = make(model, bucket_cap_mb=1e-4, **options)
    for _ in range(4):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def scenario_both_ways_give_the_same_bits() -> None:
    for options in (
        {},
        {"overlap": False},
        {"op": hvd.Sum},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16},
        {"weight": 1.0 + hvd.rank()},
        {"gradient_predivide_factor": 2.0},
    ):
        with counted() as taken:
            fast = trained(**options)
        assert taken and all(taken), options
        with fast_path.off(), counted() as taken:
            slow = trained(**options)
        assert taken and not any(taken)
        assert all(map(torch.equal, fast, slow)), options


def scenario_a_bucket_returns_to_plain_gradients() -> None:
    """A missing gradient makes one step special, on one rank; the result is everybody's."""
    model = Branches()
    optimizer = make(model)
    for step in range(4):
        optimizer.zero_grad()
        rare = step % 2 == 0 or hvd.rank() == 0
        with counted() as taken:
            (model(inputs(), rare).sum() + 0 * model.never(inputs()).sum()).backward()
        assert set(taken) == {rare}
        found = gradients(model)
        assert len(found) == 6
        for mine in found:
            assert (hvd.allgather(mine.reshape(1, -1)) == mine.reshape(1, -1)).all()
        optimizer.step()


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_plain_gradients = make_tests(body, sizes(1, 2, 3))
