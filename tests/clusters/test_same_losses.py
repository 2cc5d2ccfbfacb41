"""examples/torch_digits.py, unchanged, has the same losses to the bit under every launcher.

Importing takes most of its time, so under torchrun, mpirun and with TF_CONFIG it is forked.
A launcher is a function in `LAUNCHERS`: it runs a script with two ranks. Rank 0 of the example
writes the losses to a folder.
"""

from __future__ import annotations

import json
import runpy
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import hvdlite.ray
import hvdlite.spark
from clusters import ray_clusters, spark_sessions
from clusters import test_kubernetes as kubernetes
from clusters.slurm import Slurm
from harness import base_environment
from hvdlite.emit.request import EmitRequest
from multihost.bed import Bed, end, finish, why_not
from pythons import forking_torchrun, python_with

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_digits.py"
# It compares itself with one process.
VIRTUAL_RANKS = EXAMPLE.parent / "by_feature" / "virtual_ranks.py"
BIN = Path(sys.executable).parent
SECONDS = 240


def example(folder: Path) -> list[str]:
    """Return the example's command, without the Python that runs it."""
    return [str(EXAMPLE), "--epochs", "1", "--device", "cpu", "--output", str(folder)]


def forking_python() -> str:
    return python_with("torch._dynamo", "sklearn.datasets", "matplotlib.pyplot")


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


def torchrun(script: list[str], request: pytest.FixtureRequest) -> None:
    run(*forking_torchrun(forking_python(), 2), *script)


def mpirun(script: list[str], request: pytest.FixtureRequest) -> None:
    flags = ["--personality", "ompi", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    run(str(BIN / "prterun"), *flags, forking_python(), *script)


def srun(script: list[str], request: pytest.FixtureRequest) -> None:
    cluster: Slurm = request.getfixturevalue("slurm")
    env = environment(HVDLITE_TOKEN=secrets.token_hex(32))
    ranks = ["srun", "-N2", "-n2", sys.executable, *script]
    done = cluster.run(*ranks, env=env, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


def node_mode(script: list[str], request: pytest.FixtureRequest) -> None:
    bed: Bed = request.getfixturevalue("bed")
    env = {"HVDLITE_TOKEN": secrets.token_hex(32)}
    nodes = [
        bed.start_launcher(
            *("--nodes", "2", "--node-rank", str(node), "--meet", "node1:23456", "-np", "1"),
            *(sys.executable, *script),
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


def tf_config(script: list[str], request: pytest.FixtureRequest) -> None:
    cluster = {"chief": ["localhost:2222"], "worker": ["localhost:2223"]}
    ranks = []
    for kind in cluster:
        config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})
        env = environment(TF_CONFIG=config)
        ranks.append(subprocess.Popen([forking_python(), *script], env=env))
    assert [rank.wait(SECONDS) for rank in ranks] == [0, 0]


def pods(script: list[str], request: pytest.FixtureRequest) -> None:
    with Bed(2) as two:
        wanted = EmitRequest([sys.executable, *script], 2, 1, image="a")
        (one,) = next(kubernetes.pods(kubernetes.objects("job", wanted)))["containers"]
        folder = request.getfixturevalue("tmp_path")
        names, first = folder / "hosts", "train-0.train"
        kubernetes.run_pods(two, names, first, one["command"], one["env"])


def spark(script: list[str], request: pytest.FixtureRequest) -> None:
    with spark_sessions.spark("local[2]", request.getfixturevalue("tmp_path")):
        hvdlite.spark.run(run_as_script, (script,), num_proc=2)


def ray_actors(script: list[str], request: pytest.FixtureRequest) -> None:
    pytest.importorskip("ray").cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ray_clusters.cluster(cpus=2):
        hvdlite.ray.run(run_as_script, (script,), num_workers=2)


def run_as_script(arguments: list[str]) -> None:
    """Run a script in this process; Ray and Spark start functions, not programs."""
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")


LAUNCHERS: dict[str, Callable[[list[str], pytest.FixtureRequest], None]] = {
    "torchrun": torchrun,
    "mpirun": mpirun,
    "srun": srun,
    "node mode": node_mode,
    "TF_CONFIG": tf_config,
    "pods of Kubernetes": pods,
    "Spark": spark,
    "Ray": ray_actors,
}


# Of the tests of launchers that need a cluster system.
MARKS = {
    "srun": [pytest.mark.slurm],
    "pods of Kubernetes": [pytest.mark.skipif(bool(why_not()), reason=why_not())],
    "Spark": spark_sessions.MARKS,
    "Ray": [pytest.mark.ray, pytest.mark.filterwarnings("default")],
}


def marks_of(launcher: str) -> list[pytest.MarkDecorator]:
    return MARKS.get(launcher, [])


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
    LAUNCHERS[launcher](example(tmp_path), request)
    assert losses(tmp_path) == expected


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("Ray", marks=marks_of("Ray"))])
def test_virtual_ranks_end_in_the_bits_of_one_process(
    launcher: str, request: pytest.FixtureRequest
) -> None:
    LAUNCHERS[launcher]([str(VIRTUAL_RANKS)], request)
