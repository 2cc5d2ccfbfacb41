"""examples/torch_modes.py reaches its accuracy in each mode."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "torch_modes.py"


@pytest.mark.parametrize(
    "mode",
    ["synchronous", "dropcompute", "rollcall", "sharded", "powersgd", "localsgd", "diloco"],
)
def test_digits_are_learnt(mode: str) -> None:
    launcher = [sys.executable, "-m", "hvdlite.launch", "-np", "3"]
    done = subprocess.run(
        [*launcher, sys.executable, str(EXAMPLE), mode, "--straggler", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(rf"{mode}: test accuracy ([\d.]+)%, [\d.]+ ms a step", done.stdout)
    assert accuracy and float(accuracy[1]) >= 96.0, done.stdout
