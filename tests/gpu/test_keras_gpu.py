"""hvdlite.keras on PyTorch with a model on a real GPU: one rank, and two that share it."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from gpu.worlds import shared_gpu
from harness import run_world
from parallel.keras import (
    keras_worlds,
    test_keras_callbacks,
    test_keras_fit,
    test_keras_optimizer,
)
from parallel.scenarios import check, names_in

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no NVIDIA GPU here"),
    pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed"),
]

SUITES = {
    "callbacks": test_keras_callbacks,
    "fit": test_keras_fit,
    "optimizer": test_keras_optimizer,
}


def environment(rank: int) -> dict[str, str]:
    return {**keras_worlds.environment("torch"), **shared_gpu(rank)}


def suite(name: str) -> dict[str, str]:
    assert keras_worlds.dense_model().weights[0].value.device.type == "cuda"
    return keras_worlds.run_scenarios(vars(SUITES[name]))


@pytest.mark.parametrize(
    ("name", "ranks"), [("callbacks", 2), ("fit", 2), ("optimizer", 1), ("optimizer", 2)]
)
def test_suites_of_the_host(name: str, ranks: int) -> None:
    results = run_world(ranks, suite, name, env=environment)
    for scenario in names_in(vars(SUITES[name])):
        check(results, scenario)
