"""examples/torch_model_parallel.py: its accuracy on 8 ranks, and the losses of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "torch_model_parallel.py"


def run(ranks: int, epochs: int) -> tuple[list[float], float]:
    """Run the example; return the loss of each epoch and that of the test, and the accuracy."""
    launcher = [sys.executable, "-m", "hvdlite.launch", "-np", str(ranks)]
    done = subprocess.run(
        [*launcher, sys.executable, str(EXAMPLE), "--epochs", str(epochs)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"test: .*accuracy ([\d.]+)%", done.stdout)
    assert accuracy, done.stdout
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)], float(accuracy[1])


@pytest.mark.timeout(900)
def test_eight_ranks_learn_what_one_learns() -> None:
    losses, accuracy = run(8, epochs=5)
    assert len(losses) == 6
    assert accuracy >= 96.0
    (first, _), _ = run(1, epochs=1)
    assert abs(first - losses[0]) < 2e-3
