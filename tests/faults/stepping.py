"""A job that does steps until it is told to stop: `python stepping.py FOLDER [HOSTS]`.

Tests start it with hvdlite-run and inspect it from outside. Each rank writes how many steps it has
done to FOLDER/steps.RANK. A file FOLDER/stop ends the job. The ranks act as HOSTS hosts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for what arrays.py imports
if len(sys.argv) > 2:
    os.environ["HVDLITE_HOST_ID"] = f"host-{int(os.environ['HVDLITE_RANK']) % int(sys.argv[2])}"

import numpy as np
from arrays import ones, reduce_array, total_of_ones

from hvdlite import basics


def main(folder: Path) -> None:
    environment = dict(os.environ)
    basics.init()
    rank = basics.rank()
    inherited = subprocess.run(["env"], env=environment, capture_output=True, text=True, check=True)
    (folder / f"environment.{rank}").write_text(inherited.stdout)
    steps = 0
    noted = 0.0
    while reduce_array(np.array([int((folder / "stop").exists())]), "stop", "max")[0] == 0:
        assert (reduce_array(ones(), "gradient") == total_of_ones()).all()
        steps += 1
        if time.monotonic() > noted + 0.02:
            noted = time.monotonic()
            write(folder / f"steps.{rank}", str(steps))


def write(path: Path, text: str) -> None:
    """Write a file in one step, so that readers never see a part of it."""
    half = path.with_suffix(path.suffix + ".half")
    half.write_text(text)
    half.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
