"""examples/keras_digits.py: its accuracy, and the same loss curve as alone, on both backends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parallel.keras.keras_worlds import BACKENDS, environment
from pythons import python_with

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "keras_digits.py"


def run(backend: str, ranks: int, folder: Path, *arguments: str) -> tuple[str, list[float]]:
    """Run the example; return its output, and the losses that it saved.

    One rank starts and ends as a user's does; several are forked.
    """
    launcher = [sys.executable, "-m", "hvdlite.launch", "-np", str(ranks)] if ranks > 1 else []
    modules = ("keras", "sklearn.datasets")
    python = sys.executable if ranks == 1 else python_with(*modules, **environment(backend))
    command = [*launcher, python, str(EXAMPLE), "--output", str(folder), *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment(backend)}
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "digits.keras").stat().st_size > 1000
    said = json.loads((folder / f"keras-{backend}-1-{ranks}.json").read_text())
    return done.stdout, said["losses"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_learn_what_one_learns(backend: str, tmp_path: Path) -> None:
    _, alone = run(backend, 1, tmp_path / "my output")
    output, together = run(backend, 2, tmp_path / "my output")
    accuracy = re.search(rf"Keras on {backend}: test accuracy ([\d.]+)%", output)
    assert accuracy and float(accuracy[1]) >= 97.0, output
    assert re.search(r"s an epoch on 2 ranks: [\d.]+ times as fast as 1 rank \(", output), output
    assert len(alone) == len(together) == 20
    differences = [abs(a - b) for a, b in zip(alone, together, strict=True)]
    assert max(differences[:5]) < 1e-3 and max(differences) < 1e-2, differences
