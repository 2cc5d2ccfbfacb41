"""`hvd.observe`: counts samples, keeps last values, and never waits for a tensor."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hvdlite import api, basics
from hvdlite.errors import ArgumentError
from hvdlite.live import observed
from patience import HANG


@pytest.fixture(autouse=True)
def nothing_observed() -> Iterator[None]:
    observed.forget()
    yield
    observed.forget()


class OnGpu:
    """A tensor without dimensions whose value costs a wait."""

    shape = ()
    device = "cuda:0"

    def __init__(self, value: float) -> None:
        self.value, self.reads = value, 0

    def __float__(self) -> float:
        self.reads += 1
        return self.value


class Broken(OnGpu):
    def __float__(self) -> float:
        raise RuntimeError("the GPU has failed")


def test_samples_add_up_and_values_are_the_last() -> None:
    assert observed.figures() == {"samples": 0, "values": {}}
    api.observe(samples=32, loss=0.5)
    api.observe(samples=8)
    api.observe(loss=0.25, rate=1)
    assert observed.figures() == {"samples": 40, "values": {"loss": 0.25, "rate": 1.0}}
    assert observed.figures()["samples"] == 40


def test_numbers_of_numpy_and_scalars() -> None:
    api.observe(samples=np.int64(3), a=np.float32(0.5), b=np.array(2), c=True)
    assert observed.figures() == {"samples": 3, "values": {"a": 0.5, "b": 2.0, "c": 1.0}}


def test_tensors_of_torch_are_kept_without_their_graph() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(3, requires_grad=True)
    loss = weight.sum()
    api.observe(loss=loss)
    assert observed._values == {"loss": 3.0}
    loss.backward()
    with pytest.raises(ArgumentError, match=r"not Tensor of shape \(3,\); observe its mean"):
        api.observe(loss=weight)
    with pytest.raises(ArgumentError, match=r"not a number"):
        api.observe(loss=torch.tensor(1j))


def test_a_tensor_on_a_gpu_is_read_when_somebody_asks_and_once() -> None:
    value = OnGpu(0.5)
    api.observe(loss=value)
    assert value.reads == 0
    assert observed.figures()["values"] == {"loss": 0.5}
    assert observed.figures()["values"] == {"loss": 0.5}
    assert value.reads == 1


def test_a_value_that_cannot_be_read_is_left_out() -> None:
    api.observe(loss=Broken(1.0), rate=2.0)
    assert observed.figures()["values"] == {"rate": 2.0}


def test_a_value_that_is_not_finite_is_kept() -> None:
    api.observe(loss=math.nan)
    assert math.isnan(observed.figures()["values"]["loss"])


@pytest.mark.parametrize("bad", [-1, 1.5, True, "32", np.float64(2)])
def test_samples_are_a_whole_number(bad: Any) -> None:
    with pytest.raises(ArgumentError, match="whole number of samples"):
        api.observe(samples=bad)


@pytest.mark.parametrize("bad", ["0.5", None, [1.0], 1j, np.ones(1), object()])
def test_values_are_numbers(bad: Any) -> None:
    with pytest.raises(ArgumentError, match=r"observe\(loss=...\)"):
        api.observe(samples=4, loss=bad)
    assert observed.figures() == {"samples": 0, "values": {}}


def test_names_are_few() -> None:
    with pytest.raises(ArgumentError, match="more than 64 names"):
        for step in range(100):
            api.observe(**{f"loss{step}": 0.5})
    assert len(observed.figures()["values"]) == 64
    api.observe(loss3=1.0)


def test_nobody_waits_while_a_value_is_read() -> None:
    reading, may_end = threading.Event(), threading.Event()

    class Slow(OnGpu):
        def __float__(self) -> float:
            reading.set()
            assert may_end.wait(HANG)
            return self.value

    api.observe(loss=Slow(1.0))
    reader = threading.Thread(target=observed.figures)
    reader.start()
    assert reading.wait(HANG)
    api.observe(samples=1, loss=2.0)
    may_end.set()
    reader.join()
    assert observed.figures() == {"samples": 1, "values": {"loss": 2.0}}


def test_shutdown_forgets() -> None:
    api.observe(samples=5)
    basics.init()
    assert observed.figures()["samples"] == 5
    api.observe(samples=5, loss=1.0)
    basics.shutdown()
    assert observed.figures() == {"samples": 0, "values": {}}
