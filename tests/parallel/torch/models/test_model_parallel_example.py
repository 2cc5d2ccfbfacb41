"""examples/torch_model_parallel.py has the same losses on 8 ranks and in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pythons import python_with

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "torch_model_parallel.py"


# What the example imports, apart from hvdlite.
MODULES = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining")
MODULES += ("torch.distributed.tensor.parallel", "sklearn.datasets")


def run(ranks: int) -> list[float]:
    """Run the example for an epoch; return its loss and that of the test.

    One rank starts and ends as a user's does; several are forked.
    """
    python = sys.executable if ranks == 1 else python_with(*MODULES)
    launcher = [sys.executable, "-m", "hvdlite.launch", "-np", str(ranks)]
    done = subprocess.run(
        [*launcher, python, str(EXAMPLE), "--epochs", "1"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.mark.timeout(900)
def test_eight_ranks_learn_what_one_learns() -> None:
    of_epoch, of_test = run(8)
    assert of_test < 0.5 * of_epoch
    assert run(1) == pytest.approx([of_epoch, of_test], abs=2e-3)
