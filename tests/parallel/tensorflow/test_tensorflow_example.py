"""examples/tensorflow_tape.py: its accuracy, and the same losses on 1 and 3 ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import base_environment
from parallel.tensorflow.tensorflow_worlds import ENVIRONMENT
from pythons import python_with

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tensorflow_tape.py"


def run(ranks: int, epochs: int) -> str:
    launcher = [sys.executable, "-m", "hvdlite.launch", "-np", str(ranks)] if ranks > 1 else []
    forking = ranks > 1  # One rank starts and ends as a user's does.
    python = (
        python_with("tensorflow", "sklearn.datasets", **ENVIRONMENT) if forking else sys.executable
    )
    command = [*launcher, python, str(EXAMPLE), "--epochs", str(epochs)]
    environment = {**base_environment(), **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses_in(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", output)]


def test_three_ranks_reach_the_accuracy_with_the_losses_of_one() -> None:
    output = run(3, epochs=15)
    accuracy = re.search(r"test accuracy ([\d.]+)%", output)
    assert accuracy and float(accuracy[1]) >= 97.0, output
    assert re.search(r"s an epoch on 3 ranks$", output.strip()), output
    alone, together = losses_in(run(1, epochs=15)), losses_in(output)
    assert len(alone) == len(together) == 15
    differences = [abs(a - b) for a, b in zip(alone, together, strict=True)]
    assert max(differences[:2]) <= 2e-4, differences
