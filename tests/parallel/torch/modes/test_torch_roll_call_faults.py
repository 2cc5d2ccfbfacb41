"""A rank that dies, leaves, or never comes again while others are ahead of it: no step hangs."""

from __future__ import annotations

import datetime
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import hvdlite.torch as hvd
from harness import run_world
from patience import wait_until

PRELOAD = ("torch._dynamo",)
LAST = 2


def train(ending: str, folder: str) -> str:
    """Train until the last rank ends in this way; return the error of the others."""
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    late = hvd.Late(grace=datetime.timedelta(milliseconds=1), bound=2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), late=late)
    for step in range(40):
        optimizer.zero_grad()
        if hvd.rank() == LAST and step == 10:
            time.sleep(0.1)  # The others go on, as far as the bound.
            if ending == "death":
                os.kill(os.getpid(), signal.SIGKILL)
            if ending == "end":
                break
            wait_until(lambda: len(list(Path(folder).iterdir())) == LAST, "errors of the others")
        try:
            if not optimizer.behind:
                model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
        except hvd.HvdliteError as error:
            (Path(folder) / str(hvd.rank())).touch()
            return f"step {step}: {error}"
    hvd.shutdown()
    return "no error"


@pytest.mark.parametrize("ending", ["death", "end", "stall"])
def test_the_others_get_an_error_at_the_bound(ending: str, tmp_path: Path) -> None:
    # On a crowded machine a rank of the others may be late by a second.
    env = {"HVDLITE_STALL_SHUTDOWN": "5"} if ending == "stall" else {}
    results = run_world(3, train, ending, str(tmp_path), env=env, expect_failure=True)
    for result in results[:LAST]:
        assert result.value.startswith("step "), result
        assert f"rank {LAST}" in result.value, result.value
