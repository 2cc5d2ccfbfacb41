"""Training by fit on N ranks equals fit of one process on the union of the batches."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from harness import RankResult, run_world
from parallel.keras.keras_worlds import (
    environment,
    hvd,
    keras,
    mine,
    on_tensorflow,
    start,
    weights_of,
)

pytestmark = pytest.mark.long

PRELOAD = ("keras", "tensorflow")
EPOCHS = 3
BATCHES = 4
BATCH = 24  # of all ranks together
FEATURES = 6
# Largest difference of a weight or loss, relative to the largest value in its array.
BOUNDS = {"float64": 1e-10, "float32": 1e-5}
# A fit of TensorFlow takes long, so that there each optimizer and each dtype comes once.
PAIRS = {
    "torch": [(optimizer, dtype) for optimizer in ("sgd", "adam") for dtype in BOUNDS],
    "tensorflow": [("adam", "float64"), ("sgd", "float32")],
}
WORLDS = [(2, "torch"), (3, "tensorflow"), (3, "torch")]


def make_optimizer(name: str) -> Any:
    if name == "sgd":
        return keras.optimizers.SGD(0.05, momentum=0.9)
    return keras.optimizers.Adam(0.01, global_clipnorm=1.0)


def mean_of_squares(batch: int) -> Any:
    class MeanOfSquares(keras.losses.Loss):  # type: ignore[misc,name-defined]
        def call(self, targets: Any, outputs: Any) -> Any:
            return keras.ops.sum(keras.ops.square(outputs - targets), axis=-1) / batch

    return MeanOfSquares(reduction="sum")


def make_model(optimizer: Any, batch: int) -> Any:
    """Make a model that computes in float64 if asked to.

    On PyTorch, keras.ops.matmul (in Dense) and mean (in "mse") then have the precision of float32.
    """
    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.EinsumDense("ij,jk->ik", units, activation=activation, bias_axes="k")
        for units, activation in ((16, "tanh"), (8, "tanh"), (2, None))
    ]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    model.compile(
        optimizer=optimizer, loss=mean_of_squares(batch), metrics=["mae"], jit_compile=False
    )
    return model


def samples() -> tuple[Any, Any]:
    inputs = np.random.default_rng(5).normal(size=(BATCH * BATCHES, FEATURES))
    targets = np.stack([np.sin(inputs.sum(1)), inputs.prod(1)], axis=1)
    return inputs.astype(keras.config.floatx()), targets.astype(keras.config.floatx())


def fit(model: Any, inputs: Any, targets: Any, callbacks: list[Any], batch: int) -> Any:
    return model.fit(
        inputs,
        targets,
        batch_size=batch,
        epochs=EPOCHS,
        validation_data=(inputs, targets),
        shuffle=False,
        callbacks=callbacks,
        verbose=0,
    ).history


def difference(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours, "float64"), np.asarray(theirs, "float64")
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def train(optimizer: str, dtype: str) -> dict[str, Any]:
    """Train on all ranks, and on rank 0 alone; compare."""
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)  # Else that of the first training stays.
    inputs, targets = samples()
    batch = BATCH // hvd.size()
    model = make_model(hvd.DistributedOptimizer(make_optimizer(optimizer)), batch)
    if hvd.rank() > 0:
        model.set_weights([weight + hvd.rank() for weight in weights_of(model)])
    digests = []

    def note(epoch: int, logs: Any) -> None:
        state = [*weights_of(model), *map(keras.ops.convert_to_numpy, model.optimizer.variables)]
        digests.append(hashlib.sha256(b"".join(array.tobytes() for array in state)).hexdigest())
        digests.append(repr(logs))

    callbacks = [
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        keras.callbacks.LambdaCallback(on_epoch_end=note),
    ]
    history = fit(model, mine(inputs), mine(targets), callbacks, batch)
    assert sorted(history) == ["loss", "mae", "val_loss", "val_mae"]
    if hvd.rank() > 0:
        return {"digests": digests}
    alone = make_model(make_optimizer(optimizer), BATCH)
    expected = fit(alone, inputs, targets, [], BATCH)
    pairs = list(zip(weights_of(model), weights_of(alone), strict=True))
    return {
        "weights": max(difference(ours, theirs) for ours, theirs in pairs),
        "metrics": max(difference(history[key], expected[key]) for key in expected),
        # See make_model.
        "dtype of metrics": dtype if on_tensorflow() else "float32",
        "digests": digests,
        "last": history["loss"][-1] / history["loss"][0],
    }


def body() -> dict[str, Any]:
    start()
    pairs = PAIRS[keras.backend.backend()]
    outcomes = {f"{optimizer} {dtype}": train(optimizer, dtype) for optimizer, dtype in pairs}
    hvd.shutdown()
    return outcomes


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> list[RankResult]:
    ranks, backend = request.param
    return run_world(ranks, body, env=environment(backend))


@pytest.mark.parametrize(
    ("results", "optimizer", "dtype"),
    [(world, *pair) for world in WORLDS for pair in PAIRS[world[1]]],
    indirect=["results"],
    ids=str,
)
def test_fit_equals_one_process(results: list[RankResult], optimizer: str, dtype: str) -> None:
    first, *others = [result.value[f"{optimizer} {dtype}"] for result in results]
    assert first["weights"] <= BOUNDS[dtype], first
    assert first["metrics"] <= BOUNDS[first["dtype of metrics"]], first
    assert first["last"] < 0.95
    # The digests are of the weights, the optimizer's state and the metrics.
    assert all(one["digests"] == first["digests"] for one in others)
