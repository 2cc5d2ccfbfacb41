"""hvdlite.tensorflow with tensors on a real GPU, where TensorFlow is built for one."""

from __future__ import annotations

import importlib.util

import pytest

from gpu.worlds import shared_gpu
from harness import RankResult, run_world
from hvdlite import api
from parallel.scenarios import check, names_in, run_all
from parallel.tensorflow import test_tensorflow_ops
from parallel.tensorflow.tensorflow_worlds import ENVIRONMENT, eagerly, in_graph, start, tf

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def environment(rank: int) -> dict[str, str]:
    return {**ENVIRONMENT, **shared_gpu(rank)}


def count_gpus() -> int:
    return len(tf.config.list_physical_devices("GPU"))


def start_on_gpu() -> None:
    for each in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(each, True)  # Two ranks share it.
    start()
    tf.device("/GPU:0").__enter__()


def body() -> dict[str, str]:
    return run_all(vars(test_tensorflow_ops), start_on_gpu, forms=(eagerly, in_graph))


@pytest.fixture(scope="module", params=[1, 2])
def results(request: pytest.FixtureRequest) -> list[RankResult]:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    if not api.cuda_built():
        pytest.skip("there is no NVIDIA GPU here")
    if run_world(1, count_gpus, env=ENVIRONMENT)[0].value == 0:
        pytest.skip("this TensorFlow finds no GPU")
    return run_world(request.param, body, env=environment)


@pytest.mark.parametrize("name", names_in(vars(test_tensorflow_ops)))
def test_tensorflow(results: list[RankResult], name: str) -> None:
    check(results, name)
