"""The example of docs/slurm.md: its commands train the digits to 97 %."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from clusters.slurm import Slurm
from harness import base_environment

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]


def test_documented_batch_script_trains_the_digits(slurm: Slurm, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "slurm.md").read_text()
    (command,) = re.findall(r"^hvdlite-run --emit slurm .*$", page, re.MULTILINE)
    base = base_environment()
    path = f"{Path(sys.executable).parent}:{base['PATH']}"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    subprocess.run(command, shell=True, cwd=tmp_path, env={**base, "PATH": path}, check=True)
    env = {**base, "PATH": path, "OMP_NUM_THREADS": "1"}
    job = slurm.submit(tmp_path / "digits.sh", "--time=10", env=env)
    slurm.wait_for_state(job, "COMPLETED", "FAILED", "CANCELLED", most=200)
    output = (tmp_path / f"slurm-{job}.out").read_text()
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)%", output)
    assert float(accuracy) >= 97.0, output
    assert slurm.state(job)["JobState"] == "COMPLETED"
