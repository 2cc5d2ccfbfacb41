"""Elastic scripts in the style of Horovod's users outlive a rank and take another one, unchanged.

In each script worker 0, which is rank 0, kills itself. The training ends when another process has
joined; the script itself checks its losses, and that all ranks have the same weights.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from launcher import run_launcher
from pythons import python_with

pytestmark = pytest.mark.long

HERE = Path(__file__).resolve().parent
SECONDS = 240  # a joiner imports its framework while the others train on a busy machine
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
# By script: how many ranks begin, and the learning rate of so many.
SCRIPTS = {"elastic_torch": (3, "0.06"), "elastic_keras": (2, "0.04")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_elastic_script(name: str) -> None:
    ranks, rate = SCRIPTS[name]
    flags = ["--compat", "-np", str(ranks), "--min-np", "1"]
    modules = ("torch._dynamo", "torch.utils.data") if name == "elastic_torch" else ("tensorflow",)
    python = python_with(*modules, TF_CPP_MIN_LOG_LEVEL="3")
    command = [python, str(HERE / f"{name}.py")]
    result = run_launcher(*flags, *command, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    epochs = [line for line in result.stderr.splitlines() if "hvdlite-run: world" in line]
    assert len(epochs) == 3, epochs
    here = socket.gethostname()
    assert f"worker 0 (host {here}) died of SIGKILL;" in epochs[1]
    assert f"worker {ranks} (host {here}) joined; {ranks} ranks go on" in epochs[2]
    assert f"[0] trained on {ranks} ranks, rate {rate}" in result.stdout
