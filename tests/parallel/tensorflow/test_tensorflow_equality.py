"""Training by DistributedGradientTape on N ranks equals one process on the union of the batches."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import pytest

from harness import RankResult, run_world
from parallel.tensorflow.tensorflow_worlds import (
    ENVIRONMENT,
    hvd,
    in_graph,
    keras,
    start,
    tf,
)

PRELOAD = ("tensorflow",)
EPOCHS = 4
BATCHES = 5
BATCH = 24  # of all ranks together
FEATURES = 6
# Largest difference of a weight or loss, relative to the largest value in its tensor.
BOUNDS = {"float64": 1e-10, "float32": 1e-5}


class Case(NamedTuple):
    optimizer: str
    dtype: str
    compiled: bool
    uneven: bool


# Every two of optimizer, dtype, and way to run meet in one of the cases.
CASES = [
    Case("sgd", "float64", True, False),
    Case("adam", "float32", True, False),
    Case("sgd", "float32", True, True),
    Case("adam", "float64", True, True),
    Case("sgd", "float64", False, False),
    Case("adam", "float32", False, False),
]


def make_optimizer(name: str) -> Any:
    if name == "sgd":
        return keras.optimizers.SGD(0.05, momentum=0.9)
    return keras.optimizers.Adam(0.01)


def make_model(dtype: str) -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.layers.Dense(units, activation="tanh", dtype=dtype) for units in (16, 8)]
        + [keras.layers.Dense(2, dtype=dtype)]
    )
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
    case: Case, distributed: bool, share: slice = slice(None)
) -> tuple[list[float], list[Any], list[str]]:
    """Return the losses of all steps, the weights at the end, and their digest by epoch."""
    model, optimizer = make_model(case.dtype), make_optimizer(case.optimizer)
    optimizer.build(model.trainable_variables)
    if distributed:
        share = share_of(hvd.rank(), hvd.size(), case.uneven)
        if hvd.rank() != 0:
            for variable in model.trainable_variables:
                variable.assign(tf.fill(variable.shape, tf.cast(hvd.rank(), case.dtype)))
        hvd.broadcast_variables(model.weights, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)

    def step(inputs: Any, targets: Any) -> Any:
        weight = len(inputs) if case.uneven else None
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs, training=True) - targets) ** 2)
        if distributed:
            tape = hvd.DistributedGradientTape(tape, weight=weight)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return hvd.allreduce(loss, weight=weight, name="loss") if distributed else loss

    step = in_graph(step) if case.compiled else step
    losses, digests = [], []
    for epoch in range(EPOCHS):
        for number in range(BATCHES):
            inputs, targets = batch_of(epoch * BATCHES + number, case.dtype)
            losses.append(float(step(inputs[share], targets[share])))
        state = [variable.numpy() for variable in [*model.weights, *optimizer.variables]]
        digests.append(hashlib.sha256(b"".join(one.tobytes() for one in state)).hexdigest())
    return losses, [variable.numpy() for variable in model.weights], digests


def first_half_alone() -> Any:
    start()
    return train(CASES[0], False, share_of(0, 2, False))


def body(distributed: bool) -> list[Any]:
    start()
    return [train(case, distributed) for case in CASES]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    (result,) = run_world(1, body, False, env=ENVIRONMENT)
    values: list[Any] = result.value
    return values


@pytest.fixture(scope="module", params=[3])
def results(request: pytest.FixtureRequest) -> list[RankResult]:
    return run_world(request.param, body, True, env=ENVIRONMENT)


def identifier(case: Case) -> str:
    form = "graph" if case.compiled else "eager"
    return f"{case.optimizer}-{case.dtype}-{form}-{'unequal' if case.uneven else 'equal'}"


@pytest.mark.parametrize("number", range(len(CASES)), ids=[identifier(case) for case in CASES])
def test_tape_trains_like_one_process(
    results: list[RankResult], alone: list[Any], number: int
) -> None:
    bound = BOUNDS[CASES[number].dtype]
    losses, weights, digests = results[0].value[number]
    expected_losses, expected_weights, _ = alone[number]
    for result in results[1:]:
        assert result.value[number][0] == losses, "losses differ between ranks"
        assert result.value[number][2] == digests, "weights differ between ranks"
    largest = max(map(abs, expected_losses))
    difference = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True)) / largest
    assert difference < bound, f"losses: {difference:.2e}"
    for ours, theirs in zip(weights, expected_weights, strict=True):
        difference = abs(ours - theirs).max() / abs(theirs).max()
        assert difference < bound, f"weights: {difference:.2e}"


def test_the_test_sees_a_missing_reduction(alone: list[Any]) -> None:
    (result,) = run_world(1, first_half_alone, env=ENVIRONMENT)
    ours, theirs = result.value[1][0], alone[0][1][0]
    assert abs(ours - theirs).max() / abs(theirs).max() > 1e-3
