"""`hvdlite-run --live-page`: its words on the command line, its errors, and a real job."""

from __future__ import annotations

import json
import re
import secrets
import socket
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hvdlite.launch.command.config_file import arguments_from
from hvdlite.launch.command.flags import build_parser
from launcher import end_launcher, run_launcher, start_launcher
from patience import HANG, wait_until

WORKER = Path(__file__).with_name("training_worker.py")


@pytest.mark.parametrize(
    ("line", "address", "command"),
    [
        ("-np 2 python train.py", None, "python train.py"),
        ("-np 2 --live-page python train.py", "127.0.0.1:0", "python train.py"),
        ("--live-page -np 2 python -m train", "127.0.0.1:0", "python -m train"),
        ("-np 2 --live-page python -m train", "127.0.0.1:0", "python -m train"),
        ("-np 2 --live-page train.py", "127.0.0.1:0", "train.py"),
        ("--live-page 10.0.0.1:9100 -np 2 python train.py", "10.0.0.1:9100", "python train.py"),
        ("--live-page=10.0.0.1:9100 -np 2 python train.py", "10.0.0.1:9100", "python train.py"),
        ("-np 2 --live-page node1:0 -- python train.py", "node1:0", "-- python train.py"),
        ("-np 2 --live-page [::1]:0 train.py", "[::1]:0", "train.py"),
        ("-np 2 --live-page 9100 train.py", "9100", "train.py"),
        ("-np 2 python train.py --live-page 1:2", None, "python train.py --live-page 1:2"),
        ("-np 2 --live-page python a.py --live-page", "127.0.0.1:0", "python a.py --live-page"),
        ("--live-page 1:2 --check-finite 1 -np 2 train.py", "1:2", "train.py"),
        ("--check-finite --live-page 1:2 -np 2 train.py", "1:2", "train.py"),
    ],
)
def test_an_address_may_follow_the_flag(line: str, address: str | None, command: str) -> None:
    options = build_parser().parse_args(line.split())
    assert (options.live_page, " ".join(options.command)) == (address, command)
    assert options.num_proc == 2


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("live-page: true", "127.0.0.1:0"),
        ("live-page: false", None),
        ("live-page: 10.0.0.1:9100", "10.0.0.1:9100"),
    ],
)
def test_a_configuration_file_may_have_the_flag(text: str, address: str | None) -> None:
    parser = build_parser()
    words = arguments_from(f"{text}\nnum-proc: 2\n", "job.yaml", parser)
    options = parser.parse_args([*words, "python", "train.py"])
    assert (options.live_page, options.num_proc) == (address, 2)
    assert options.command == ["python", "train.py"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--live-page", "192.0.2.1:0"], "it is not an address of this host"),
        (["--live-page", "9100"], "give a host and a port"),
        (["--live-page", "--live-token-file", "/nothing"], "/nothing: No such file"),
        (["--live-token-file", "/nothing"], "belongs to --live-page"),
    ],
)
def test_what_cannot_be_used_ends_the_job_before_it_begins(words: list[str], message: str) -> None:
    done = run_launcher("-np", "2", *words, sys.executable, "-c", "print('began')")
    assert done.returncode == 2
    assert message in done.stderr
    assert "began" not in done.stdout


def test_a_port_in_use_ends_the_job_before_it_begins() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run_launcher("-np", "1", "--live-page", address, sys.executable, "-c", "print(1)")
    assert done.returncode == 2
    assert "another program listens there; give another port, or 0 for a free one" in done.stderr


def test_a_missing_package_ends_the_job_before_it_begins(tmp_path: Path) -> None:
    site = tmp_path / "sitecustomize.py"
    site.write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'uvicorn' else find(name, *rest)\n"
    )
    path = [str(tmp_path), *sys.path]
    env = {"PYTHONPATH": ":".join(filter(None, path))}
    done = run_launcher("-np", "1", "--live-page", sys.executable, "-c", "print(1)", env=env)
    assert done.returncode == 2
    assert "--live-page needs the package uvicorn: pip install 'hvdlite[live]'" in done.stderr


def fetch(address: str, token: str) -> bytes:
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=HANG) as answer:
        return answer.read()


def wait_for_steps(address: str, token: str, more_than: int = 30) -> dict[str, Any]:
    """Wait until both ranks have made steps, and the late one is waited for longer on the whole."""
    told: dict[str, Any] = {}

    def are_made() -> bool:
        told.update(json.loads(fetch(f"{address}state.json", token)))
        if not told["job"] or len(told["ranks"]) != 2:
            return False
        first, last = (rank["waiting"] for rank in told["ranks"])
        return told["job"]["steps"] > more_than and first > last

    wait_until(are_made, f"more than {more_than} steps of two ranks, of which the first one waits")
    return told


def test_a_job_of_two_ranks_is_shown_until_its_end(tmp_path: Path) -> None:
    pytest.importorskip("hvdlite.live.page", reason="hvdlite[live] is missing")
    stop, file, token = tmp_path / "stop", tmp_path / "token", secrets.token_hex(32)
    file.write_text(token)
    file.chmod(0o600)
    words = ["-np", "2", "--live-page", "--live-token-file", str(file)]
    process = start_launcher(*words, sys.executable, str(WORKER), str(stop), "0.03")
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, b"")
        found = (re.search(rb"live page: (http://127\.0\.0\.1:\d+/)\?token", one) for one in lines)
        address = next(one for one in found if one)[1].decode()
        told = wait_for_steps(address, token)
        assert told["program"] == "training_worker.py"
        assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
        assert all(rank["rss"] > 1 << 20 for rank in told["ranks"])
        assert told["job"]["samples"] > 0
        assert 0 < told["job"]["values"]["loss"] < 1
        metrics = fetch(f"{address}metrics", token).decode()
        for rank in (0, 1):
            series = f'hvdlite_rank_up{{host="{socket.gethostname()}",rank="{rank}"}} 1.0'
            assert series in metrics
        request = urllib.request.Request(
            f"{address}events", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=HANG) as stream, ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(urllib.request.urlopen(request, timeout=HANG))  # never read
            wait_for_steps(address, token, more_than=told["job"]["steps"] + 30)
            stop.touch()
            states = [json.loads(line[6:]) for line in stream if line.startswith(b"data: ")]
        assert process.wait(HANG) == 0
        assert states[-1]["outcome"] == "all ranks have done their work"
        assert states[-1]["job"]["steps"] >= told["job"]["steps"]
        assert token.encode() not in process.stderr.read()
    finally:
        end_launcher(process)


def test_the_page_tells_which_rank_has_failed(tmp_path: Path) -> None:
    pytest.importorskip("hvdlite.live.page", reason="hvdlite[live] is missing")
    script = (
        "import os, sys, time\n"
        "while os.environ['HVDLITE_RANK'] == '0' or not os.path.exists(sys.argv[1]):\n"
        "    time.sleep(0.01)\n"
        "os._exit(3)"
    )
    go = tmp_path / "go"
    process = start_launcher("-np", "2", "--live-page", sys.executable, "-c", script, str(go))
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, b"")
        found = (re.search(rb"live page: (http://\S+)\?token=(\S+)", one) for one in lines)
        address, token = next(one for one in found if one).groups()
        request = urllib.request.Request(
            f"{address.decode()}events", headers={"Authorization": f"Bearer {token.decode()}"}
        )
        with urllib.request.urlopen(request, timeout=HANG) as stream:
            go.touch()
            states = [json.loads(line[6:]) for line in stream if line.startswith(b"data: ")]
        assert process.wait(HANG) == 3
        assert re.match(r"rank 1 \(host .*\) failed first: .*3", states[-1]["outcome"])
    finally:
        end_launcher(process)
