"""Jobs whose ranks run collectives: the launcher's report when hvdlite tells ranks of a failure."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from launch.marked import MarkedJob, listening_inodes, python, sockets_of
from launcher import run_launcher

LOOP = """
import ctypes, os, sys, time
from hvdlite import _core, basics
basics.init()
memory = (ctypes.c_float * 1024)(1.0)
address = ctypes.addressof(memory)
tensor = _core.Tensor("step", _core.DTYPES["float32"], [1024], address, address)
def step():
    basics.engine().allreduce("step", [tensor], _core.REDUCE_OPS["average"], keep=memory).wait()
step()
print("ready", flush=True)
"""


def test_exception_of_one_rank_is_what_the_user_sees_last() -> None:
    code = LOOP + (
        "for i in range(10**9):\n"
        "    if basics.rank() == 1 and i == 20:\n"
        "        print('ready to raise', flush=True)\n"
        "        raise ValueError('boom at step 20')\n"
        "    step()\n"
    )
    with MarkedJob(3, *python(code)) as job:
        job.wait_until_ready(4)
        job.event()
        status, _, stderr, seconds = job.finish()
        assert job.alive() == []
    assert status == 1
    assert seconds <= 3.0
    assert "hvdlite-run: rank 1 (host " in stderr
    assert stderr.endswith("    ValueError: boom at step 20\n")
    assert "rank 1 raised ValueError: boom at step 20" in stderr


def test_killed_rank_is_named_though_others_raise() -> None:
    with MarkedJob(3, *python(LOOP + "while True: step()")) as job:
        job.wait_until_ready(3)
        victim = job.alive("HVDLITE_RANK=2")[0]
        job.event()
        os.kill(victim, signal.SIGKILL)
        status, _, stderr, seconds = job.finish()
        assert job.alive() == []
    assert seconds <= 3.0
    assert status == 128 + signal.SIGKILL
    assert "hvdlite-run: rank 2 (host " in stderr
    assert f"pid {victim}) failed first: killed by SIGKILL" in stderr


def test_nothing_listens_once_the_ranks_are_connected() -> None:
    with MarkedJob(3, *python(LOOP + "time.sleep(600)")) as job:
        job.wait_until_ready(3)
        assert not listening_inodes() & sockets_of(job.alive())


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_worker_process_that_runs_the_script_again_is_told_how_not_to(
    tmp_path: Path, method: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing, sys\nfrom hvdlite import basics\nbasics.init()\n"
        f"worker = multiprocessing.get_context({method!r}).Process(target=print)\n"
        "worker.start(); worker.join(); sys.exit(worker.exitcode)\n"
    )
    result = run_launcher("-np", "2", sys.executable, str(script))
    assert result.returncode == 1
    told = r"this process is a child of rank [01] that runs the script again"
    assert re.search(told, result.stderr), result.stderr
    assert 'under `if __name__ == "__main__":`' in result.stderr


MIXED_UP = """
import hvdlite.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(3 + hvd.rank()))
"""
BY_TORCH = """
from torch import distributed, nn
distributed.init_process_group("hvdlite")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
for step in range(3):
    width = 5 if step == distributed.get_rank() == 1 else 4
    model(torch.ones(1, width)).sum().backward()
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (MIXED_UP, "Error: allreduce.0: ranks disagree about the shape: rank 0 has [3], rank 1"),
        (BY_TORCH, "errors.RankFailedError: rank 1 raised RuntimeError: mat1 and mat2 shapes"),
    ],
)
def test_errors_show_the_lines_of_the_script_alone(tmp_path: Path, code: str, words: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch" + code)
    text = run_launcher("-np", "2", sys.executable, str(script)).stderr
    own = [line for line in text.splitlines() if line.startswith("[0] ")]
    assert len([line for line in own if " File " in line]) == 1 and " At:" not in text, text
    assert words in own[-1], text
    assert "-packages" not in own[-1] and "-packages" not in text.partition("hvdlite-run: rank")[2]
