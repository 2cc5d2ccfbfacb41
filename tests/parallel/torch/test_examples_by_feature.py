"""examples/by_feature: every script keeps, on two ranks, the promise in its last lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pythons import python_with

pytestmark = pytest.mark.long

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "by_feature"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "digits")
MODULES = ("torch._dynamo", "sklearn.datasets")
# All in one job. Inductor would compile C++ for half a minute.
PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
    print("begin", name, flush=True)
    importlib.import_module(name).main(*(["aot_eager"] if name == "compiled" else []))
    print("end", name, flush=True)
"""


def test_every_example_keeps_its_promise_on_two_ranks(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "hvdlite.launch", "-np", "2"]
    inherited = os.environ.get("PYTHONPATH")
    folders = os.pathsep.join(filter(None, (str(FOLDER), inherited)))
    environment = {**os.environ, "PYTHONPATH": folders, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*launcher, python_with(*MODULES), "-c", PROGRAM, *EXAMPLES],
        env={**environment, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        ended = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] end ")]
        assert ended == [f"[{rank}] end {name}" for name in EXAMPLES], done.stdout


def test_the_table_lists_every_example() -> None:
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = [line.split("[")[1].split(".py]")[0] for line in table.splitlines() if ".py](" in line]
    assert listed == EXAMPLES
