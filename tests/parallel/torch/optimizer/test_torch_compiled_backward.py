"""Gradients of a backward that torch compiles are reduced when it returns, as those of others."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from harness import base_environment
from hvdlite.errors import HvdliteError
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import make_model

PRELOAD = ("torch._dynamo",)
FEATURES, STEPS = 3, 2

Backward = Callable[[torch.nn.Module, torch.Tensor], None]
Wrap = Callable[[torch.nn.Module], tuple[torch.nn.Module, torch.optim.Optimizer]]


def body() -> dict[str, str]:
    # Torch warns of what its own compiler does.
    return run_all(globals(), hvd.init, lambda: warnings.simplefilter("ignore", UserWarning))


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Compile the backwards in this block."""
    from torch._dynamo import compiled_autograd

    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable
    with enable(torch.compile(backend="eager")):
        yield


def loss_of(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).square().mean()
    return loss


def plainly(model: torch.nn.Module, inputs: torch.Tensor) -> None:
    loss_of(model, inputs).backward()


def by_compiler(model: torch.nn.Module, inputs: torch.Tensor) -> None:
    with compiled():
        loss_of(model, inputs).backward()


def of_compiled_model(model: torch.nn.Module, inputs: torch.Tensor) -> None:
    """Compile forward and backward of the model, as `torch.compile(model)` does alone."""
    loss_of(torch.compile(model, backend="aot_eager"), inputs).backward()


def in_compiled_step(model: torch.nn.Module, inputs: torch.Tensor) -> None:
    """Run model, loss and backward in one compiled function, as torch's tutorial does."""

    def step(inputs: torch.Tensor) -> None:
        loss_of(model, inputs).backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="eager")(inputs)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def distributed(**options: Any) -> Wrap:
    def wrap(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        return model, hvd.DistributedOptimizer(
            sgd(model), named_parameters=model.named_parameters(), **options
        )

    return wrap


def alone(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return model, sgd(model)


def train(wrap: Wrap, backward: Backward, share: bool = True) -> list[torch.Tensor]:
    """Return all gradients, as they are when backward() returns, and the parameters in the end."""
    plain = make_model()
    model, optimizer = wrap(plain)
    generator = torch.Generator().manual_seed(4)
    seen = []
    for _ in range(STEPS):
        inputs = torch.randn(2 * hvd.size(), FEATURES, generator=generator)
        optimizer.zero_grad()
        backward(model, inputs.chunk(hvd.size())[hvd.rank()] if share else inputs)
        seen += [param.grad.clone() for param in plain.parameters() if param.grad is not None]
        optimizer.step()
    return seen + [param.detach() for param in plain.parameters()]


def equal(mine: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    pairs = zip(mine, expected, strict=True)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)


def scenario_as_one_process() -> None:
    expected = train(alone, plainly, share=False)
    for backward in (by_compiler, of_compiled_model, in_compiled_step):
        for options in (
            {},
            {"overlap": True},
            {"bucket_cap_mb": 1e-5, "overlap": True},
            {"gradient_as_bucket_view": True},
        ):
            assert equal(train(distributed(**options), backward), expected), (backward, options)


def after_two_backwards(block: Any, passes: int) -> list[torch.Tensor]:
    """Return the gradients of two backwards; with one pass, the first accumulates."""
    model, optimizer = distributed(backward_passes_per_step=passes)(make_model())
    inputs = torch.full((2, FEATURES), hvd.rank() + 1.0)
    with block:
        with optimizer.no_sync() if passes == 1 else contextlib.nullcontext():
            loss_of(model, inputs).backward()
        loss_of(model, inputs).backward()
    gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    optimizer.step()
    return gradients


def scenario_two_backwards_for_a_step_and_no_sync() -> None:
    for passes in (1, 2):
        expected = after_two_backwards(contextlib.nullcontext(), passes)
        assert equal(after_two_backwards(compiled(), passes), expected), passes


def scenario_many_optimizers() -> None:
    inputs = torch.full((2, FEATURES), hvd.rank() + 1.0)
    with compiled():
        for _ in range(12):  # more than Dynamo compiles one function for
            model, optimizer = distributed()(make_model())
            loss_of(model, inputs).backward()
            gradient = next(model.parameters()).grad
            assert gradient is not None
            assert torch.allclose(gradient, hvd.allreduce(gradient, op=hvd.Average), rtol=1e-6)
            optimizer.step()


def scenario_an_error_comes_out_of_backward_and_training_goes_on() -> None:
    model, optimizer = distributed(op=hvd.Sum)(make_model())
    inputs = torch.ones(2, FEATURES)
    with compiled():
        loss_of(model, inputs).backward()
        with pytest.raises(HvdliteError, match="sum"):
            loss_of(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, inputs).backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        assert torch.allclose(gradient, hvd.allreduce(gradient, op=hvd.Average), rtol=1e-6)


test_compiled_backward = make_tests(body, sizes(1, 2))


AS_TORCH_2_1 = """
import sys, torch
of_torch = torch.compiler.is_compiling
del torch.compiler.is_compiling
import hvdlite.torch as hvd

def is_compiling():
    assert not sys._getframe(1).f_globals["__name__"].startswith("hvdlite")
    return of_torch()

torch.compiler.is_compiling = is_compiling  # torch itself calls it in a later release.
hvd.init()
assert hvd.allreduce(torch.ones(2), op=hvd.Sum).sum() == 2
hvd.barrier()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
before = model.weight.clone()
model(hvd.broadcast(torch.ones(2), root_rank=0)).sum().backward()
optimizer.step()
assert not torch.equal(model.weight, before)
"""


def test_a_torch_that_does_not_tell_whether_it_compiles() -> None:
    subprocess.run([sys.executable, "-c", AS_TORCH_2_1], env=base_environment(), check=True)
