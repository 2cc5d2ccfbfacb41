"""hvdlite.torch needs no NumPy: torch works without it, and does not depend on it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher import run_launcher

HEAD = """
import warnings

warnings.filterwarnings("ignore", "Failed to initialize NumPy")
import torch
import hvdlite.torch as hvd

try:
    torch.zeros(1).numpy()
except RuntimeError:
    pass
else:
    raise SystemExit("NumPy is there")
"""
TRAINS = (
    HEAD
    + """
hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.ShardedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
batches = iter([torch.full((2, 4), 1.0 + hvd.rank())] * 100)
for step in range(4):
    model(next(batches)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.consolidate(to=0)
if hvd.rank() == 0:
    assert len(optimizer.state_dict()["state"]) == 4
del optimizer

optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
for step in range(2):
    optimizer.zero_grad()
    model(next(batches)).square().sum().backward()
    optimizer.step()
hvd.broadcast_optimizer_state(optimizer, root_rank=1)
assert hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1) == {"rank": 1}
assert hvd.allgather_object(hvd.rank()) == [0, 1]
hvd.elastic.TorchState(model, optimizer, rng=True, step=0).sync()
print("done")
"""
)


@pytest.mark.long
def test_job_works_without_numpy(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text(
        "raise ModuleNotFoundError('hidden by a test', name='numpy')\n"
    )
    (tmp_path / "train.py").write_text(TRAINS)
    result = run_launcher("-np", "2", sys.executable, "train.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done") == 2, result.stdout
