"""Graphs of TensorFlow 1, which sessions run: hooks, optimizers, and the collectives in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from harness import RankResult, run_world
from parallel.scenarios import check, names_in
from parallel.tensorflow_worlds import ENVIRONMENT, TIMEOUT, hvd, run_scenarios, tf

STEPS, RATE = 5, 0.1


def samples() -> tuple[Any, Any]:
    generator = np.random.default_rng(5)
    inputs = generator.normal(size=(12, 3))
    return inputs, inputs @ [[1.0], [-2.0], [0.5]] + 0.25


def build_loss(start: float) -> tuple[Any, Any, Any]:
    """Make a linear model in the default graph; return its inputs, labels and loss."""
    inputs = tf.compat.v1.placeholder(tf.float64, [None, 3])
    labels = tf.compat.v1.placeholder(tf.float64, [None, 1])
    initial = tf.compat.v1.constant_initializer(start)
    weight = tf.compat.v1.get_variable("weight", [3, 1], tf.float64, initial)
    bias = tf.compat.v1.get_variable("bias", [1], tf.float64, initial, use_resource=False)
    loss = tf.reduce_mean(tf.square(tf.matmul(inputs, weight) + bias - labels))
    return inputs, labels, loss


def train(
    optimizer: Callable[[], Any], mine: slice, hooks: Sequence[Any], start: float
) -> list[float]:
    """Train in a MonitoredTrainingSession; return the loss on all samples before each step."""
    losses = []
    every_input, every_label = samples()
    with tf.Graph().as_default():
        inputs, labels, loss = build_loss(start)
        step = tf.compat.v1.train.get_or_create_global_step()
        update = optimizer().minimize(loss, global_step=step)
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            for _ in range(STEPS):
                losses.append(session.run(loss, {inputs: every_input, labels: every_label}))
                session.run(update, {inputs: every_input[mine], labels: every_label[mine]})
            assert session.run(step) == STEPS
    return losses


def gradient_descent() -> Any:
    return tf.compat.v1.train.MomentumOptimizer(RATE, 0.5)


def scenario_monitored_session_trains_as_one_process() -> None:
    alone = train(gradient_descent, slice(None), [], start=0.5)
    mine = slice(hvd.rank(), None, hvd.size())
    together = train(
        lambda: hvd.DistributedOptimizer(gradient_descent(), use_locking=True),
        mine,
        [hvd.BroadcastGlobalVariablesHook(0)],
        start=0.5 if hvd.rank() == 0 else 77.0,
    )
    assert alone[-1] < alone[0] / 4
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def scenario_groups_and_compression_in_a_graph() -> None:
    plain = train(lambda: hvd.DistributedOptimizer(gradient_descent()), slice(None), [], 0.5)
    options = {"num_groups": 1, "compression": hvd.Compression.fp16, "gradient_predivide_factor": 2}
    close = train(
        lambda: hvd.DistributedOptimizer(gradient_descent(), **options), slice(None), [], 0.5
    )
    assert close != plain
    np.testing.assert_allclose(close, plain, rtol=1e-2)


def scenario_local_variable_keeps_its_gradient() -> None:
    with tf.Graph().as_default():
        shared = tf.compat.v1.get_variable("shared", initializer=1.0)
        own = tf.compat.v1.get_variable("own", initializer=1.0)
        loss = (shared + own) * (hvd.rank() + 1.0)
        optimizer = hvd.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0), scale_local_gradients=False
        )
        optimizer.register_local_var(own)
        update = optimizer.minimize(loss)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(update)
            mean = sum(range(1, hvd.size() + 1)) / hvd.size()
            assert session.run([shared, own]) == [1.0 - mean, 1.0 - (hvd.rank() + 1.0)]


def scenario_collectives_run_in_every_session_run() -> None:
    with tf.Graph().as_default():
        number = tf.compat.v1.placeholder(tf.float32, [2])
        total = hvd.allreduce(number, op=hvd.Sum)
        rows = hvd.allgather(tf.reshape(number, [1, 2]), name="rows", ignore_name_scope=True)
        place = hvd.rank_op(name="place") * 10 + hvd.size_op()
        counter = tf.compat.v1.get_variable("counter", initializer=hvd.rank() + 5)
        first = hvd.broadcast_([counter], root_rank=hvd.size() - 1)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for turn in range(3):
                fed = {number: [float(turn), float(hvd.rank())]}
                summed, gathered, where = session.run([total, rows, place], fed)
                assert summed.tolist() == [turn * hvd.size(), sum(range(hvd.size()))]
                assert gathered.tolist() == [[turn, rank] for rank in range(hvd.size())]
                assert where == hvd.rank() * 10 + hvd.size()
            assert session.run(first) == [hvd.size() + 4]
            assert session.run(counter) == hvd.size() + 4


def scenario_ranks_that_disagree_are_told_and_go_on() -> None:
    with tf.Graph().as_default():
        bad = hvd.allreduce(tf.ones([2 + hvd.rank()]), name="bad")
        good = hvd.allreduce(tf.ones([2]), name="good")
        with tf.compat.v1.Session() as session:
            with pytest.raises(tf.errors.AbortedError, match="'bad'"):
                session.run(bad)
            assert session.run(good).tolist() == [1.0, 1.0]


def scenario_what_there_is_no_graph_for_says_what_to_use() -> None:
    with pytest.raises(ValueError, match="hvd.broadcast_variables"):
        hvd.broadcast_global_variables(0)
    plain = gradient_descent()
    with pytest.raises(ValueError, match="backward_passes_per_step=2 needs an optimizer of Keras"):
        hvd.DistributedOptimizer(plain, backward_passes_per_step=2)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(plain))


def scenario_eager_forms_of_horovod() -> None:
    variable = tf.Variable([hvd.rank(), 3])
    assert hvd.broadcast_variables([variable], 0, inplace=True) is None
    assert variable.numpy().tolist() == [0, 3]
    variable.assign([hvd.rank(), 4])
    assert hvd.broadcast_([variable], 1, name="again")[0] is variable
    assert variable.numpy().tolist() == [1, 4]
    first = hvd.broadcast_object_fn(root_rank=1, session=None)
    assert first({"rank": hvd.rank()}) == {"rank": 1}
    assert hvd.broadcast_object(hvd.rank(), 1, None, "one") == 1
    assert hvd.allgather_object(hvd.rank(), None, "all") == list(range(hvd.size()))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.cast(variable, tf.float32)) * 0.0
        weight = tf.Variable(2.0)
        loss += weight * float(hvd.rank())
    tape = hvd.DistributedGradientTape(tape)
    gradient = tape.gradient(loss, weight, None, True)
    assert float(gradient) == (hvd.size() - 1) / 2


def body() -> dict[str, str]:
    return run_scenarios(globals())


@pytest.fixture(scope="module")
def results() -> list[RankResult]:
    return run_world(2, body, timeout=TIMEOUT, env=ENVIRONMENT)


@pytest.mark.parametrize("name", names_in(globals()))
def test_sessions(results: list[RankResult], name: str) -> None:
    check(results, name)
