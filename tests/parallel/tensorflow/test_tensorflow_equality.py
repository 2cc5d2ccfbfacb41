"""Training by DistributedGradientTape on N ranks equals one process on the union of the batches."""

from __future__ import annotations

import hashlib
from typing import Any

from parallel.scenarios import make_tests, sizes
from parallel.tensorflow.tensorflow_worlds import (
    ENVIRONMENT,
    hvd,
    in_graph,
    keras,
    run_scenarios,
    tf,
)

PRELOAD = ("tensorflow",)
BATCHES = 15
BATCH = 24  # of all ranks together
FEATURES = 6


def make_model(dtype: str) -> Any:
    keras.utils.set_random_seed(3)
    units = (16, 8, 2)
    model = keras.Sequential([keras.layers.Dense(n, activation="tanh", dtype=dtype) for n in units])
    model.build([None, FEATURES])
    return model


def batch_of(number: int, dtype: str) -> tuple[Any, Any]:
    inputs = tf.random.stateless_normal([BATCH, FEATURES], [number, 7], dtype=tf.float64)
    targets = tf.stack([tf.sin(tf.reduce_sum(inputs, 1)), tf.reduce_prod(inputs, 1)], axis=1)
    return tf.cast(inputs, dtype), tf.cast(targets, dtype)


def share_of(rank: int, size: int, uneven: bool) -> slice:
    """Cut the batch; unevenly, rank r gets about r + 1 parts of it."""
    parts = [rank + 1 if uneven else 1 for rank in range(size)]
    bounds = [BATCH * sum(parts[:r]) // sum(parts) for r in range(size + 1)]
    return slice(bounds[rank], bounds[rank + 1])


def train(
    optimizer: Any, dtype: str, compiled: bool, uneven: bool, distributed: bool
) -> tuple[Any, Any]:
    """Return the losses of all steps, and the model's and the optimizer's variables at the end."""
    model = make_model(dtype)
    optimizer.build(model.trainable_variables)
    share = slice(None)
    if distributed:
        share = share_of(hvd.rank(), hvd.size(), uneven)
        if hvd.rank() != 0:
            for variable in model.trainable_variables:
                variable.assign(tf.fill(variable.shape, tf.cast(hvd.rank(), dtype)))
        hvd.broadcast_variables(model.weights, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)

    def step(inputs: Any, targets: Any) -> Any:
        weight = len(inputs) if uneven else None
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs, training=True) - targets) ** 2)
        if distributed:
            tape = hvd.DistributedGradientTape(tape, weight=weight)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return hvd.allreduce(loss, weight=weight, name="loss") if distributed else loss

    step = in_graph(step) if compiled else step
    losses = []
    for number in range(BATCHES):
        inputs, targets = batch_of(number, dtype)
        losses.append(float(step(inputs[share], targets[share])))
    return losses, [variable.numpy() for variable in [*model.weights, *optimizer.variables]]


def check(make: Any, dtype: str, compiled: bool, uneven: bool, bound: float) -> None:
    """Train on all ranks, and on each alone; the largest differences must be below the bound."""
    losses, state = train(make(), dtype, compiled, uneven, True)
    digest = hashlib.sha256(b"".join(one.tobytes() for one in state)).hexdigest()
    assert len(set(hvd.allgather_object((tuple(losses), digest)))) == 1
    expected_losses, expected_state = train(make(), dtype, compiled, uneven, False)
    largest = max(map(abs, expected_losses))
    assert max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)) / largest < bound
    for ours, theirs in zip(state, expected_state, strict=True):
        assert abs(ours - theirs).max() <= abs(theirs).max() * bound


def scenario_uneven_shares_in_functions() -> None:
    check(lambda: keras.optimizers.Adam(0.01), "float64", True, True, 1e-10)


def scenario_equal_shares_eagerly() -> None:
    check(lambda: keras.optimizers.SGD(0.05, momentum=0.9), "float32", False, False, 1e-5)


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_tape_trains_like_one_process = make_tests(body, sizes(3), env=ENVIRONMENT)
