"""Different initial parameters give one warning that names the parameter and the ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import backward, make, make_model, raises

PRELOAD = ("torch._dynamo",)

TINY = 1e-6  # MiB: every parameter is a bucket
WAYS: dict[str, dict[str, Any]] = {
    "in backward": {},
    "many buckets": {"bucket_cap_mb": TINY},
    "two passes": {"backward_passes_per_step": 2},
    "views": {"gradient_as_bucket_view": True},
    "sums": {"op": hvd.Sum},
    "Adasum": {"op": hvd.Adasum},
}


def other_parameters(model: nn.Module, *names: str, ranks: tuple[int, ...] = (1,)) -> nn.Module:
    """Change parameters of some ranks."""
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).add_(0.5 if hvd.rank() in ranks else 0.0)
    return model


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """Collect the warnings of this rank, with repetitions."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    assert all(one.category is hvd.ReplicasDifferWarning for one in caught), caught
    texts.extend(str(one.message) for one in caught)


def step(model: nn.Module, optimizer: Any, has_backward: bool = True) -> None:
    optimizer.zero_grad()
    passes = optimizer._reducer.settings.passes if hasattr(optimizer, "_reducer") else 1
    for _ in range(passes if has_backward else 0):
        backward(model)
    optimizer.step()


def said_by(model: nn.Module, optimizer: Any, steps: int = 3) -> list[str]:
    with warned() as texts:
        for _ in range(steps):
            step(model, optimizer)
    return texts


def expect(texts: list[str], *parts: str, speaker: int = 0) -> None:
    """Check that one rank has warned, once."""
    assert len(texts) == (hvd.rank() == speaker), texts
    for text in texts:
        for part in parts:
            assert part in text, (part, text)


def scenario_nothing_is_said_of_the_same_parameters(way: dict[str, Any]) -> None:
    model = make_model()
    assert said_by(model, make(model, **way)) == []


def scenario_forgotten_broadcast(way: dict[str, Any]) -> None:
    model = other_parameters(make_model(), "0.bias", "2.weight")
    expect(
        said_by(model, make(model, **way)),
        "2 of 4 parameters differ between rank 0 and rank 1, first '0.bias'",
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
        "category=hvd.ReplicasDifferWarning",
    )


def scenario_broadcast_after_the_optimizer_is_made(way: dict[str, Any]) -> None:
    model = other_parameters(make_model(), "0.bias", "2.weight")
    optimizer = make(model, **way)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert said_by(model, optimizer) == []


def scenario_every_rank_has_another_seed() -> None:
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    others = "rank 1" if hvd.size() == 2 else "ranks 1, 2"
    text = f"4 of 4 parameters differ between rank 0 and {others}, first '0.weight'"
    expect(said_by(model, make(model)), text)


def scenario_the_first_ones_are_frozen() -> None:
    """Parameters that are not trained are not compared."""
    model = other_parameters(make_model(), "0.weight", "0.bias", "2.bias")
    for name in ("0.weight", "0.bias"):
        model.get_parameter(name).requires_grad_(False)
    expect(said_by(model, make(model)), "1 of 2 parameters differ", "first '2.bias'")


def scenario_a_warning_may_be_an_error() -> None:
    """The step succeeds in spite of the warning, and so does the next one."""
    model = other_parameters(make_model(), "0.bias")
    optimizer = make(model)
    optimizer.zero_grad()
    expectation = pytest.raises(hvd.ReplicasDifferWarning, match="first '0.bias'")
    with expectation if hvd.rank() == 0 else contextlib.nullcontext():
        backward(model)
    optimizer.step()
    assert said_by(model, optimizer) == []


def scenario_a_rank_without_backward(way: dict[str, Any]) -> None:
    model = other_parameters(make_model(), "0.bias")
    optimizer = make(model, **way)
    with warned() as texts:
        for _ in range(2):
            step(model, optimizer, has_backward=hvd.rank() != 1)
    expect(texts, "between rank 0 and rank 1, first '0.bias'")


def scenario_a_backward_before_the_broadcast() -> None:
    """Nothing is sent under no_sync(), so nothing is compared yet."""
    model = other_parameters(make_model(), "0.bias")
    optimizer = make(model)
    with optimizer.no_sync():
        backward(model)
    optimizer.zero_grad()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert said_by(model, optimizer) == []


def scenario_members_of_a_process_set_compare_among_themselves() -> None:
    if hvd.size() < 3:
        return
    last = hvd.size() - 1
    pair = hvd.add_process_set([last - 1, last])
    for way in (WAYS["in backward"], WAYS["Adasum"]):
        # Rank 0's parameters do not matter: it is not a member.
        model = other_parameters(make_model(), "0.bias", ranks=(last - 1, last))
        assert said_by(model, make(model, process_set=pair, **way)) == []
        model = other_parameters(make_model(), "0.weight", ranks=(last,))
        expect(
            said_by(model, make(model, process_set=pair, **way)),
            f"1 of 4 parameters differ between rank {last - 1} and rank {last}, first '0.weight'",
            f"root_rank={last - 1}, process_set=...",
            speaker=last - 1,
        )
    hvd.remove_process_set(pair)


def scenario_layouts_that_differ_are_an_error_still(way: dict[str, Any]) -> None:
    model = other_parameters(make_model(), "0.bias")
    model.get_parameter("0.weight").requires_grad_(hvd.rank() != 1)
    with warned() as texts, raises("'0.weight' is trained on rank.* and not on rank 1"):
        step(model, make(model, **way))
    assert texts == []
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


def scenario_one_rank_trains_nothing(way: dict[str, Any]) -> None:
    for first in (0, 2):
        model = make_model()
        optimizer = make(model, **way)
        assert said_by(model, optimizer, first) == []
        model.requires_grad_(hvd.rank() != 1)
        with raises("' is trained on rank.* and not on rank 1"):
            step(model, optimizer, has_backward=hvd.rank() != 1)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


def scenario_joined_before_its_first_step(way: dict[str, Any]) -> None:
    """The ranks that go on compare; afterwards all do, since some got no update."""
    last = hvd.size() - 1
    model = make_model()
    optimizer = make(model, **way)
    with warned() as texts:
        if hvd.rank() != last:
            for _ in range(2):
                step(model, optimizer)
        hvd.join()
    assert texts == []
    expect(said_by(model, optimizer), f"4 of 4 parameters differ between rank 0 and rank {last}")
    with warned() as texts:
        if hvd.rank() != 0:
            step(model, optimizer)
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())
        for _ in range(2):
            step(model, optimizer)
    assert texts == []


def body() -> dict[str, str]:
    return run_all(globals(), hvd.init, forms=list(WAYS.values()))


test_same_start = make_tests(body, sizes(2, 3))
