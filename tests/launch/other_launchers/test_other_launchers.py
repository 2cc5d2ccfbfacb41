"""Worlds that other launchers start: the real torchrun, Open MPI 5 and 4, MPICH, and Slurm."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from clusters import slurm
from faults.ports import free_port
from harness import base_environment
from patience import HANG

LONGEST = 4 * HANG  # On a crowded machine torchrun alone may take a minute to start.
PROGRAM = [sys.executable, str(Path(__file__).with_name("report_placement.py"))]
BIN = Path(sys.executable).parent
# The wheels of Open MPI and MPICH both have an mpirun, so each is called by a name of its own.
OPEN_MPI = [str(BIN / "prterun"), "--personality", "ompi", "--allow-run-as-root", "--oversubscribe"]
MPICH = [str(BIN / "mpiexec.hydra")]
PIPES: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
Process: TypeAlias = "subprocess.Popen[str]"


def environment(**more: str) -> dict[str, str]:
    own = base_environment()
    folders = [str(Path(__file__).parents[2]), own.get("PYTHONPATH", "")]
    return {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(filter(None, folders)), **more}


def run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *PROGRAM],
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )


def placements(done: subprocess.CompletedProcess[str]) -> dict[int, list[int]]:
    """Return, by rank: size, sum of ranks, local rank, local size, cross rank, cross size."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("placement ")]
    return {int(line[1]): [int(number) for number in line[2:]] for line in lines}


def assert_one_host(done: subprocess.CompletedProcess[str], size: int) -> None:
    """Check that all ranks are there, the sum is right, and every local rank exists once."""
    found = placements(done)
    total = sum(range(size))
    assert sorted(found) == list(range(size))
    assert sorted(placement[2] for placement in found.values()) == list(range(size))
    for placement in found.values():
        assert placement[:2] == [size, total]
        assert placement[3:] == [size, 0, 1]


def test_torchrun() -> None:
    done = subprocess.run(
        [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "3", PROGRAM[1]],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert_one_host(done, 3)


def start_with_tf_config(kind: str, index: int, cluster: dict[str, list[str]]) -> Process:
    config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
    return subprocess.Popen(PROGRAM, env=environment(TF_CONFIG=config), **PIPES)


def test_chief_and_worker_of_tf_config() -> None:
    """Two processes that cluster software would start for TensorFlow make one world."""
    cluster = {kind: [f"localhost:{free_port()}"] for kind in ("worker", "chief")}
    ranks = [start_with_tf_config(kind, 0, cluster) for kind in ("worker", "chief")]
    outputs = [rank.communicate(timeout=LONGEST) for rank in ranks]
    status = max(rank.returncode for rank in ranks)
    stdout, stderr = ("".join(part) for part in zip(*outputs, strict=True))
    assert_one_host(subprocess.CompletedProcess([], status, stdout, stderr), 2)


def test_open_mpi_5() -> None:
    assert_one_host(run(*OPEN_MPI, "-n", "3"), 3)


@pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="Debian's Open MPI 4 is missing")
def test_open_mpi_4() -> None:
    assert_one_host(
        run("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "3"),
        3,
    )


def test_mpich() -> None:
    assert_one_host(run(*MPICH, "-n", "4"), 4)


def test_mpich_started_through_a_shell() -> None:
    """Ranks without a common parent find the common ancestor that started them."""
    done = subprocess.run(
        [*MPICH, "-n", "3", "sh", "-c", '"$0" "$1"; exit $?', *PROGRAM],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert_one_host(done, 3)


def test_two_jobs_of_mpich_at_once_do_not_meet() -> None:
    jobs = [
        subprocess.Popen(
            [*MPICH, "-n", "2", *PROGRAM], env=environment(), stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for job in jobs:
        stdout, _ = job.communicate(timeout=LONGEST)
        assert_one_host(subprocess.CompletedProcess([], job.returncode, stdout, ""), 2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    reason = slurm.why_not()
    if reason:
        pytest.skip(reason)
    with slurm.Slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def test_slurm_on_two_nodes(cluster: slurm.Slurm) -> None:
    own = environment(
        HVDLITE_TOKEN=secrets.token_hex(32),
        HVDLITE_RENDEZVOUS=f"{cluster.hosts.addresses[0]}:23456",
    )
    found = placements(cluster.run("srun", "-N2", "-n4", *PROGRAM, env=own))
    assert sorted(found) == [0, 1, 2, 3]
    assert {tuple(placement[:2]) for placement in found.values()} == {(4, 6)}
    assert Counter((placement[2], placement[4]) for placement in found.values()) == Counter(
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    )
    assert {(placement[3], placement[5]) for placement in found.values()} == {(2, 2)}
