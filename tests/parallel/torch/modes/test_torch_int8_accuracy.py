"""With gradients that travel as int8 between hosts, handwritten digits are learnt as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from harness import run_world
from parallel.torch.modes.test_torch_powersgd_accuracy import digits_right

PRELOAD = ("torch._dynamo",)


def learn(images: Any, digits: Any) -> tuple[int, int]:
    hvd.init()
    exact = digits_right(images, digits, hvd.Compression.none)
    return exact, digits_right(images, digits, hvd.Compression.int8)


@pytest.mark.long
def test_digits_are_learnt_as_well() -> None:
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0)).numpy()
    for result in run_world(2, learn, images[order], digits[order], hosts=[0, 1]):
        exact, approximate = result.value
        assert exact > 0.95 * 357
        assert approximate >= exact - 0.005 * 357
