"""`pytest --costs` prints what tests take and compute, by folder, file and test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import costs
from harness import base_environment

TESTS = """
import subprocess, sys, time

def test_that_computes():
    subprocess.run([sys.executable, "-c", "while __import__('time').process_time() < 1.5: pass"])

def test_that_waits():
    time.sleep(1.0)
"""


def test_costs_of_waiting_and_of_computing(tmp_path: Path) -> None:
    file = tmp_path / "test_two.py"
    file.write_text(TESTS)
    plugin = f"import sys, costs, pytest; sys.exit(pytest.main([{str(file)!r}], [costs.Costs()]))"
    command = [sys.executable, "-c", plugin]
    tests = Path(costs.__file__).parent
    result = subprocess.run(
        command, cwd=tests, env=base_environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = re.findall(r" +([\d.]+) +([\d.]+)  \S*(test_two\.py\S*)", result.stdout)
    rows = {name: (float(wall), float(computed)) for wall, computed, name in found}
    wall, computed = rows["test_two.py::test_that_computes"]
    assert wall >= 1.5
    assert computed >= 1.4
    wall, waited = rows["test_two.py::test_that_waits"]
    assert wall >= 1.0
    assert waited < 0.9
    assert rows["test_two.py"][0] >= 2.5
