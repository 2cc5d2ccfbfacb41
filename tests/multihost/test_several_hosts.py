"""Jobs on three hosts: they work, report failures on other hosts, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.test_real_job import LOOP
from multihost.bed import Bed, end, finish, python
from patience import Stopwatch

THREE = ("-H", "node1:1,node2:1,node3:2")
FOREVER = LOOP + "while True: step()"


def wait_for_lines(launcher: subprocess.Popen[bytes], count: int, word: bytes = b"ready") -> None:
    """Read stdout until `count` lines with this word have come."""
    assert launcher.stdout is not None
    while count:
        line = launcher.stdout.readline()
        if not line:
            assert launcher.stderr is not None
            raise AssertionError(launcher.stderr.read().decode())
        count -= word in line


@pytest.fixture
def start(bed: Bed) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a job on all hosts and wait until its four ranks have reduced once."""
    started = []

    def start_job(code: str = FOREVER, *options: str) -> subprocess.Popen[bytes]:
        launcher = bed.start_launcher(*THREE, *options, *python(code))
        started.append(launcher)
        wait_for_lines(launcher, 4)
        return launcher

    yield start_job
    for launcher in started:
        end(launcher)


def ended(bed: Bed, *arguments: str, **options: object) -> tuple[int, str, str, float]:
    return finish(bed.start_launcher(*arguments, **options))


def test_job_ends_well(bed: Bed) -> None:
    code = LOOP + (
        "for _ in range(100): step()\n"
        "import socket\n"
        "print(basics.rank(), basics.local_rank(), basics.local_size(), basics.cross_rank(),\n"
        "      basics.cross_size(), socket.gethostname(),\n"
        "      os.environ['HOROVOD_HOSTNAME'], memory[0])"
    )
    status, stdout, stderr, _ = ended(bed, *THREE, *python(code))
    assert status == 0, stderr
    assert sorted(line for line in stdout.splitlines() if "ready" not in line) == [
        "[0] 0 0 1 0 3 node1 node1 1.0",
        "[1] 1 0 1 1 3 node2 node2 1.0",
        "[2] 2 0 2 2 3 node3 node3 1.0",
        "[3] 3 1 2 0 1 node3 node3 1.0",
    ]


@pytest.mark.long
def test_folder_and_environment_are_the_launchers(bed: Bed, tmp_path: Path) -> None:
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "train.py").write_text(
        "import os; print(os.getcwd(), repr(os.environ['MINE']), os.environ.get('SSH_CONNECTION'))"
    )
    mine = "two words, a 'quote' and\na new line; $(touch x)"
    status, stdout, stderr, _ = ended(
        bed, "-H", "node2", sys.executable, "train.py", env={"MINE": mine}, cwd=folder
    )
    assert status == 0, stderr
    assert stdout.startswith(f"[0] {folder} {mine!r} 10.77."), stdout


def test_killed_rank_of_another_host_is_named(
    bed: Bed, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    launcher = start()
    (victim,) = bed.processes(1, "HVDLITE_RANK=1")
    killed = Stopwatch()
    os.kill(victim, signal.SIGKILL)
    status, _, stderr, _ = finish(launcher)
    assert killed.seconds() <= 4.0
    assert status == 128 + signal.SIGKILL
    assert re.search(r"rank 1 \(host node2, pid \d+\) failed first: killed by SIGKILL", stderr)
    assert "rank 1 died: its connections closed without a goodbye" in stderr


def signal_launcher(bed: Bed, number: int) -> None:
    (pid,) = bed.processes(0, "hvdlite.launch\0--ssh-config")
    os.kill(pid, number)


def test_ranks_of_all_hosts_are_told_by_the_users_signal_and_may_save(
    bed: Bed, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    code = (
        "import signal, time\n"
        "def told(number, _):\n"
        "    print('told', int(number), flush=True); time.sleep(2.5); raise SystemExit('saved')\n"
        "for one in (signal.SIGINT, signal.SIGTERM): signal.signal(one, told)\n"
        "print('ready', flush=True)\nwhile True: time.sleep(0.05)"
    )
    launcher = start(code)
    signal_launcher(bed, signal.SIGTERM)
    status, stdout, stderr, _ = finish(launcher)
    assert status == 143
    assert sorted(stdout.splitlines()) == [f"[{rank}] told 15" for rank in range(4)]
    for rank in range(4):
        assert f"[{rank}] saved" in stderr


@pytest.mark.long
@pytest.mark.parametrize("way", ["killed", "grace"])
def test_grace_ends_everywhere_when_it_is_over_or_the_launcher_is(
    bed: Bed, start: Callable[..., subprocess.Popen[bytes]], way: str
) -> None:
    code = (
        "import signal, time\n"
        "def told(*_): print('told', flush=True)\n"
        "for one in (signal.SIGINT, signal.SIGTERM): signal.signal(one, told)\n"
        "print('ready', flush=True)\nwhile True: time.sleep(0.05)"
    )
    launcher = start(code, *(("--grace", "1") if way == "grace" else ("--grace", "300")))
    signal_launcher(bed, signal.SIGINT)
    wait_for_lines(launcher, 4, b"told")
    if way != "grace":
        signal_launcher(bed, signal.SIGKILL)
    finish(launcher)
    assert bed.seconds_until_gone() <= 4.0


@pytest.mark.long
def test_link_that_goes_down_under_talking_ranks(
    bed: Bed, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Only output crosses the link, and it fills every buffer on the way."""
    code = "import time\nprint('ready')\nwhile True: print('x' * 20_000); time.sleep(0.01)"
    launcher = start(code)
    bed.set_link(2, up=False)
    status, _, stderr, _ = finish(launcher)
    assert status == 255
    assert "(host node3, pid" in stderr and "lost the connection to its host" in stderr
    assert bed.seconds_until_gone() <= 40.0


def test_no_rank_listens_once_all_are_connected_and_the_launcher_at_one_address(
    bed: Bed, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Only the store keeps listening, for ranks that call init() again, at a single address."""
    start()
    for host in range(3):
        lines = bed.run(host, "ss", "-Htln").stdout.splitlines()
        others = [line.split()[3] for line in lines if ":2222" not in line]
        assert len(lines) - len(others) == 1, lines
        own = bed.addresses[:1] if host == 0 else []
        assert [one.rpartition(":")[0] for one in others] == own


def test_output_of_other_hosts_is_whole_and_complete(bed: Bed, tmp_path: Path) -> None:
    line = "x" * 99
    code = f"for i in range(20000): print('{line}')\nimport sys; print('end', file=sys.stderr)"
    status, stdout, stderr, _ = ended(
        bed, *THREE, "--output-filename", str(tmp_path / "out"), *python(code)
    )
    assert status == 0
    for rank in range(4):
        assert stdout.splitlines().count(f"[{rank}] {line}") == 20000
        assert (tmp_path / "out" / f"rank.{rank}" / "stdout").stat().st_size == 20000 * 100
        assert f"[{rank}] end" in stderr.splitlines()
