"""examples/torch_modes.py reaches its accuracy in each mode."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG
from pythons import python_with

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "torch_modes.py"
MODULES = ("torch._dynamo", "sklearn.datasets")  # What the example imports, apart from hvdlite.
MODES = ["synchronous", "late", "sharded", "localsgd", "diloco"]


def test_digits_are_learnt_in_one_mode_after_the_other() -> None:
    launcher = [sys.executable, "-m", "hvdlite.launch", "-np", "3"]
    done = subprocess.run(
        [*launcher, python_with(*MODULES), str(EXAMPLE), *MODES, "--straggler", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=4 * HANG,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"(\w+): test accuracy ([\d.]+)%, [\d.]+ ms a step", done.stdout)
    assert [mode for mode, _ in rows] == MODES, done.stdout
    assert min(float(percent) for _, percent in rows) >= 96.0, done.stdout
