"""`dist.init_process_group("hvdlite")` under each launcher, and examples/torch_ddp.py.

A short script starts and ends as a user's does; the programs of the example are forked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import base_environment
from pythons import forking_torchrun, python_with

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "torch_ddp.py"
HVDLITE_RUN = [sys.executable, "-m", "hvdlite.launch", "-np", "2", sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MPICH = [str(Path(sys.executable).parent / "mpiexec.hydra"), "-n", "2", sys.executable]
OPEN_MPI = [
    *(str(Path(sys.executable).parent / "prterun"), "--personality", "ompi"),
    *("--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable),
]
LAUNCHERS = {"hvdlite-run": HVDLITE_RUN, "torchrun": TORCHRUN, "MPICH": MPICH, "Open MPI": OPEN_MPI}

# Nothing of hvdlite is imported; a hvd.init() after it has its own world.
SUMS = """
import os, sys

import torch
import torch.distributed as dist

def listens():
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
    sockets = {f"socket:[{line[9]}]" for line in lines if line[3] == "0A"}
    files = {os.readlink(f"/proc/self/fd/{one.name}") for one in os.scandir("/proc/self/fd")
             if os.path.lexists(f"/proc/self/fd/{one.name}")}
    return sockets & files

inherited = listens()  # from mpiexec
for _ in range(2):
    dist.init_process_group("hvdlite")
    assert listens() == inherited, "a stranger could connect to the store"
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    dist.destroy_process_group()
import hvdlite.torch as hvd

hvd.init()
again = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
sys.stdout.write(f"sums {total.item()} {again.item()}\\n")
"""


def run(command: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *more],
        env={**base_environment(), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "hvdlite-run" else pytest.mark.long)
        for name in LAUNCHERS
    ],
)
def test_no_import_is_needed(name: str, tmp_path: Path) -> None:
    if not Path(LAUNCHERS[name][0]).exists():
        pytest.skip(f"{LAUNCHERS[name][0]} is not installed")
    script = tmp_path / "sums.py"
    script.write_text(SUMS)
    done = run(LAUNCHERS[name], str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sums 3.0 3.0") == 2, done.stdout + done.stderr


@pytest.mark.long
def test_the_example_learns_what_one_rank_learns(tmp_path: Path) -> None:
    forking = python_with("torch._dynamo", "sklearn.datasets", "matplotlib.pyplot")
    curves = []
    for command in (forking_torchrun(forking, 2), [*HVDLITE_RUN[:-1], forking]):
        done = run(command, str(EXAMPLE), "--epochs", "2", "--output", str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert "on 2 rank(s)" in done.stdout
        curves.append(json.loads((tmp_path / "ddp.json").read_text()))
    digits = str(EXAMPLE.with_name("torch_digits.py"))
    one = run([forking], digits, "--epochs", "2", "--output", str(tmp_path))
    assert one.returncode == 0, one.stderr
    alone = json.loads((tmp_path / "digits-1.json").read_text())["losses"]
    assert curves[0] == curves[1]
    assert max(abs(a - b) for a, b in zip(curves[0], alone, strict=True)) < 1e-3


def test_a_rank_explains_that_an_elastic_job_has_no_process_group(tmp_path: Path) -> None:
    script = tmp_path / "sums.py"
    script.write_text(SUMS)
    elastic = [*HVDLITE_RUN[:-1], "--min-np", "2", sys.executable]
    done = run(elastic, str(script))
    assert done.returncode != 0
    assert "start without --min-np and --max-np" in done.stdout + done.stderr


RPC = """
import os, sys, torch, torch.distributed as dist
from torch.distributed import rpc

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
dist.init_process_group("hvdlite")
total = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(1), 1))
rpc.shutdown()
dist.all_reduce(total, group=dist.new_group([0, 1]))
sys.stdout.write(f"sum {total.item()}\\n")
"""


def test_a_process_group_leaves_the_store_to_rpc(tmp_path: Path) -> None:
    script = tmp_path / "rpc.py"
    script.write_text(RPC)
    done = run(HVDLITE_RUN, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 4.0") == 2, done.stdout + done.stderr
