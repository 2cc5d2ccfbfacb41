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
from multihost.bed import MARK, Bed, end, finish, python
from patience import Stopwatch, wait_until

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
def test_training_on_three_hosts_gives_one_model(bed: Bed, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import torch, hvdlite.torch as hvd
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
data = torch.randn(20, 32, 8, generator=torch.Generator().manual_seed(1))
for batch in data[:, hvd.rank() :: hvd.size()]:
    optimizer.zero_grad()
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
total = sum(float(value.double().sum()) for value in model.state_dict().values())
print(hvd.size(), f"{total:.12f}", f"{hvd.allreduce(loss.detach()).item():.9f}")
torch.distributed.init_process_group("hvdlite")
torch.distributed.all_reduce(loss.detach(), group=torch.distributed.new_group(range(4)))
torch.distributed.destroy_process_group()
""")
    status, stdout, stderr, _ = ended(
        bed, "--hostfile", str(hostfile(tmp_path)), sys.executable, "train.py", cwd=tmp_path
    )
    assert status == 0, stderr
    lines = [line.partition("] ")[2] for line in stdout.splitlines()]
    assert len(lines) == 4 and len(set(lines)) == 1, stdout
    assert lines[0].startswith("4 ")


def hostfile(folder: Path) -> Path:
    file = folder / "my hosts"
    file.write_text("# three hosts\nnode1\nnode2:1   # one rank\nnode3 slots=2\n")
    return file


@pytest.mark.long
def test_launcher_need_not_be_one_of_the_hosts(bed: Bed) -> None:
    code = LOOP + "import socket; print(basics.rank(), socket.gethostname())"
    status, stdout, stderr, _ = ended(bed, "-np", "2", "-H", "node2,node3:4", *python(code))
    assert status == 0, stderr
    assert {"[0] 0 node2", "[1] 1 node3"} <= set(stdout.splitlines())


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


@pytest.fixture
def end_of(bed: Bed, tmp_path: Path) -> Iterator[Callable[..., tuple[int, str, str, float]]]:
    """Run a job, and count the seconds from the moment in which a rank makes the file argv[1]."""
    happened, started = tmp_path / "happened", []

    def run(code: str, *options: str) -> tuple[int, str, str, float]:
        launcher = bed.start_launcher(*THREE, *options, *python(code, happened))
        started.append(launcher)
        wait_until(lambda: happened.exists() or launcher.poll() is not None, "what the rank does")
        return finish(launcher)

    yield run
    for launcher in started:
        end(launcher)


EndOf = Callable[..., tuple[int, str, str, float]]


@pytest.mark.long
def test_exception_on_another_host_is_what_the_user_sees_last(end_of: EndOf) -> None:
    code = LOOP + (
        "for i in range(10**9):\n"
        "    if basics.rank() == 3 and i == 20:\n"
        "        open(sys.argv[1], 'w').close()\n"
        "        raise ValueError('boom at step 20')\n"
        "    step()\n"
    )
    status, _, stderr, seconds = end_of(code)
    assert status == 1
    assert seconds <= 4.0
    assert re.search(r"hvdlite-run: rank 3 \(host node3, pid \d+\) failed first: ", stderr)
    assert stderr.endswith("    ValueError: boom at step 20\n")


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


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_to_the_launcher_ends_all_hosts(
    bed: Bed, start: Callable[..., subprocess.Popen[bytes]], number: int, status: int
) -> None:
    launcher = start()
    signal_launcher(bed, number)
    code, _, stderr, seconds = finish(launcher)
    assert code == status
    assert seconds <= 4.0
    # A rank may notice that a rank of another host has gone before its own signal arrives. The
    # signal may also meet Python while it shows that error; Python says so in several ways.
    shown = set(re.findall(r"^ *\[\d\] ([\w.]+(?:Error|Interrupt))\b", stderr, re.MULTILINE))
    assert shown <= {"KeyboardInterrupt", "hvdlite.errors.RankFailedError"}, stderr
    assert "failed first" not in stderr
    assert bed.seconds_until_gone() < 0.5


def signal_launcher(bed: Bed, number: int) -> None:
    (pid,) = bed.processes(0, "hvdlite.launch\0--ssh-config")
    os.kill(pid, number)


@pytest.mark.long
def test_ranks_that_ignore_sigterm_are_killed_everywhere(end_of: EndOf) -> None:
    code = (
        "import glob, os, sys, time, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "rank, path = os.environ['HVDLITE_RANK'], sys.argv[1]\n"
        "if rank == '0':\n"
        "    while len(glob.glob(path + '.ignored.?')) < 3: time.sleep(0.01)\n"
        "    open(path, 'w').close(); sys.exit(5)\n"
        "open(path + '.ignored.' + rank, 'w').close()\n"
        "time.sleep(600)"
    )
    status, _, _, seconds = end_of(code)
    assert status == 5
    assert seconds <= 8.0


@pytest.mark.long
def test_background_process_on_another_host_is_ended(bed: Bed) -> None:
    launcher = bed.start_launcher(
        "-H", "node2", "sh", "-c", "setsid sleep 600 & echo started; exit 0"
    )
    try:
        wait_for_lines(launcher, 1, b"started")
        status, _, stderr, seconds = finish(launcher)
    finally:
        end(launcher)
    assert status == 0, stderr
    assert seconds <= 6.0


@pytest.mark.long
def test_background_process_on_another_host_may_finish_its_work_first(bed: Bed) -> None:
    status, stdout, stderr, _ = ended(
        bed, "-H", "node2", "sh", "-c", "(sleep 0.4; echo cleaned up) & exit 0"
    )
    assert status == 0, stderr
    assert stdout == "[0] cleaned up\n"


@pytest.mark.long
def test_each_rank_is_asked_once_to_go(
    bed: Bed, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    code = (
        "import signal, sys, time\n"
        "def go(*_):\n    print('asked', flush=True); time.sleep(0.3); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, go)\nprint('ready', flush=True)\n"
        "while True: time.sleep(0.05)"
    )
    launcher = start(code)
    signal_launcher(bed, signal.SIGTERM)
    _, stdout, _, _ = finish(launcher)
    assert sorted(stdout.splitlines()) == [f"[{rank}] asked" for rank in range(4)]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_of_all_hosts_are_told_by_the_users_signal_and_may_save(
    bed: Bed, start: Callable[..., subprocess.Popen[bytes]], number: int
) -> None:
    code = (
        "import signal, time\n"
        "def told(number, _):\n"
        "    print('told', int(number), flush=True); time.sleep(2.5); raise SystemExit('saved')\n"
        "for one in (signal.SIGINT, signal.SIGTERM): signal.signal(one, told)\n"
        "print('ready', flush=True)\nwhile True: time.sleep(0.05)"
    )
    launcher = start(code)
    signal_launcher(bed, number)
    status, stdout, stderr, _ = finish(launcher)
    assert status == 128 + number
    assert sorted(stdout.splitlines()) == [f"[{rank}] told {int(number)}" for rank in range(4)]
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
def test_link_that_goes_down_ends_both_sides(
    bed: Bed, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    launcher = start()
    down = Stopwatch()
    bed.set_link(2, up=False)
    status, _, stderr, _ = finish(launcher)
    assert down.seconds() <= 25.0
    # Either ssh notices first and ends the job, or the ranks whose connections to that host break.
    assert status in (1, 255)
    assert re.search(r"lost the connection to its host|RankFailedError: rank [23] ", stderr), stderr
    # The launcher cannot reach that host, so the agent there must notice it.
    assert bed.seconds_until_gone() <= 35.0


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


@pytest.mark.long
def test_slow_link_changes_nothing_but_time(bed: Bed) -> None:
    bed.limit_rate(1, "20mbit")
    check_sums(bed)


@pytest.mark.long
def test_lost_packets_change_nothing_but_time(bed: Bed) -> None:
    for host in range(3):
        bed.lose_packets(host, 10)
    check_sums(bed)


def check_sums(bed: Bed) -> None:
    code = (
        "import numpy as np\nfrom faults.arrays import reduce_array\nfrom hvdlite import basics\n"
        "basics.init()\n"
        "for step in range(10):\n"
        "    array = np.arange(100_000, dtype='int64') * (basics.rank() + step)\n"
        "    reduce_array(array, 'big')\n"
        "    assert (array == np.arange(100_000) * (6 + 4 * step)).all()\n"
        "print('well')"
    )
    tests = str(Path(__file__).parents[1])
    status, stdout, stderr, _ = ended(bed, *THREE, *python(code), env={"PYTHONPATH": tests})
    assert status == 0, stderr
    assert stdout.count("well") == 4


def test_neither_secret_nor_environment_is_on_a_command_line(
    bed: Bed, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    start()
    for host in range(3):
        (pid, *_) = bed.processes(host, MARK + "=")
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        (token,) = [item[14:] for item in environ if item.startswith(b"HVDLITE_TOKEN=")]
        assert len(token) == 64
        for other in range(3):
            shown = bed.run(other, "ps", "-e", "-ww", "-o", "args").stdout
            assert "hvdlite" in shown
            assert token.decode() not in shown
            assert "HVDLITE_" not in shown and "OMP_NUM" not in shown


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
