"""The example of Spark trains to 97 %."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from clusters import spark_sessions
from harness import base_environment

pytestmark = spark_sessions.MARKS
EXAMPLE = Path(__file__).parents[2] / "examples" / "spark_digits.py"


def test_digits_of_a_data_frame_are_learnt_on_two_ranks(tmp_path: Path) -> None:
    own = base_environment()
    own |= {"PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell", "SPARK_LOCAL_IP": "127.0.0.1"}
    own |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_DIRS": str(tmp_path)}
    own |= {"SPARK_SUBMIT_OPTS": spark_sessions.COMPILES_QUICKLY}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--folder", str(tmp_path / "digits")],
        cwd=tmp_path,
        env={**own, "OMP_NUM_THREADS": "1", "TMPDIR": os.fspath(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,  # A crowded machine stays far below; only a hang meets it.
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"test accuracy ([\d.]+)%, the same on all 2 ranks", done.stdout)
    assert found is not None and float(found[1]) >= 97.0, done.stdout + done.stderr
