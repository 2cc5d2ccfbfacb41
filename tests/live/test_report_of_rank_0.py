"""Under other launchers, rank 0 writes the report by itself: HVDLITE_REPORT."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

import pytest

from faults.arrays import ones, reduce_array
from faults.ports import free_port
from harness import World
from hvdlite import basics
from launch.marked import python
from launch.test_real_job import LOOP
from launcher import run_launcher
from patience import wait_until


def train(stop: str) -> None:
    """Train until a file exists, with two all-reduces a step."""
    basics.init()
    ended = False
    while not ended:
        time.sleep(0.02)
        reduce_array(ones(), "layer.weight")
        ended = (reduce_array(ones() * Path(stop).exists(), "layer.bias") > 0).any()
    basics.shutdown()


def start(folder: Path, name: str) -> World:
    """Start two ranks as a user's own script does, with a report of this name."""
    own = {"HVDLITE_RENDEZVOUS": f"127.0.0.1:{free_port()}", "HVDLITE_HOSTNAME": ""}
    own["HVDLITE_REPORT"] = str(folder / name)
    command = ["env", "--unset=HVDLITE_JOB_ID"]
    return World(2, train, str(folder / "stop"), env=own, command=command)


def has_steps(path: Path) -> bool:
    return path.exists() and re.search(r"<dt>steps</dt><dd>\d\d", path.read_text()) is not None


def test_rank_0_writes_while_it_trains_and_when_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    with start(tmp_path, path.name) as world:
        wait_until(lambda: has_steps(path), "steps in the report")
        text = path.read_text()
        (tmp_path / "stop").touch()
        first, second = world.wait()
    assert "running, written " in text
    assert f"<td>0</td><td class=text>{socket.gethostname()}</td>" in text
    assert "<td>1</td><td class=text>an unknown host</td>" in text
    told = first.stderr + second.stderr
    assert re.fullmatch(rf"hvdlite \[0\] report in {re.escape(str(path))}: .*\n", told), told
    assert "The job succeeded." in path.read_text()
    said = json.loads(path.with_suffix(".json").read_text())
    assert said["end"] == {"status": 0, "why": ""}
    assert [rank["rank"] for rank in said["figures"]["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing/out.html", "no file can be written there: No such file or directory"),
        ("out.txt", "the name has to end with .html"),
    ],
)
def test_what_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "stop").touch()
    with start(tmp_path, name) as world:
        told = "".join(result.stderr for result in world.wait())
    warning = f"hvdlite [0] warning: no report: HVDLITE_REPORT {tmp_path / name}: {why}"
    assert told.startswith(warning) and told.count("\n") == 1, told


def test_hvdlite_run_can_do_it_better(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    done = run_launcher("-np", "2", *python(LOOP), env={"HVDLITE_REPORT": str(path)})
    assert done.returncode == 0
    assert f"HVDLITE_REPORT is for other launchers; give hvdlite-run --report {path}" in done.stderr
    assert not path.exists()
