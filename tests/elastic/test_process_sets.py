"""Process sets of `init` in the worlds of an elastic job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher import run_launcher
from pythons import python_with

FOLDER = Path(__file__).parent
# Worker 0 dies; so worker 2, which was rank 2, becomes rank 1 and a member of the set of ranks 0
# and 1. Nobody calls zero_grad().
NEW_MEMBER = """
import os, signal, torch
import hvdlite.torch as hvd
from hvdlite.elastic import epochs

PAIR = hvd.ProcessSet([0, 1])
torch.set_num_threads(1)
hvd.init(process_sets=[PAIR])
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD([weight], lr=0.0), [("weight", weight)], op=hvd.Sum, process_set=PAIR
)

@hvd.elastic.run
def train(state):
    print(f"{hvd.size()} ranks, member: {PAIR.included()}", flush=True)
    while state.step < 10:
        weight.grad = None
        weight.sum().backward()
        optimizer.step()
        assert weight.grad.tolist() == 3 * [2.0 if PAIR.included() else 1.0]
        state.step += 1
        if epochs.history()[-1].worker == 0 and state.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()

train(hvd.elastic.TorchState(step=0))
"""


def test_sets_keep_their_ids_as_far_as_their_ranks_exist() -> None:
    result = run_launcher(
        *("-np", "3", "--min-np", "1", "--max-np", "3"),
        *(sys.executable, str(FOLDER / "sets_worker.py"), "2:13", "1:22"),
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    lines = [line.partition("] ")[2] for line in result.stdout.splitlines()]
    assert lines[:3] == ["sets 3: 1 2"] * 3
    assert lines[3:5] == ["sets 2: 1 None"] * 2
    assert lines[-3:] == ["sets 3: 1 2"] * 3


@pytest.mark.long
def test_optimizer_of_a_process_set_follows_its_members() -> None:
    result = run_launcher(
        *("-np", "3", "--min-np", "2", "--max-np", "3"),
        *(python_with("torch._dynamo"), "-c", NEW_MEMBER),
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    lines = {line for line in result.stdout.splitlines() if "member" in line}
    assert "[2] 3 ranks, member: False" in lines
    assert "[1] 2 ranks, member: True" in lines
