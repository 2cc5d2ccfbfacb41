"""Under other launchers, rank 0 serves the page by itself: HVDLITE_LIVE_SERVE."""

from __future__ import annotations

import json
import re
import secrets
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hvdlite.live.page", reason="hvdlite[live] is missing", exc_type=ImportError)

from faults.ports import free_port
from harness import base_environment
from patience import HANG, wait_until

WORKER = Path(__file__).with_name("training_worker.py")


class Ranks:
    """Two ranks that a script of the user's own has started."""

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
        command = [sys.executable, str(WORKER), str(self._stop)]
        with open(self.stderr, "wb") as stderr:
            self.processes = [
                subprocess.Popen(
                    command,
                    env={**environment, "HVDLITE_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                )
                for rank in range(2)
            ]

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the ranks have written this to stderr."""

        def find() -> re.Match[str] | None:
            assert self.processes[0].poll() is None, self.stderr.read_text()
            return re.search(pattern, self.stderr.read_text())

        wait_until(find, pattern)
        found = find()
        assert found is not None
        return found

    def end(self) -> None:
        """Let the ranks end, and check that all went well."""
        self._stop.touch()
        for process in self.processes:
            process.communicate(timeout=HANG)
            assert process.returncode == 0, self.stderr.read_text()

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


def fetch(address: str, token: str) -> bytes:
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=HANG) as answer:
        return answer.read()


def fetch_state(address: str, token: str) -> dict[str, Any]:
    return json.loads(fetch(f"{address}state.json", token))


def test_rank_0_serves_page_and_metrics(start: Any) -> None:
    ranks = start(HVDLITE_LIVE_SERVE="127.0.0.1:0")
    found = ranks.wait_for(r"hvdlite \[0\] live page: (http://127\.0\.0\.1:\d+/)\?token=(\S+)\n")
    address, token = found.groups()
    told: dict[str, Any] = {}

    def are_made() -> bool:
        told.update(fetch_state(address, token))
        return told["job"] is not None and told["job"]["steps"] > 20 and len(told["ranks"]) == 2

    wait_until(are_made, "more than 20 steps of two ranks")
    first, second = told["ranks"]
    assert first["host"] == socket.gethostname()
    assert first["rss"] > 1 << 20
    assert (second["host"], second["rss"], second["cpu"]) == ("an unknown host", None, None)
    phases = ("backward", "waiting", "communicating", "between")
    both = sum(rank[name] for rank in told["ranks"] for name in phases)
    assert both / 2 == pytest.approx(told["job"]["step"], rel=0.01)
    metrics = fetch(f"{address}metrics", token).decode()
    assert 'hvdlite_phase_seconds_total{phase="waiting",rank="1"}' in metrics
    assert f'hvdlite_rank_up{{host="{socket.gethostname()}",rank="0"}} 1.0' in metrics
    assert metrics.count("hvdlite_rank_up{") == 1
    stream = urllib.request.urlopen(
        urllib.request.Request(f"{address}events", headers={"Authorization": f"Bearer {token}"}),
        timeout=HANG,
    )
    with stream:
        ranks.end()
        last = [line for line in stream if line.startswith(b"data: ")][-1]
    assert json.loads(last[6:])["outcome"] == "all ranks have done their work"
    assert ranks.stderr.read_text().count("live page") == 1


def test_the_token_may_come_from_a_file(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = secrets.token_hex(32)
    file.write_text(token)
    file.chmod(0o600)
    ranks = start(HVDLITE_LIVE_SERVE="127.0.0.1:0", HVDLITE_LIVE_TOKEN_FILE=str(file))
    address = ranks.wait_for(r"live page: (http://127\.0\.0\.1:\d+/)")[1]
    assert fetch_state(address, token)["program"] == "training_worker.py"
    ranks.end()
    assert token not in ranks.stderr.read_text()


def test_a_port_in_use_does_not_end_the_training(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ranks = start(HVDLITE_LIVE_SERVE=address)
        ranks.wait_for(
            rf"hvdlite \[0\] warning: no live page: .* cannot listen at {address}: Address already "
            "in use; another program listens there; give another port"
        )
        ranks.end()
    assert ranks.stderr.read_text().count("\n") == 1


def test_a_missing_package_does_not_end_the_training(start: Any, tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ImportError('there is no uvicorn')")
    path = f"{tmp_path}:{base_environment().get('PYTHONPATH', '')}"
    ranks = start(HVDLITE_LIVE_SERVE="127.0.0.1:0", PYTHONPATH=path)
    ranks.wait_for(r"warning: no live page: there is no uvicorn; pip install 'hvdlite\[live\]'")
    ranks.end()
    assert ranks.stderr.read_text().count("\n") == 1
