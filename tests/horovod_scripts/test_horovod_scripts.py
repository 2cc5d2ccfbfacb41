"""Scripts in the style of Horovod's users give the losses of one process, unchanged.

Each script imports `horovod`, gives rank r of n the samples `[r::n]` of every batch, and prints the
means of its losses. With one rank it is a training on the whole batches, which is what the others
are compared with. That one starts and ends as a user's does; those of several ranks are forked from
a process that has imported their framework.
"""

from __future__ import annotations

import math
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

# By script: ranks, and how far losses may differ, relatively. In bfloat16, numbers have three
# digits; elsewhere it is float32 (and float64) whose sums are made in another order.
PYTORCH = {
    "torch_ignite": (2, 1e-5),  # first, because it wants to call init() itself
    "torch_accelerate": (2, 1e-5),
    "torch_accumulation": (3, 1e-5),
    "torch_amp": (2, 2e-2),
    "torch_embedding": (3, 1e-5),
    "torch_gan": (2, 1e-5),
    "torch_lbfgs": (2, 1e-10),
    "torch_lightning": (2, 1e-5),
    "torch_lightning_gan": (2, 1e-5),
    "torch_loaders": (2, 1e-4),
    "torch_resume": (2, 1e-5),
    "torch_trainer": (2, 1e-5),
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
def pytorch_alone() -> Losses:
    return losses_of(1, list(PYTORCH))


@pytest.fixture(scope="module")
def pytorch_together() -> Losses:
    """Run all scripts of so many ranks in one world, which each of them begins with init()."""
    found: Losses = {}
    for ranks in {ranks for ranks, _ in PYTORCH.values()}:
        found |= losses_of(ranks, [name for name in PYTORCH if PYTORCH[name][0] == ranks])
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", PYTORCH)
def test_pytorch(pytorch_alone: Losses, pytorch_together: Losses, name: str) -> None:
    check_same(pytorch_together, pytorch_alone, name, PYTORCH[name][1])


@pytest.mark.long
def test_gradient_scaler_skips_the_same_step_on_all_ranks(pytorch_alone: Losses) -> None:
    scales = [scale for _, scale in pytorch_alone["torch_amp"]]
    assert scales == [1024.0] * 3 + [512.0] * 5
    assert [math.isinf(loss) for loss, _ in pytorch_alone["torch_amp"]].index(True) == 3


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


@pytest.mark.long
def test_other_losses_are_noticed(pytorch_alone: Losses) -> None:
    changed = [[one * 1.001 for one in row] for row in pytorch_alone["torch_gan"]]
    with pytest.raises(AssertionError):
        check_same({"torch_gan": changed}, pytorch_alone, "torch_gan", PYTORCH["torch_gan"][1])


def test_every_script_is_run() -> None:
    scripts = {file.stem for file in HERE.glob("*.py") if not file.stem.startswith("test_")}
    elastic = {"elastic_torch", "elastic_keras"}  # test_elastic_scripts.py runs these
    assert scripts - {"in_turn"} == {*PYTORCH, *TENSORFLOW, *elastic}
