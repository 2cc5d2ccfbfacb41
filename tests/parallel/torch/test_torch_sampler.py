"""A rank is killed in the middle of an epoch, and another number of ranks goes on with it."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness import run_world
from parallel.scenarios import Later

PRELOAD = ("torch._dynamo",)
SAMPLES = 61
KILLED_AT = 5  # batches, of which four are in the checkpoint
hvd: Any = Later("hvdlite.torch")
torch: Any = Later("torch")


def train(folder: str, workers: int, killed: bool) -> list[list[int]]:
    """Train one epoch; return the batches of this rank that are in the checkpoint, or all."""
    hvd.init()
    checkpoint = Path(folder) / "checkpoint.json"
    sampler = hvd.DistributedSampler(range(SAMPLES), seed=9)
    if checkpoint.exists():
        sampler.load_state_dict(json.loads(checkpoint.read_text()))
    sampler.set_epoch(3)
    loader = torch.utils.data.DataLoader(
        sampler.dataset, batch_size=4, sampler=sampler, num_workers=workers, collate_fn=list
    )
    trained = []
    for number, batch in enumerate(loader, start=1):
        hvd.allreduce(torch.ones(2), name="gradient")
        sampler.record(len(batch))
        trained.append(batch)
        if killed and number == KILLED_AT - 1 and hvd.rank() == 0:
            checkpoint.write_text(json.dumps(sampler.state_dict()))
        Path(folder, f"{hvd.size()}.{hvd.rank()}").write_text(json.dumps(trained))
        if killed and number == KILLED_AT and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return trained


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_is_seen_once_though_a_rank_is_killed(workers: int, tmp_path: Path) -> None:
    run_world(2, train, str(tmp_path), workers, True, expect_failure=True)
    seen = Counter[int]()
    for rank in range(2):
        batches = json.loads((tmp_path / f"2.{rank}").read_text())[: KILLED_AT - 1]
        seen.update(index for batch in batches for index in batch)
    assert seen.total() == 4 * 4 * 2
    for result in run_world(3, train, str(tmp_path), workers, False):
        seen.update(index for batch in result.value for index in batch)
    assert set(seen) == set(range(SAMPLES))
    assert seen.total() - SAMPLES == 1  # 29 samples are left for three ranks
