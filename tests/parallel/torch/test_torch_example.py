"""examples/torch_digits.py: its accuracy, and the same loss curve on 1, 2 and 4 ranks.

Sums of other batches are rounded differently, and training makes such differences grow: how fast
depends on the processor. So the curves are compared closely at first, and by their course later.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pythons import python_with

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "torch_digits.py"
MODULES = ("torch._dynamo", "sklearn.datasets", "matplotlib.pyplot")


def run(ranks: int, folder: Path, *arguments: str) -> tuple[str, dict[str, list[float]]]:
    """Run the example; return its output, and the curves that it saved.

    Two ranks start and end as a user's do; the others are forked.
    """
    launcher = [sys.executable, "-m", "hvdlite.launch", "-np", str(ranks)] if ranks > 1 else []
    python = sys.executable if ranks == 2 else python_with(*MODULES)
    command = [*launcher, python, str(EXAMPLE), "--output", str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(folder.parent)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "loss.png").stat().st_size > 1000
    return done.stdout, json.loads((folder / "loss.json").read_text())


def test_two_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    output, curves = run(2, tmp_path / "my output", "--compare")
    accuracy = re.search(r"test accuracy ([\d.]+)%", output)
    assert accuracy and float(accuracy[1]) >= 97.0, output
    assert re.search(r"[\d,]+ samples/s on 2 rank\(s\), [\d,]+ alone: [\d.]+ times", output), output
    alone, together = curves.values()
    assert len(alone) == len(together) > 400
    same_curve(alone, together)
    assert sum(together[-50:]) < 1.1 * sum(alone[-50:])


def test_same_curve_on_four_ranks_and_without_a_launcher(tmp_path: Path) -> None:
    _, four = run(4, tmp_path / "four", "--epochs", "2")
    _, one = run(1, tmp_path / "one", "--epochs", "2")
    (a,), (b,) = four.values(), one.values()
    same_curve(a, b)


def same_curve(one: list[float], other: list[float]) -> None:
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    assert max(differences[:50]) < 1e-4
    assert max(differences) < 0.05
