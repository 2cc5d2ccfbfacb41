"""A bit that flips on one rank is named at the next check, and can be repaired."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.torch.optimizers.replicas import word_sums
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import assert_same_everywhere, backward, make, make_model

PRELOAD = ("torch._dynamo",)

pytestmark = pytest.mark.long


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


def scenario_a_process_set_compares_among_itself() -> None:
    if hvd.size() == 2:
        return
    pair = hvd.add_process_set([0, 1])
    model = make_model()
    flip(model[0].bias, 2)  # is not a member
    if pair.included():
        hvd.check_replicas(model.named_parameters(), process_set=pair)
    hvd.remove_process_set(pair)


def scenario_the_watch_names_a_flipped_bit_at_the_next_check(way: dict[str, Any]) -> None:
    model = make_model()
    optimizer = make(model, **way)
    watch = hvd.ReplicaWatch(optimizer, every=5)
    steps(model, optimizer, 7)
    flip(model[2].weight, hvd.size() - 1)
    steps(model, optimizer, 2)
    with pytest.raises(hvd.DivergenceError, match="ReplicaWatch, step 10: 1 of 4") as caught:
        steps(model, optimizer, 1)
    check_error(caught.value, "2.weight")
    watch.close()
    steps(model, optimizer, 5)


def scenario_the_watch_of_a_plain_optimizer() -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = hvd.ReplicaWatch(sgd, every=1)
    flip(model[0].bias, hvd.size() - 1)
    with pytest.raises(hvd.DivergenceError, match="'parameter 1'"):
        sgd.step()
    watch.close()


def scenario_the_first_rank_warns() -> None:
    model = make_model()
    optimizer = make(model)
    watch = hvd.ReplicaWatch(optimizer, every=2, then="warn")
    steps(model, optimizer, 1)
    flip(model[2].weight, hvd.size() - 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(model, optimizer, 3)
    assert len(caught) == (2 if hvd.rank() == 0 else 0), caught
    assert all(one.category is hvd.ReplicasDifferWarning for one in caught)
    watch.close()


def scenario_repair_by_the_majority() -> None:
    model = make_model()
    adam = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    optimizer = hvd.DistributedOptimizer(adam, model.named_parameters())
    watch = hvd.ReplicaWatch(optimizer, every=3, then="repair")
    steps(model, optimizer, 1)
    flip(model[2].weight, 0, bit=22)  # the majority is not the first rank
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if hvd.size() == 2:
            with pytest.raises(hvd.DivergenceError, match="none has a majority"):
                steps(model, optimizer, 2)
            watch.close()
            return
        steps(model, optimizer, 2)
    assert len(caught) == (hvd.rank() == 0), caught
    assert all("now have those of rank 1" in str(one.message) for one in caught)
    assert_same_everywhere(model)
    steps(model, optimizer, 3)
    assert_same_everywhere(model)
    watch.close()


def scenario_ranks_count_anew_after_join() -> None:
    model = make_model()
    optimizer = make(model)
    watch = hvd.ReplicaWatch(optimizer, every=4)
    steps(model, optimizer, 3 if hvd.rank() == 0 else 2)
    root = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root)
    hvd.broadcast_optimizer_state(optimizer, root)
    steps(model, optimizer, 9)
    watch.close()


def scenario_bad_arguments() -> None:
    optimizer = make(make_model())
    for bad, text in [({"every": 0}, "every=0"), ({"then": "stop"}, "then='stop'")]:
        with pytest.raises(hvd.ArgumentError, match=text):
            hvd.ReplicaWatch(optimizer, **bad)
    with pytest.raises(hvd.ArgumentError, match="takes an optimizer of torch"):
        hvd.ReplicaWatch(make_model())


def body() -> dict[str, str]:
    return run_all(globals(), hvd.init, forms=[{}, {"op": hvd.Adasum}])


test_replica_watch = make_tests(body, sizes(2, 3))


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
