"""hvdlite.torch on a real GPU: one rank, and two that share it; see README.md."""

from __future__ import annotations

import pytest
import torch

from gpu import torch_cases
from gpu.worlds import shared_gpu
from harness import RankResult, run_world
from parallel.scenarios import check, names_in, run_all
from parallel.torch import test_torch_ops

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no NVIDIA GPU here"),
]
PLACES = [
    pytest.param(("cpu", 1), id="cpu-1", marks=pytest.mark.long),
    pytest.param(("cpu", 2), id="cpu-2", marks=pytest.mark.long),
    pytest.param(("cuda", 1), id="gpu-1", marks=needs_gpu),
    pytest.param(("cuda", 2), id="gpu-2", marks=needs_gpu),
]


@pytest.fixture(scope="module", params=PLACES)
def results(request: pytest.FixtureRequest) -> list[RankResult]:
    device, ranks = request.param
    body = torch_cases.conformance
    return run_world(ranks, body, device, env=shared_gpu)


@pytest.mark.parametrize("name", names_in(vars(torch_cases)))
def test_torch(results: list[RankResult], name: str) -> None:
    check(results, name)


def suite_by_default() -> dict[str, str]:
    """Run one rank of a suite that does not choose devices, with the GPU as torch's default."""
    torch.set_default_device("cuda")
    return run_all(vars(test_torch_ops))


@pytest.mark.gpu
@needs_gpu[1]
@pytest.mark.parametrize("ranks", [1, 2])
def test_suite_of_the_host(ranks: int) -> None:
    results = run_world(ranks, suite_by_default, env=shared_gpu)
    for scenario in names_in(vars(test_torch_ops)):
        check(results, scenario)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=needs_gpu)], ids=["cpu", "gpu"]
)
def test_death_of_a_peer(device: str) -> None:
    body = torch_cases.lose_a_peer
    results = run_world(2, body, device, env=shared_gpu, expect_failure=True)
    message, seconds = results[0].value
    assert "rank 1" in message
    assert seconds < 10
