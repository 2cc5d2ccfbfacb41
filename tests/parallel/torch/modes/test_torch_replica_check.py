"""A bit that flips on one rank is named by check_replicas, and by HVDLITE_CHECK_REPLICAS."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from harness import run_world
from hvdlite import basics
from hvdlite.torch.replicas import word_sums
from parallel.scenarios import make_tests, run_all, tensors_sent_by
from parallel.torch.small_models import backward, make, make_model

PRELOAD = ("torch._dynamo",)

pytestmark = pytest.mark.long

EVERY = 5
CHECKED = {"HVDLITE_CHECK_REPLICAS": str(EVERY)}


def flip(param: torch.Tensor, rank: int, bit: int = 13) -> None:
    """Flip a bit of the last element of a parameter of 32-bit floats, on one rank."""
    if hvd.rank() == rank:
        with torch.no_grad():
            param.view(-1)[-1:].view(torch.int32).bitwise_xor_(1 << bit)


def steps(model: nn.Module, optimizer: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


def check_error(error: hvd.DivergenceError, *tensors: str, rank: int = -1) -> None:
    """Check what the error names; of two ranks none is in the minority."""
    rank = rank % hvd.size()
    assert error.tensors == tensors
    assert error.ranks == ((rank,) if hvd.size() > 2 else ())
    for name in tensors[:3]:
        assert f"'{name}'" in str(error), error
    expected = f"rank {rank} differs from" if hvd.size() > 2 else "none has a majority"
    assert expected in str(error), error


def train(way: dict[str, Any]) -> tuple[nn.Module, Any]:
    """Make a model and its optimizer, in one of the ways of which the replica check is a part."""
    model = make_model()
    if way.get("sharded"):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, hvd.ShardedOptimizer(sgd, model.named_parameters())
    return model, make(model, **way)


def scenario_names_a_flipped_bit_at_the_next_check(way: dict[str, Any]) -> None:
    model, optimizer = train(way)
    # A step of ShardedOptimizer gives all ranks the parameters of their owners.
    last = 0 if way.get("sharded") else 2
    steps(model, optimizer, 2 * EVERY - 1 - last)
    flip(dict(model.named_parameters())["2.weight"], hvd.size() - 1)
    steps(model, optimizer, last)
    with pytest.raises(hvd.DivergenceError, match="HVDLITE_CHECK_REPLICAS, step 10 of") as caught:
        steps(model, optimizer, 1)
    check_error(caught.value, "2.weight")
    assert "1 of 4 tensors differs" in str(caught.value)
    events = [event for event in basics.engine().live()["events"] if event[1] == "diverged"]
    if hvd.rank() == (hvd.size() - 1 if hvd.size() > 2 else 0):
        [(_, _, rank, name, text)] = events
        assert (rank, name) == (hvd.rank(), "2.weight")
        assert str(caught.value).startswith(text)
    else:
        assert not events


def scenario_one_small_operation_in_so_many_steps() -> None:
    model = make_model()
    optimizer = make(model)
    sent = [tensors_sent_by(lambda: steps(model, optimizer, 1)) for _ in range(11)]
    more = [index + 1 for index, count in enumerate(sent) if count > sent[1]]
    assert more == [1, EVERY, 2 * EVERY], sent


def scenario_accumulated_batches_are_one_step() -> None:
    model = make_model()
    optimizer = make(model, backward_passes_per_step=2)
    for step in range(1, 2 * EVERY):
        if step == EVERY + 3:
            flip(model[0].bias, 0)
        for _ in range(2):
            backward(model)
        optimizer.step()
        optimizer.zero_grad()
    backward(model)
    with pytest.raises(hvd.DivergenceError, match="step 10 of") as caught:
        backward(model)
    check_error(caught.value, "0.bias", rank=0)


def scenario_a_rank_without_a_batch_takes_part() -> None:
    model = make_model()
    optimizer = make(model)
    for step in range(1, 4 * EVERY):
        if hvd.rank() == 0 or step % EVERY:
            backward(model)
        optimizer.step()
        optimizer.zero_grad()


def scenario_members_of_a_process_set_compare_among_themselves() -> None:
    if hvd.size() == 2:
        return
    pair = hvd.add_process_set([0, 2])
    model = make_model()
    optimizer = make(model, process_set=pair)
    flip(model[0].bias, 1)  # is not a member
    steps(model, optimizer, EVERY + 1)
    flip(model[0].bias, 2)
    if pair.included():
        with pytest.raises(hvd.DivergenceError, match="rank 0 and rank 2 differ") as caught:
            steps(model, optimizer, EVERY - 1)
        assert caught.value.tensors == ("0.bias",)
    hvd.remove_process_set(pair)


def scenario_ranks_that_have_joined_are_left_out() -> None:
    model = make_model()
    optimizer = make(model)
    if hvd.rank() > 0:
        steps(model, optimizer, 3 * EVERY)
    else:
        steps(model, optimizer, 3)
    root = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root)
    hvd.broadcast_optimizer_state(optimizer, root)
    steps(model, optimizer, EVERY + 1)
    flip(model[2].bias, hvd.size() - 1)
    with pytest.raises(hvd.DivergenceError, match="step 10 of") as caught:
        steps(model, optimizer, EVERY - 1)  # counted from the end of the join
    check_error(caught.value, "2.bias")


def scenario_local_sgd_is_not_compared_between_its_rounds() -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    steps(model, hvd.LocalSGD(sgd, every=4), 3 * EVERY)


def scenario_equal_models_pass() -> None:
    hvd.check_replicas(make_model().named_parameters())
    hvd.check_replicas([])


def scenario_every_bit_is_seen() -> None:
    for bit in range(0, 32, 5):
        model = make_model()
        flip(model[0].bias, hvd.size() - 1, bit)
        with pytest.raises(hvd.DivergenceError) as caught:
            hvd.check_replicas(model.named_parameters())
        check_error(caught.value, "0.bias")


def scenario_several_tensors_are_named() -> None:
    model = make_model()
    flip(model[0].weight, hvd.size() - 1)
    flip(model[2].bias, hvd.size() - 1)
    with pytest.raises(hvd.DivergenceError, match="2 of 4 tensors differ") as caught:
        hvd.check_replicas(model.named_parameters())
    check_error(caught.value, "0.weight", "2.bias")


def scenario_other_tensors_are_a_mismatch() -> None:
    named = list(make_model().named_parameters())
    if hvd.rank() == 1:
        named.reverse()
    with pytest.raises(hvd.MismatchError, match="different tensors, or in another order"):
        hvd.check_replicas(named)


def body() -> dict[str, str]:
    forms: list[dict[str, Any]] = [
        {},
        {"op": hvd.Adasum},
        {"gradient_as_bucket_view": True},
        {"sharded": True},
    ]
    return run_all(globals(), hvd.init, forms=forms)


WORLDS = {str(n): {"n": n, "env": CHECKED} for n in (2, 3)}
test_replica_check = make_tests(body, WORLDS)


def init_only() -> None:
    hvd.init()


def test_ranks_agree_on_the_interval() -> None:
    results = run_world(
        2,
        init_only,
        env=lambda rank: {"HVDLITE_CHECK_REPLICAS": str(5 + rank)},
        expect_failure=True,
    )
    for result in results:
        assert "HVDLITE_CHECK_REPLICAS" in result.stderr, result.stderr


DTYPES = ("float64", "float32", "float16", "bfloat16", "complex64", "bool", "uint8", "int64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_word_sums_are_those_of_the_bytes(dtype: str) -> None:
    kind = getattr(torch, dtype)
    torch.manual_seed(1)
    tensors = [torch.randn(size).mul(100).to(kind) for size in (0, 1, 3, 8, 1001)]
    tensors += [torch.randn(3, 5).to(kind).t(), torch.randn(9).to(kind)[1:]]
    for tensor, number in zip(tensors, word_sums(tensors), strict=True):
        data = tensor.contiguous().reshape(-1).clone().view(torch.uint8).numpy().tobytes()
        whole = len(data) // 8 * 8
        words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, whole, 8)]
        assert (sum(words) + sum(data[whole:]) - number) % 2**64 == 0
