"""Process sets in Keras 3, on PyTorch, and in Keras 2: arrays, optimizers, callbacks."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallel.keras import keras_worlds
from parallel.keras.keras_worlds import (
    KERAS_2,
    adam,
    and_legacy,
    array_of,
    close,
    data,
    dense_model,
    hvd,
    keras,
    on_backends,
    on_keras_2,
    tensor_of,
    variable_of,
    weights_of,
)
from parallel.scenarios import make_tests, raises

PRELOAD = ("keras", "tensorflow")


def sets() -> list[Any]:
    """Return overlapping process sets, and that of all ranks."""
    if len(hvd.process_sets()) == 1:
        hvd.add_process_set([0, 1])
        hvd.add_process_set([1, 2])
    return list(hvd.process_sets())


def scenario_arrays_over_overlapping_sets() -> None:
    if on_keras_2():
        return
    mine = np.full(3, hvd.rank() + 1.0)
    for ps in sets():
        if not ps.included():
            with raises(hvd.ArgumentError, "not a member"):
                hvd.allreduce(mine, process_set=ps)
            continue
        total = float(sum(rank + 1 for rank in ps.ranks))
        assert hvd.allreduce(mine, process_set=ps).tolist() == [total / ps.size()] * 3
        rows = [[rank + 1.0] * 3 for rank in ps.ranks]
        assert hvd.allgather(mine[None], process_set=ps).tolist() == rows
        assert hvd.broadcast(mine, ps.ranks[-1], process_set=ps)[0] == ps.ranks[-1] + 1
        block = hvd.reducescatter(np.ones(ps.size() * 2), op=hvd.Sum, process_set=ps)
        assert block.tolist() == [ps.size()] * 2
        variable = variable_of(mine)
        hvd.broadcast_variables([variable], ps.ranks[0], process_set=ps)
        assert array_of(variable)[0] == ps.ranks[0] + 1
        assert hvd.allgather_object(hvd.rank(), process_set=ps) == ps.ranks


def scenario_optimizers_reduce_over_their_set() -> None:
    for ps in sets():
        ranks = list(ps.ranks) if ps.included() else [hvd.rank()]  # Others train alone.
        mean = sum(rank + 1 for rank in ranks) / len(ranks)
        for passes in (1, 2):
            variables = [variable_of(np.zeros(2)) for _ in range(2)]
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.SGD(1.0), process_set=ps, backward_passes_per_step=passes
            )
            if passes == 1 and not on_keras_2():
                optimizer.register_local_var(variables[1])
            for _ in range(passes):
                gradients = [tensor_of(np.full(2, hvd.rank() + 1)) for _ in variables]
                optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
            assert np.allclose(array_of(variables[0]), -mean * passes)
            own = (hvd.rank() + 1) / len(ranks)
            other = mean * passes if passes == 2 or on_keras_2() else own
            assert np.allclose(array_of(variables[1]), -other)


def fit(model: Any, optimizer: Any, ranks: list[int], callbacks: Any = ()) -> Any:
    """Fit with the samples of some ranks: batches of one process equal those of all."""
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    inputs, labels = data(samples=12 * hvd.size())
    chosen = [i for i in range(len(inputs)) if i % hvd.size() in ranks]
    how = {"batch_size": 4 * len(ranks), "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(inputs[chosen], labels[chosen], callbacks=list(callbacks), **how)


def scenario_disjoint_sets_train_at_the_same_time() -> None:
    """Each process set has its own model and its own beginning, also the last rank by itself."""
    pair, rest = sets()[1], hvd.add_process_set([2])
    ps = pair if pair.included() else rest
    for make in and_legacy(adam):
        model, alone = dense_model(), dense_model()
        if hvd.rank() != ps.ranks[0]:
            model.set_weights([weight + 1 for weight in model.get_weights()])
        optimizer = hvd.DistributedOptimizer(make(), process_set=ps)
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(ps.ranks[0], process_set=ps),
            hvd.callbacks.MetricAverageCallback(process_set=ps),
        ]
        history = fit(model, optimizer, [hvd.rank()], callbacks)
        expected = fit(alone, make(), list(ps.ranks))
        assert close(weights_of(model), weights_of(alone), 1e-5)
        assert np.allclose(history.history["loss"], expected.history["loss"], atol=1e-5)
    hvd.remove_process_set(rest)


def scenario_unequal_epochs_are_told_within_the_set() -> None:
    ps = sets()[1]
    if ps.included():
        model = dense_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), process_set=ps)
        model.compile(optimizer=optimizer, loss="mse")
        inputs, labels = data(samples=8 + 4 * ps.rank())
        callback = hvd.callbacks.MetricAverageCallback(process_set=ps)
        with raises(hvd.ArgumentError, "2 on rank 0, 3 on rank 1"):
            model.fit(inputs, labels, batch_size=4, verbose=0, callbacks=[callback])


def scenario_unregistered_set_is_refused() -> None:
    with raises(hvd.ArgumentError, "not registered"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), process_set=hvd.ProcessSet([0, 2]))


def body() -> dict[str, str]:
    return keras_worlds.run_scenarios(globals())


test_process_sets = make_tests(body, on_backends((3, "torch"), (3, KERAS_2)), quick=("3-torch",))
