"""DistributedOptimizer with optimizers of Keras 2, the package tf_keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parallel.keras.keras_worlds import (
    Later,
    environment,
    hvd,
    mine,
    run_scenarios,
    same_bits,
)
from parallel.keras.tf_keras_worlds import (
    BATCHES,
    adam,
    close,
    fit_on_all_ranks_and_alone,
    k2,
    legacy_adam,
    legacy_sgd,
    sgd,
    weights_of,
)
from parallel.scenarios import make_tests, sizes

pytestmark = pytest.mark.long

PRELOAD = ("tf_keras",)
tf: Any = Later("tensorflow")


def scenario_adam() -> None:
    fit_on_all_ranks_and_alone(adam)


def scenario_adam_with_clipping_eagerly() -> None:
    fit_on_all_ranks_and_alone(adam, run_eagerly=True)


def scenario_legacy_adam() -> None:
    fit_on_all_ranks_and_alone(legacy_adam)


def scenario_legacy_adam_eagerly() -> None:
    fit_on_all_ranks_and_alone(legacy_adam, run_eagerly=True)


def scenario_several_steps_at_once() -> None:
    fit_on_all_ranks_and_alone(sgd, steps_per_execution=BATCHES)


def scenario_compiled() -> None:
    fit_on_all_ranks_and_alone(sgd, jit_compile=True)


def scenario_compiled_legacy() -> None:
    fit_on_all_ranks_and_alone(legacy_adam, jit_compile=True)


def train_embedding(make: Callable[[], Any], words: int = 6, **arguments: Any) -> None:
    def model() -> Any:
        k2.utils.set_random_seed(5)
        return k2.Sequential([k2.layers.Embedding(words, 2, input_length=1), k2.layers.Flatten()])

    ours = model()
    ours.compile(optimizer=hvd.DistributedOptimizer(make(), **arguments), loss="mse")
    tokens = np.arange(8 * hvd.size())[:, None] % 5
    targets = np.ones((len(tokens), 2), "float32")
    how = {"shuffle": False, "verbose": 0}
    ours.fit(mine(tokens), mine(targets), batch_size=4, **how)
    assert same_bits(weights_of(ours))
    if hvd.rank() == 0:
        alone = model()
        alone.compile(optimizer=make(), loss="mse")
        alone.fit(tokens, targets, batch_size=4 * hvd.size(), **how)
        assert close(weights_of(ours), weights_of(alone))


def scenario_rows_of_an_embedding() -> None:
    for words in (6, 600):  # dense, and by rows
        train_embedding(sgd, words)


def scenario_rows_of_an_embedding_made_dense() -> None:
    train_embedding(sgd, sparse_as_dense=True)


def scenario_rows_of_an_embedding_legacy() -> None:
    train_embedding(legacy_sgd, words=600)


def scenario_a_loop_of_your_own() -> None:
    for make in (k2.optimizers.SGD, k2.optimizers.legacy.SGD):
        optimizer = hvd.DistributedOptimizer(make(1.0), op=hvd.Sum)
        used, unused = tf.Variable([0.0, 0.0]), tf.Variable(1.0)
        gradient = tf.constant([1.0, hvd.rank() + 1.0])
        optimizer.apply_gradients([(None, unused), (gradient, used)])
        size = hvd.size()
        assert used.numpy().tolist() == [-size, -size * (size + 1) / 2]
        assert float(unused) == 1.0


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_tf_keras = make_tests(body, sizes(2), env=environment("tensorflow"))
