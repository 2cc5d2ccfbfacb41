"""Under other launchers, rank 0 writes the report by itself: HVDLITE_REPORT."""

from __future__ import annotations

import json
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.ports import free_port
from harness import base_environment
from launcher import run_launcher
from patience import HANG, wait_until

WORKER = Path(__file__).with_name("training_worker.py")


class Ranks:
    """Two ranks that a script of the user's own has started, with a report."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self._stop = folder / "stop"
        self.stderr = folder / "stderr"
        environment = {
            **base_environment(),
            "HVDLITE_SIZE": "2",
            "HVDLITE_RENDEZVOUS": f"127.0.0.1:{free_port()}",
            "HVDLITE_TOKEN": secrets.token_hex(32),
            **variables,
        }
        with open(self.stderr, "wb") as stderr:
            self.processes = [
                subprocess.Popen(
                    [sys.executable, str(WORKER), str(self._stop)],
                    env={**environment, "HVDLITE_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    cwd=folder,
                )
                for rank in range(2)
            ]

    def end(self) -> str:
        """Let the ranks end, check that all went well, and return what they wrote to stderr."""
        self._stop.touch()
        for process in self.processes:
            process.communicate(timeout=HANG)
            assert process.returncode == 0, self.stderr.read_text()
        return self.stderr.read_text()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Ranks] = []

    def begin(**variables: str) -> Ranks:
        started.append(Ranks(tmp_path, **variables))
        return started[-1]

    yield begin
    for ranks in started:
        ranks.close()


def has(path: Path, pattern: str) -> bool:
    return path.exists() and re.search(pattern, path.read_text()) is not None


def wait_for_steps(path: Path) -> None:
    steps = r"<dt>steps</dt><dd>\d\d"
    wait_until(lambda: has(path, steps), f"steps in {path}")


def test_rank_0_writes_while_it_trains_and_when_it_ends(start: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    ranks = start(HVDLITE_REPORT="out.html")
    wait_for_steps(path)
    text = path.read_text()
    assert "running, written " in text
    assert f"<td>0</td><td class=text>{socket.gethostname()}</td>" in text
    assert "<td>1</td><td class=text>an unknown host</td>" in text
    told = ranks.end()
    assert re.fullmatch(r"hvdlite \[0\] report in out\.html: .*\n", told), told
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
def test_what_cannot_be_written_does_not_end_the_training(start: Any, name: str, why: str) -> None:
    told = start(HVDLITE_REPORT=name).end()
    assert re.match(rf"hvdlite \[0\] warning: no report: HVDLITE_REPORT {name}: {why}", told), told
    assert told.count("\n") == 1


def test_hvdlite_run_can_do_it_better(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    (tmp_path / "stop").touch()
    command = [sys.executable, str(WORKER), str(tmp_path / "stop")]
    done = run_launcher("-np", "2", *command, env={"HVDLITE_REPORT": str(path)})
    assert done.returncode == 0
    assert f"HVDLITE_REPORT is for other launchers; give hvdlite-run --report {path}" in done.stderr
    assert not path.exists()
