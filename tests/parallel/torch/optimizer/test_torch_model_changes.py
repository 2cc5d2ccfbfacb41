"""DistributedDataParallel follows a model that changes after it was wrapped."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import assert_same_everywhere

PRELOAD = ("torch._dynamo",)


def make() -> nn.Sequential:
    torch.manual_seed(hvd.rank())  # Ranks begin with other parameters.
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def assign(model: nn.Sequential) -> None:
    state = {name: value.clone() + hvd.rank() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace_head(model: nn.Sequential) -> None:
    model[2] = nn.Linear(4, 3)


def normalize_weights(model: nn.Sequential) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model[0])


def overwrite_by_conversion(model: nn.Sequential) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
        model.float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank, as LoRA adds it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(3, 1, bias=False), nn.Linear(1, 4, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(inputs) + self.up(self.down(inputs))
        return out


def append_an_adapter(model: nn.Sequential) -> None:
    model[0] = Adapted(model[0])


def train(wrapped: hvd.DistributedDataParallel) -> None:
    trained = [param for param in wrapped.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(torch.randn(5, 3, generator=generator)).square().mean().backward()
        optimizer.step()


def check(change: Callable[[nn.Sequential], None]) -> None:
    wrapped = hvd.DistributedDataParallel(make())
    train(wrapped)
    change(wrapped.module)
    train(wrapped)
    assert_same_everywhere(wrapped)


def scenario_parameters_are_assigned() -> None:
    check(assign)


def scenario_a_layer_is_replaced() -> None:
    check(replace_head)


def scenario_weights_are_normalized() -> None:
    check(normalize_weights)


def scenario_parameters_are_overwritten_by_a_conversion() -> None:
    check(overwrite_by_conversion)


def scenario_an_adapter_is_appended() -> None:
    check(append_an_adapter)


def scenario_a_layer_is_taken_away() -> None:
    check(lambda model: model.pop(2))


def scenario_a_layer_is_thawed_between_two_backwards_of_a_step() -> None:
    wrapped = hvd.DistributedDataParallel(make())
    wrapped.module[2].requires_grad_(False)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    data = torch.randn(5, 3, generator=torch.Generator().manual_seed(hvd.rank()))
    for step in range(3):
        with wrapped.no_sync():
            wrapped(data).square().mean().backward()
        wrapped.module[2].requires_grad_(step > 0)
        wrapped(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same_everywhere(wrapped)


def scenario_nothing_is_sent_for_a_model_that_stays() -> None:
    wrapped = hvd.DistributedDataParallel(make())
    before = wrapped._params
    train(wrapped)
    assert wrapped._params is before
    assert_same_everywhere(wrapped)


def body() -> dict[str, str]:
    return run_all(globals(), hvd.init)


test_model_changes = make_tests(body, sizes(2, 3))
