"""Scripts in the style of Horovod's users give the losses of one process, unchanged.

Each script imports `horovod`, gives rank r of n the samples `[r::n]` of every batch, and prints the
means of its losses. With one rank it is a training on the whole batches, which is what the others
are compared with. That one starts and ends as a user's does; those of several ranks are forked from
a process that has imported their framework.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher import end_launcher, run_launcher, start_launcher
from pythons import python_with

HERE = Path(__file__).resolve().parent
SECONDS = 240  # a busy machine of two cores compiles slowly
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2"}  # as in a job; Lightning looks

# By script: how far losses of two ranks may differ from those of one, relatively, since float32
# sums are made in another order.
PYTORCH = {
    "torch_ignite": 1e-5,  # first, because it wants to call init() itself
    "torch_accelerate": 1e-5,
    "torch_gan": 1e-5,
    "torch_lightning": 1e-5,
    "torch_lightning_gan": 1e-5,
    "torch_loaders": 1e-4,
    "torch_resume": 1e-5,
    "torch_trainer": 1e-5,
}
TENSORFLOW = {"keras_callbacks": 1e-4, "tensorflow_tape": 1e-4}

Losses = dict[str, list[list[float]]]


def command_of(ranks: int, scripts: Sequence[str]) -> list[str]:
    paths = [str(HERE / f"{name}.py") for name in scripts]
    in_turn = [] if len(paths) == 1 else [str(HERE / "in_turn.py")]
    python = sys.executable if ranks == 1 else forking_python(scripts)
    return ["-np", str(ranks), "--compat", python, *in_turn, *paths]


def forking_python(scripts: Sequence[str]) -> str:
    modules = ("torch._dynamo", "torch.utils.data") if scripts[0] in PYTORCH else ("tensorflow",)
    return python_with(*modules, TF_CPP_MIN_LOG_LEVEL="3")


def losses_in(stdout: str, scripts: Sequence[str]) -> Losses:
    """Read what rank 0 printed: rows of losses, by script."""
    found: Losses = {}
    name = scripts[0]
    for line in stdout.splitlines():
        prefix, word, *rest = line.split()
        if prefix == "[0]" and word == "script":
            (name,) = rest
        elif word == "loss":
            assert prefix == "[0]"
            found.setdefault(name, []).append([float(number) for number in rest])
    return found


def losses_of(ranks: int, scripts: Sequence[str]) -> Losses:
    result = run_launcher(*command_of(ranks, scripts), env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    return losses_in(result.stdout, scripts)


def check_same(found: Losses, alone: Losses, name: str, tolerance: float) -> None:
    together, expected = found[name], alone[name]
    assert len(together) == len(expected) >= 3
    for row, wanted in zip(together, expected, strict=True):
        assert row == pytest.approx(wanted, rel=tolerance), (row, wanted)


@pytest.fixture(scope="module")
def pytorch_runs() -> dict[int, Losses]:
    """Run all scripts in one process, and in two, where each of them begins a world with init()."""
    return {ranks: losses_of(ranks, list(PYTORCH)) for ranks in (1, 2)}


@pytest.mark.long
@pytest.mark.parametrize("name", PYTORCH)
def test_pytorch(pytorch_runs: dict[int, Losses], name: str) -> None:
    check_same(pytorch_runs[2], pytorch_runs[1], name, PYTORCH[name])


@pytest.fixture(scope="module")
def tensorflow_runs() -> dict[int, Losses]:
    """Run one process and two, at the same time."""
    runs = {}
    for ranks in (1, 2):
        command = command_of(ranks, list(TENSORFLOW))
        runs[ranks] = start_launcher(*command, env=ENVIRONMENT)
    found = {}
    try:
        for ranks, process in runs.items():
            stdout, stderr = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, stderr.decode()
            found[ranks] = losses_in(stdout.decode(), list(TENSORFLOW))
    finally:
        for process in runs.values():
            end_launcher(process)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", TENSORFLOW)
def test_tensorflow(tensorflow_runs: dict[int, Losses], name: str) -> None:
    check_same(tensorflow_runs[2], tensorflow_runs[1], name, TENSORFLOW[name])
