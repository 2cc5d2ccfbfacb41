"""Training with virtual ranks has the same bits on any number of ranks, and resumes on another."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch

import hvdlite.torch as hvd
from harness import run_world
from parallel.torch.modes.virtual_models import KINDS, STEPS, Images, Training, alone

PRELOAD = ("torch._dynamo",)

PLACEMENTS = [
    *([0] * ranks for ranks in (1, 2, 3, 4, 5, 8)),
    [0, 0, 1, 1],
    [0, 1, 1],
    [0, 0, 0, 1],
    [0, 0, 0, 0, 1, 1, 1, 1],
]


def hashes(steps: int = 2 * STEPS, *images: torch.Tensor) -> dict[str, str]:
    """Train on virtual ranks; `images` are images and labels, by default random ones."""
    hvd.init()
    found = {}
    for kind in KINDS:
        training = Training(kind, data=Images(*images))
        for _ in itertools.islice(training.run(epochs=steps), steps):
            pass
        found[kind] = training.hash()
    return found


def hashes_alone(steps: int = 2 * STEPS, *images: torch.Tensor) -> dict[str, str]:
    """Train in one process with plain torch."""
    hvd.init()
    torch.set_num_threads(1)
    return {kind: alone(kind, steps, Images(*images)) for kind in KINDS}


@functools.cache
def expected() -> dict[str, str]:
    (result,) = run_world(1, hashes_alone)
    assert len({*result.value.values()}) == len(KINDS)
    return dict(result.value)


@pytest.mark.parametrize("hosts", PLACEMENTS, ids=str)
def test_every_number_of_ranks_has_the_bits_of_plain_torch(hosts: list[int]) -> None:
    for result in run_world(len(hosts), hashes, hosts=hosts):
        assert result.value == expected()


RESUMED = (KINDS[0], KINDS[4])


def train_on(path: str, steps: int) -> dict[str, str]:
    """Go on where the checkpoint is, for so many steps, and save the next one."""
    hvd.init()
    found = {}
    for kind in RESUMED:
        file = Path(path) / f"{kind}.pt"
        training = Training(kind)
        if file.exists():
            model, optimizer, scheduler, training.losses = torch.load(file)
            training.model.load_state_dict(model)
            training.optimizer.load_state_dict(optimizer)
            training.scheduler.load_state_dict(scheduler)
        for done, _ in enumerate(training.run(), 1):
            if done == steps:
                break
        hvd.barrier()
        if hvd.rank() == 0:
            parts = training.model, training.optimizer, training.scheduler
            torch.save((*(part.state_dict() for part in parts), training.losses), file)
        found[kind] = training.hash()
    return found


def test_training_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    for ranks, steps in ((4, 2), (1, 2), (8, 2 * STEPS)):
        results = run_world(ranks, train_on, str(tmp_path), steps)
    for result in results:
        assert result.value == {kind: expected()[kind] for kind in RESUMED}
