"""Process sets in Keras, on both backends and in Keras 2: arrays, optimizers, callbacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdlite.errors import ArgumentError
from parallel.keras.keras_worlds import (
    data,
    dense_model,
    hvd,
    keras,
    on_backends,
    on_tensorflow,
    weights_of,
)
from parallel.scenarios import make_tests, run_all

pytestmark = pytest.mark.long

PRELOAD = ("keras", "tensorflow")


def start() -> None:
    if on_tensorflow():
        import tensorflow as tf

        tf.config.threading.set_inter_op_parallelism_threads(2)
        tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init(process_sets=[[0, 1], [1, 2]])


def ranks_that_train(ps: Any) -> list[int]:
    return list(ps.ranks) if ps.included() else [hvd.rank()]


def samples_of(ranks: list[int]) -> tuple[Any, Any]:
    """Interleave the samples of some ranks: batches of one process equal those of all."""
    inputs, labels = data(samples=12 * hvd.size())
    chosen = [i for i in range(len(inputs)) if i % hvd.size() in ranks]
    return inputs[chosen], labels[chosen]


def fit(model: Any, optimizer: Any, ranks: list[int], callbacks: Any = ()) -> Any:
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    inputs, labels = samples_of(ranks)
    return model.fit(
        inputs,
        labels,
        batch_size=4 * len(ranks),
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


def close(one: list[Any], other: list[Any]) -> bool:
    return all(np.allclose(a, b, atol=1e-5) for a, b in zip(one, other, strict=True))


def scenario_arrays_over_overlapping_sets() -> None:
    mine = np.full(3, hvd.rank() + 1.0)
    for ps in hvd.process_sets():
        if not ps.included():
            with pytest.raises(ArgumentError, match="not a member"):
                hvd.allreduce(mine, process_set=ps)
            with pytest.raises(ArgumentError, match="not a member"):
                hvd.broadcast(mine, ps.ranks[0], name="x", process_set=ps)
            continue
        total = float(sum(rank + 1 for rank in ps.ranks))
        assert hvd.allreduce(mine, process_set=ps).tolist() == [total / ps.size()] * 3
        rows = [[rank + 1.0] * 3 for rank in ps.ranks]
        assert hvd.allgather(mine[None], process_set=ps).tolist() == rows
        assert hvd.broadcast(mine, ps.ranks[-1], process_set=ps)[0] == ps.ranks[-1] + 1
        block = hvd.reducescatter(np.ones(ps.size() * 2), op=hvd.Sum, process_set=ps)
        assert block.tolist() == [ps.size()] * 2
        variable = keras.Variable(mine)
        hvd.broadcast_variables([variable], ps.ranks[0], process_set=ps)
        assert keras.ops.convert_to_numpy(variable)[0] == ps.ranks[0] + 1
        assert hvd.allgather_object(hvd.rank(), process_set=ps) == ps.ranks


def scenario_members_train_as_one_process_and_others_alone() -> None:
    for ps in hvd.process_sets():
        model, alone = dense_model(), dense_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), process_set=ps)
        fit(model, optimizer, [hvd.rank()])
        fit(alone, keras.optimizers.SGD(0.05), ranks_that_train(ps))
        assert close(weights_of(model), weights_of(alone))


def scenario_disjoint_sets_train_at_the_same_time() -> None:
    """Each process set has its own model, its own beginning and its own number of batches."""
    pair, rest = hvd.process_sets()[1], hvd.add_process_set(range(2, hvd.size()))
    ps = pair if pair.included() else rest
    model, alone = dense_model(), dense_model()
    if hvd.rank() != ps.ranks[0]:
        model.set_weights([weight + 1 for weight in model.get_weights()])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), process_set=ps)
    history = fit(
        model,
        optimizer,
        [hvd.rank()],
        [
            hvd.callbacks.BroadcastGlobalVariablesCallback(ps.ranks[0], process_set=ps),
            hvd.callbacks.MetricAverageCallback(process_set=ps),
        ],
    )
    expected = fit(alone, keras.optimizers.Adam(0.01), list(ps.ranks))
    assert close(weights_of(model), weights_of(alone))
    assert np.allclose(history.history["loss"], expected.history["loss"], atol=1e-5)
    hvd.remove_process_set(rest)


def scenario_unequal_epochs_are_told_within_the_set() -> None:
    ps = hvd.process_sets()[1]
    if not ps.included():
        return
    model = dense_model()
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), process_set=ps), loss="mse"
    )
    inputs, labels = data(samples=8 + 4 * ps.rank())
    callback = hvd.callbacks.MetricAverageCallback(process_set=ps)
    with pytest.raises(ArgumentError, match="2 on rank 0, 3 on rank 1"):
        model.fit(inputs, labels, batch_size=4, verbose=0, callbacks=[callback])


def scenario_accumulation_and_local_layers_over_a_set() -> None:
    ps = hvd.process_sets()[2]
    model = dense_model()
    before = weights_of(model)
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), process_set=ps, local_layers=model.layers[1]
    )
    gradients = [keras.ops.ones(one.shape) * (hvd.rank() + 1.0) for one in before]
    optimizer.apply(gradients, model.trainable_variables)
    mean = sum(rank + 1 for rank in ps.ranks) / ps.size() if ps.included() else hvd.rank() + 1.0
    own = (hvd.rank() + 1.0) / (ps.size() if ps.included() else 1)
    steps = [a - b for a, b in zip(before, weights_of(model), strict=True)]
    assert np.allclose(steps[0], mean, atol=1e-5)
    assert np.allclose(steps[2], own, atol=1e-5)
    twice = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), process_set=ps, backward_passes_per_step=2
    )
    before = weights_of(model)
    for _ in range(2):
        twice.apply(gradients, model.trainable_variables)
    assert np.allclose(before[0] - weights_of(model)[0], 2 * mean, atol=1e-5)


def scenario_optimizer_of_keras_2_reduces_over_its_set() -> None:
    if not on_tensorflow():
        return
    import tensorflow as tf
    import tf_keras

    for ps in hvd.process_sets():
        variable = tf.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0), process_set=ps)
        optimizer.apply_gradients([(tf.constant([hvd.rank() + 1.0]), variable)])
        ranks = ranks_that_train(ps)
        assert np.allclose(variable.numpy(), -sum(rank + 1 for rank in ranks) / len(ranks))


def scenario_unregistered_set_is_refused() -> None:
    with pytest.raises(ArgumentError, match="not registered"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), process_set=hvd.ProcessSet([0, 2]))


def _scenarios() -> dict[str, str]:
    import warnings

    def seeded() -> None:
        # a warning of Keras with the current PyTorch
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        keras.utils.set_random_seed(7)

    return run_all(globals(), start, before_each=seeded)


test_scenario = make_tests(_scenarios, on_backends((3, "tensorflow"), (4, "torch")))
