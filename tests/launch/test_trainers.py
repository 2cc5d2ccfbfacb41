"""Trainers that know only torchrun's variables find their ranks under hvdlite-run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import base_environment
from launcher import run_launcher
from patience import HANG

SCRIPT = Path(__file__).with_name("trainers") / "train.py"
TRAINERS = ("plain", "accelerate", "transformers", "lightning", "ignite")
pytestmark = pytest.mark.long  # test_strangers.py looks at the variables.


def run(*command: str, folder: Path) -> str:
    """Run a program to its end; return what it printed."""
    environment = {**base_environment(), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=4 * HANG,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def trained(output: str) -> list[tuple[int, list[float]]]:
    """Return, for each process, the number of processes and the parameters."""
    rows = [line.partition("trained ")[2].split() for line in output.splitlines()]
    return [(int(row[0]), [float(value) for value in row[1:]]) for row in rows if row]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainer_finds_the_ranks_and_trains_as_one_process_does(
    trainer: str, tmp_path: Path
) -> None:
    pytest.importorskip({"lightning": "pytorch_lightning", "plain": "torch"}.get(trainer, trainer))
    ours = run_launcher("-np", "2", str(SCRIPT), trainer, "2", cwd=tmp_path)
    assert ours.returncode == 0, ours.stdout + ours.stderr
    torchruns = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(SCRIPT), trainer, "2"),
        folder=tmp_path,
    )
    ranks = trained(ours.stdout)
    assert [size for size, _ in ranks] == [2, 2]
    assert ranks[0] == ranks[1]
    assert ranks == trained(torchruns)
    ((size, alone),) = trained(run(str(SCRIPT), trainer, "1", folder=tmp_path))
    assert size == 1
    assert ranks[0][1] == pytest.approx(alone, rel=1e-5)
