"""With compressed gradients handwritten digits are learnt as well as with exact ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from harness import run_world
from parallel.torch.small_models import make

PRELOAD = ("torch._dynamo",)

# Each makes its compression in a rank.
COMPRESSIONS = {
    "bf16": lambda: hvd.Compression.bf16,
    "int8": lambda: hvd.Compression.int8,
}


def digits_right(images: Any, digits: Any, compression: Any) -> int:
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = make(model, compression=compression)
    numbers = torch.Generator().manual_seed(1 + hvd.rank())
    for _ in range(250):
        mine = 357 + torch.randint(1440, (32,), generator=numbers)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
    return int((model(x[:357]).argmax(1) == y[:357]).sum())


def learn(name: str, images: Any, digits: Any) -> tuple[int, int]:
    hvd.init()
    exact = digits_right(images, digits, hvd.Compression.none)
    return exact, digits_right(images, digits, COMPRESSIONS[name]())


@pytest.mark.long
# Gradients travel as int8 only between hosts.
@pytest.mark.parametrize(("name", "hosts"), [("bf16", None), ("int8", [0, 1])])
def test_digits_are_learnt_as_well(name: str, hosts: list[int] | None) -> None:
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0)).numpy()
    for result in run_world(2, learn, name, images[order], digits[order], hosts=hosts):
        exact, approximate = result.value
        assert exact > 0.95 * 357
        assert approximate >= exact - 0.005 * 357
