"""Adasum on torch tensors and in the optimizer, against a plain computation with numpy."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from numpy.typing import NDArray

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, on_hosts, run_all
from parallel.torch.small_models import (
    Evaluating,
    assert_close,
    assert_same_everywhere,
    inputs,
    make_model,
    raises,
)

PRELOAD = ("torch._dynamo",)
Array = NDArray[np.float64]


def pair(a: Array, b: Array) -> Array:
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b


def adasum(vectors: list[Array]) -> Array:
    while len(vectors) > 1:
        odd = [vectors[-1]] if len(vectors) % 2 else []
        pairs = zip(vectors[::2], vectors[1::2], strict=False)
        vectors = [pair(a, b) for a, b in pairs] + odd
    return vectors[0]


def array_of(rank: int, shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng([rank, seed]).standard_normal(shape)


def expected(shape: tuple[int, ...], seed: int = 0, size: int | None = None) -> Array:
    return adasum([array_of(rank, shape, seed) for rank in range(size or hvd.size())])


def close(ours: torch.Tensor, theirs: Array, tolerance: float) -> bool:
    return bool(np.allclose(ours.double().numpy(), theirs, rtol=tolerance, atol=tolerance))


def scenario_scales_and_compression() -> None:
    tensor = torch.from_numpy(array_of(hvd.rank(), (9,))).float()
    scaled = hvd.allreduce(tensor, op=hvd.Adasum, prescale_factor=0.5, postscale_factor=4.0)
    assert close(scaled, 2 * expected((9,)), 1e-5)
    narrow = hvd.allreduce(tensor, op=hvd.Adasum, compression=hvd.Compression.fp16)
    assert narrow.dtype == torch.float32 and close(narrow, expected((9,)), 1e-2)


def scenario_misuse_says_what_to_do() -> None:
    plain = torch.optim.SGD(make_model().parameters())
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.Adasum)
    with raises("call step\\(\\) alone"), optimizer.skip_synchronize():
        pass
    with raises("Adasum combines whole tensors"):
        hvd.reducescatter(torch.ones(2), op=hvd.Adasum)
    with raises("a weight goes with"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum, weight=1.0)
    tensor = torch.ones(2, requires_grad=True)
    with raises("has no gradient"):
        hvd.allreduce(tensor, op=hvd.Adasum).sum().backward()
    model = make_model()
    with raises("op=hvd.Adasum cannot be combined with Evaluating: its eval.* use op=hvd.Average"):
        hvd.DistributedOptimizer(Evaluating(model.parameters()), op=hvd.Adasum)

    class MovesFrozen(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            super().step(closure)
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(0.9)

    model[0].weight.requires_grad_(False)
    sgd = MovesFrozen(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), op=hvd.Adasum)
    model(inputs()).square().sum().backward()
    text = "MovesFrozen has changed 0.weight, which is frozen and has no gradient"
    with raises(text) if hvd.size() > 1 else contextlib.nullcontext():
        optimizer.step()


def scenario_lbfgs_moves_a_layer_that_is_frozen_later() -> None:
    model = make_model()
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    optimizer = hvd.DistributedOptimizer(lbfgs, model.named_parameters(), op=hvd.Adasum)
    for step in range(4):
        model[0].weight.requires_grad_(step < 2)
        model[0].weight.grad = None

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(inputs()).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert_same_everywhere(model)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


def plain_training(kind: str, steps: int) -> list[torch.Tensor]:
    """Compute in one process: every rank's optimizer steps alone, then the deltas are combined."""
    models = [make_model() for _ in range(hvd.size())]
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in models]
    for _ in range(steps):
        before = [param.detach().clone() for param in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(inputs(rank)).square().sum().backward()
            optimizer.step()
        for index, start in enumerate(before):
            params = [list(model.parameters())[index] for model in models]
            deltas = [(param.detach() - start).double().numpy() for param in params]
            for param in params:
                param.data.copy_(start + torch.from_numpy(adasum(deltas)))
    return [param.detach() for param in models[0].parameters()]


def scenario_optimizer_combines_what_each_rank_changed() -> None:
    for kind, make in OPTIMIZERS.items():
        for arguments in ({}, {"bucket_cap_mb": 1e-6}):
            model = make_model()
            optimizer = hvd.DistributedOptimizer(
                make(model.parameters()), model.named_parameters(), op=hvd.Adasum, **arguments
            )
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
            for _ in range(4):
                optimizer.zero_grad()
                model(inputs()).square().sum().backward()
                optimizer.synchronize()
                optimizer.step()
                scheduler.step()
            assert_same_everywhere(model)
            assert_close(list(model.parameters()), plain_training(kind, 4), rtol=1e-4)


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_adasum = make_tests(body, on_hosts([0], [0, 0, 0], [0, 0, 1, 1]))
