"""examples/torch_digits.py, unchanged, has the same losses to the bit under every launcher.

A launcher is a function in `LAUNCHERS`: it runs the example with two ranks, and rank 0 writes the
losses to the given folder.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from clusters.slurm import Slurm
from harness import base_environment
from multihost.bed import Bed, end, finish

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_digits.py"
BIN = Path(sys.executable).parent
SECONDS = 100


def example(folder: Path) -> list[str]:
    """Return the example's command, without the Python that runs it."""
    return [str(EXAMPLE), "--epochs", "1", "--device", "cpu", "--output", str(folder)]


def environment(**more: str) -> dict[str, str]:
    return {**base_environment(), "OMP_NUM_THREADS": "1", **more}


def run(*command: str, env: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        command,
        env=environment() if env is None else env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def torchrun(folder: Path, request: pytest.FixtureRequest) -> None:
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run(*agent, "--nproc-per-node", "2", *example(folder))


def mpirun(folder: Path, request: pytest.FixtureRequest) -> None:
    flags = ["--personality", "ompi", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    run(str(BIN / "prterun"), *flags, sys.executable, *example(folder))


def srun(folder: Path, request: pytest.FixtureRequest) -> None:
    cluster: Slurm = request.getfixturevalue("slurm")
    env = environment(HVDLITE_TOKEN=secrets.token_hex(32))
    ranks = ["srun", "-N2", "-n2", sys.executable, *example(folder)]
    done = cluster.run(*ranks, env=env, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


def node_mode(folder: Path, request: pytest.FixtureRequest) -> None:
    bed: Bed = request.getfixturevalue("bed")
    env = {"HVDLITE_TOKEN": secrets.token_hex(32)}
    nodes = [
        bed.start_launcher(
            *("--nodes", "2", "--node-rank", str(node), "--meet", "node1:23456", "-np", "1"),
            *(sys.executable, *example(folder)),
            host=node,
            env=env,
        )
        for node in (0, 1)
    ]
    try:
        for node in nodes:
            status, stdout, stderr, _ = finish(node, SECONDS)
            assert status == 0, stdout + stderr
    finally:
        for node in nodes:
            end(node)


LAUNCHERS: dict[str, Callable[[Path, pytest.FixtureRequest], None]] = {
    "torchrun": torchrun,
    "mpirun": mpirun,
    "srun": srun,
    "node mode": node_mode,
}


MARKS = {"srun": pytest.mark.slurm}  # of the tests of launchers that need a cluster system


def marks_of(launcher: str) -> list[pytest.MarkDecorator]:
    return [MARKS[launcher]] if launcher in MARKS else []


def losses(folder: Path) -> list[float]:
    (curve,) = json.loads((folder / "loss.json").read_text()).values()
    return list(curve)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses under hvdlite-run."""
    folder = tmp_path_factory.mktemp("hvdlite-run")
    run(sys.executable, "-m", "hvdlite.launch", "-np", "2", sys.executable, *example(folder))
    return losses(folder)


@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=marks_of(name)) for name in LAUNCHERS]
)
def test_losses_are_those_under_hvdlite_run(
    launcher: str, expected: list[float], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    LAUNCHERS[launcher](tmp_path, request)
    assert losses(tmp_path) == expected
