"""Trainers that know only torchrun's variables find their ranks under hvdlite-run.

Their imports take most of the time. So only the ranks of the first trainer start as a user's do;
all other processes are forked from one that has imported all trainers.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from harness import base_environment
from launcher import run_launcher
from patience import HANG
from pythons import forking_torchrun, python_with

SCRIPT = Path(__file__).with_name("trainers") / "train.py"
# By trainer: what to import before it.
TRAINERS = {
    "plain": "torch",
    "accelerate": "accelerate",
    "transformers": "transformers.trainer",
    "lightning": "pytorch_lightning",
    "ignite": "ignite.distributed",
}
pytestmark = pytest.mark.long  # test_strangers.py looks at the variables.


def run(*command: str, folder: Path) -> str:
    """Run a command to its end; return what it printed."""
    environment = {**base_environment(), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command,
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
    pytest.importorskip(TRAINERS[trainer].partition(".")[0])
    found = [name for name in TRAINERS.values() if importlib.util.find_spec(name.partition(".")[0])]
    forking = python_with(*found)
    program = (str(SCRIPT), trainer)
    python = sys.executable if trainer == "plain" else forking
    env = {"OMP_NUM_THREADS": "1"}
    ours = run_launcher("-np", "2", python, *program, "2", cwd=tmp_path, env=env)
    assert ours.returncode == 0, ours.stdout + ours.stderr
    torchruns = run(*forking_torchrun(forking, 2), *program, "2", folder=tmp_path)
    ranks = trained(ours.stdout)
    assert [size for size, _ in ranks] == [2, 2]
    assert ranks[0] == ranks[1]
    assert ranks == trained(torchruns)
    ((size, alone),) = trained(run(forking, *program, "1", folder=tmp_path))
    assert size == 1
    assert ranks[0][1] == pytest.approx(alone, rel=1e-5)
