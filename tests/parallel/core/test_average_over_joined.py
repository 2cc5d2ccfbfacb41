"""HVDLITE_AVERAGE_OVER_JOINED=1: an average divides by all ranks, also while some have joined."""

from __future__ import annotations

import pytest

from harness import run_world

pytestmark = pytest.mark.long

PRELOAD = ("torch._dynamo",)
OVER_ALL = {"HVDLITE_AVERAGE_OVER_JOINED": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}


def in_torch() -> dict[str, float]:
    """Average 1 and 2 from ranks 1 and 2 of three, while rank 0 has joined."""
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    means = {}
    if hvd.rank() > 0:
        value = torch.full((3,), float(hvd.rank()))
        means["dense"] = hvd.allreduce(value)[0].item()
        means["grouped"] = hvd.grouped_allreduce([value, value.half()])[1][0].item()
        means["rows"] = hvd.reducescatter(value.repeat(2))[0].item()
        means["integers"] = hvd.allreduce(value.int() * 4)[0].item()
        means["weighted"] = hvd.allreduce(value, weight=1.0)[0].item()
        rows = torch.sparse_coo_tensor([[0]], value[None], (2, 3))
        sparse = hvd.sparse_allreduce_async(rows, "sparse", hvd.Average)
        means["sparse"] = hvd.synchronize(sparse).to_dense()[0, 0].item()
        param = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([param], lr=1.0), named_parameters=[("param", param)]
        )
        (param * value).sum().backward()
        optimizer.step()
        means["gradient"] = -param[0].item()
    hvd.join()
    means["of all"] = hvd.allreduce(torch.full((3,), float(hvd.rank())))[0].item()
    hvd.shutdown()
    return means


def in_tensorflow() -> dict[str, float]:
    """Do the same with TensorFlow and Keras."""
    import numpy as np
    import tensorflow as tf

    import hvdlite.keras
    import hvdlite.tensorflow as hvd

    hvd.init()
    means = {}
    if hvd.rank() > 0:
        value = tf.fill([3], float(hvd.rank()))
        means["dense"] = float(hvd.allreduce(value)[0])
        means["in a function"] = float(tf.function(hvd.allreduce)(value)[0])
        slices = tf.IndexedSlices(value[None], tf.constant([0]), tf.constant([2, 3]))
        means["sparse"] = float(tf.convert_to_tensor(hvd.allreduce(slices))[0, 0])
        means["of Keras"] = float(hvdlite.keras.allreduce(np.full(3, float(hvd.rank())))[0])
        variable = tf.Variable(tf.zeros([3]))
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable * value)
        means["gradient"] = float(tape.gradient(loss, [variable])[0][0])
    hvd.join()
    means["of all"] = float(hvd.allreduce(tf.fill([3], float(hvd.rank())))[0])
    hvd.shutdown()
    return means


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 1]])
def test_average_in_torch_divides_by_all_ranks(hosts: list[int]) -> None:
    results = run_world(3, in_torch, hosts=hosts, env=OVER_ALL)
    assert results[0].value == {"of all": 1.0}
    for result in results[1:]:
        # 4 + 8 over 3; a weighted average divides by the weights.
        assert result.value.pop("integers") == 4
        assert result.value.pop("weighted") == 1.5
        assert set(result.value.values()) == {1.0}, result.value


def test_average_in_tensorflow_and_keras_divides_by_all_ranks() -> None:
    results = run_world(3, in_tensorflow, env=OVER_ALL, preload=("keras", "tensorflow"))
    assert results[0].value == {"of all": 1.0}
    for result in results[1:]:
        assert set(result.value.values()) == {1.0}, result.value
