"""Whether gradients are sent during backward or at its end changes no bits."""

from __future__ import annotations

import time

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite import _core, basics
from parallel.scenarios import make_tests, run_all, sizes
from parallel.torch.small_models import backward, gradients, make, make_model

PRELOAD = ("torch._dynamo",)


def scenario_without_overlap_gradients_have_the_same_bits() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}):
        results = []
        for overlap in (True, False):
            model, sent = make_model(), []
            optimizer = make(model, overlap=overlap, bucket_cap_mb=1e-6, **options)
            # The first layer's gradient comes last, when the others can be in flight.
            see = lambda _, seen=sent, one=optimizer._reducer: seen.append(one.in_flight)  # noqa: E731
            model[0].weight.register_post_accumulate_grad_hook(see)
            backward(model)
            assert sent == [overlap] and not optimizer._reducer.in_flight
            results.append(gradients(model))
            del optimizer, see
        assert all(map(torch.equal, *results))


def scenario_buckets_are_sent_during_backward_where_a_core_is_idle() -> None:
    for cores in (hvd.size(), hvd.size() + 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_core, "available_cores", lambda cores=cores: cores)
            optimizer = make(make_model())
            assert optimizer._reducer._overlaps == (cores > hvd.size())


def scenario_live_figures_know_backward_without_overlap() -> None:
    model = make_model()
    optimizer = make(model, overlap=False, bucket_cap_mb=1e-6)
    model[0].weight.register_hook(lambda _: time.sleep(0.02))
    before = steps()
    for _ in range(8):
        backward(model)
        optimizer.step()
    if hvd.rank() == 0:
        count, spent = (after - earlier for after, earlier in zip(steps(), before, strict=True))
        assert count >= 6 and spent >= 0.015 * count, (count, spent)


def steps() -> tuple[int, float]:
    """Return, on rank 0, the number of steps and the seconds that its backward took in them."""
    told = basics.engine().live()["steps"]
    return (0, 0.0) if told is None else (told["count"], told["ranks"][0][0])


def body() -> dict[str, str]:
    torch.set_num_threads(1)
    return run_all(globals())


test_overlap = make_tests(body, sizes(1, 2, 3))
