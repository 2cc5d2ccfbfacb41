"""With `late=` handwritten digits are learnt as well as with steps that wait for all ranks."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from harness import run_world
from parallel.torch.small_models import assert_same_everywhere, make

PRELOAD = ("torch._dynamo",)


def digits_right(images: Any, digits: Any, late: Any) -> int:
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = make(model, late=late)
    numbers = torch.Generator().manual_seed(1 + hvd.rank())
    for step in range(250):
        optimizer.zero_grad()
        if not optimizer.behind:
            mine = 357 + torch.randint(1440, (32,), generator=numbers)
            if late is not None and step % 5 == hvd.rank():
                time.sleep(0.01)
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
    assert_same_everywhere(model)
    assert late is None or sum(row.late for row in optimizer.attendance) > 25
    return int((model(x[:357]).argmax(1) == y[:357]).sum())


def learn(images: Any, digits: Any) -> tuple[int, int]:
    hvd.init()
    synchronous = digits_right(images, digits, None)
    late = hvd.Late(grace=datetime.timedelta(milliseconds=1))
    return synchronous, digits_right(images, digits, late)


@pytest.mark.long
def test_digits_are_learnt_as_well() -> None:
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0)).numpy()
    for result in run_world(3, learn, images[order], digits[order]):
        synchronous, late = result.value
        assert synchronous > 0.95 * 357
        assert late >= synchronous - 0.02 * 357  # Who is late is another rank in each run.
