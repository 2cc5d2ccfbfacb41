"""The examples for PyTorch keep what their pages promise: accuracies, and the same loss curves.

Sums of other batches are rounded differently, and training makes such differences grow: how fast
depends on the processor. So curves are compared closely at first, and by their course later.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pythons import python_with

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
# What the examples import, apart from hvdlite.
DIGITS = ("torch._dynamo", "sklearn.datasets", "matplotlib.pyplot")
PARALLEL = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining")
PARALLEL += ("torch.distributed.tensor.parallel", "sklearn.datasets")


def run(ranks: int, folder: Path, *command: str, timeout: int = 240, **environment: str) -> str:
    """Run a command of Python on so many ranks, with 0 without a launcher; return what it says."""
    launcher = [sys.executable, "-m", "hvdlite.launch", "-np", str(ranks)] if ranks else []
    done = subprocess.run(
        [*launcher, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def digits(ranks: int, folder: Path, *arguments: str) -> tuple[str, list[float]]:
    """Run torch_digits.py; return its output, and the losses that it saved.

    Two ranks start and end as a user's do; the others are forked.
    """
    python = sys.executable if ranks == 2 else python_with(*DIGITS)
    example = str(EXAMPLES / "torch_digits.py")
    output = run(ranks, folder.parent, python, example, "--output", str(folder), *arguments)
    assert (folder / "loss.png").stat().st_size > 1000
    return output, json.loads((folder / f"digits-{max(1, ranks)}.json").read_text())["losses"]


def test_two_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    _, alone = digits(0, tmp_path / "my output")
    (tmp_path / "my output" / "digits-3.json").write_text('{"of": "another version"}')
    output, together = digits(2, tmp_path / "my output")
    accuracy = re.search(r"test accuracy ([\d.]+)%", output)
    assert accuracy and float(accuracy[1]) >= 97.0, output
    assert re.search(r"s an epoch on 2 ranks: [\d.]+ times as fast as 1 rank \(", output), output
    assert len(alone) == len(together) > 400
    same_curve(alone, together)
    assert sum(together[-50:]) < 1.1 * sum(alone[-50:])
    _, four = digits(4, tmp_path / "my output", "--epochs", "2")
    same_curve(four[:30], alone[:30])  # The rate of learning follows the number of epochs.


def same_curve(one: list[float], other: list[float]) -> None:
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    assert max(differences[:50]) < 1e-4
    assert max(differences) < 0.05


@pytest.mark.timeout(900)
def test_eight_ranks_with_parts_of_a_model_learn_what_one_learns(tmp_path: Path) -> None:
    losses = []
    for ranks, python in ((8, python_with(*PARALLEL)), (1, sys.executable)):
        example = str(EXAMPLES / "torch_model_parallel.py")
        output = run(ranks, tmp_path, python, example, "--epochs", "1", timeout=400)
        losses.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", output)])
    (of_epoch, of_test), alone = losses
    assert of_test < 0.5 * of_epoch
    assert alone == pytest.approx([of_epoch, of_test], abs=2e-3)


def test_ranks_are_killed_and_no_step_is_lost(tmp_path: Path) -> None:
    arguments = ("--epochs", "5", "--every", "1", "--output", str(tmp_path))
    output = run(0, tmp_path, sys.executable, str(EXAMPLES / "elastic_demo.py"), *arguments)
    assert re.search(r"^\d+ ranks killed, .*; 150 steps: 0 lost", output, re.MULTILINE), output
    assert "after each of 150 steps, the SHA-256 of one process alone" in output
    assert (tmp_path / "elastic.png").stat().st_size > 1000


def test_the_table_lists_every_program() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted({path.name for path in EXAMPLES.glob("*.py")} - {"results.py"})
