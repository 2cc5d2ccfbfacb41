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


def alone(trainer: str, folder: Path) -> list[float]:
    """Train in one process; return the parameters."""
    ((size, parameters),) = trained(run(str(SCRIPT), trainer, "1", folder=folder))
    assert size == 1
    return parameters


@pytest.fixture(scope="module")
def plain_alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Train alone by torch; but for transformers, which shuffles, every trainer equals it."""
    return alone("plain", tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainer_finds_the_ranks_and_trains_as_one_process_does(
    trainer: str, plain_alone: list[float], tmp_path: Path
) -> None:
    pytest.importorskip({"lightning": "pytorch_lightning", "plain": "torch"}.get(trainer, trainer))
    ours = run_launcher("-np", "2", str(SCRIPT), trainer, "2", cwd=tmp_path)
    assert ours.returncode == 0, ours.stdout + ours.stderr
    ranks = trained(ours.stdout)
    assert [size for size, _ in ranks] == [2, 2]
    assert ranks[0] == ranks[1]
    if trainer == "plain":  # The others read the same variables.
        torchruns = run(
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(SCRIPT), trainer, "2"),
            folder=tmp_path,
        )
        assert ranks == trained(torchruns)
    expected = alone(trainer, tmp_path) if trainer == "transformers" else plain_alone
    assert ranks[0][1] == pytest.approx(expected, rel=1e-5)
