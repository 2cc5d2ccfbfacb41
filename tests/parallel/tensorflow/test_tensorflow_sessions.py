"""Graphs of TensorFlow 1, which sessions run: hooks, optimizers, and the collectives in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from parallel.scenarios import make_tests, sizes, tensors_sent_by
from parallel.tensorflow.tensorflow_worlds import ENVIRONMENT, hvd, run_scenarios, tf

pytestmark = pytest.mark.long

PRELOAD = ("tensorflow",)
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


def scenario_branches_in_a_graph_leave_nothing_for_others() -> None:
    for factor in (1.0, 2.0):  # two graphs
        with tf.Graph().as_default():
            chosen = tf.compat.v1.placeholder(tf.bool, [])
            one = tf.constant([hvd.rank() * factor])
            sums = tf.cond(chosen, lambda: hvd.allreduce(one, op=hvd.Sum), lambda: one)  # noqa: B023
            with tf.compat.v1.Session() as session:
                total = sum(range(hvd.size())) * factor
                assert session.run(sums, {chosen: True}).tolist() == [total]
                assert session.run(sums, {chosen: False}).tolist() == [hvd.rank() * factor]
                assert session.run(sums, {chosen: True}).tolist() == [total]
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == hvd.size()
    in_function = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    assert float(in_function(tf.constant(1.0))) == hvd.size()


@contextlib.contextmanager
def control_flow(version: int) -> Iterator[None]:
    """Make branches and loops as in a script that chose this version of control flow."""
    if version == 1:
        tf.compat.v1.disable_control_flow_v2()
    try:
        yield
    finally:
        tf.compat.v1.enable_control_flow_v2()


def scenario_loops_and_branches_of_both_versions() -> None:
    if hvd.rank() == 0:
        tf.function(lambda x: tf.cond(x > 0, lambda: x, lambda: -x))(tf.constant(1))  # one more
    for version in (1, 2):
        with control_flow(version), tf.Graph().as_default(), tf.compat.v1.Session() as session:
            count = tf.compat.v1.placeholder(tf.int32, [])
            start = tf.constant([1.0])

            def body(i: Any, total: Any, rows: Any) -> Any:
                here = tf.cast(i * (hvd.rank() + 1), tf.float32)
                total += hvd.allreduce(here, op=hvd.Sum)  # no iteration waits for it
                rows += tf.reduce_sum(hvd.allgather(tf.reshape(here, [1]), name="in_loop"))
                return i + 1, total, rows

            branch = tf.cond(count > 0, lambda: hvd.allreduce(start), lambda: start)  # noqa: B023
            options = {"parallel_iterations": 1} if version == 1 else {}
            first = (tf.constant(0), tf.constant(0.0), tf.constant(0.0))
            loop = tf.while_loop(lambda i, *_: i < count, body, first, **options)  # noqa: B023
            power = tf.while_loop(
                lambda i, _: i < 3,
                lambda i, x: (i + 1, hvd.allreduce(x, op=hvd.Sum)),
                (tf.constant(0), start),
                **options,
            )[1]
            (slope,) = tf.gradients(power, [start])
            for _ in range(2):
                _, total, rows = session.run(loop, {count: 20})
                assert total == 190 * sum(range(1, hvd.size() + 1))
                assert rows == total
                assert session.run([branch], {count: 1}) == [1.0]
                assert session.run([power, slope]) == [hvd.size() ** 3] * 2


def scenario_parallel_iterations_of_version_1_are_refused() -> None:
    def body(i: Any) -> Any:
        return i + hvd.allreduce(i, op=hvd.Max, name="mixed_up")

    with control_flow(1), tf.Graph().as_default():
        with pytest.raises(ValueError, match="'mixed_up' is in a loop .* parallel_iterations=1"):
            tf.while_loop(lambda i: i < 9, body, [tf.constant(1)])
        inner = tf.while_loop(lambda i: i < 9, body, [tf.constant(1)], parallel_iterations=1)
        with tf.compat.v1.Session() as session:
            assert session.run(tf.nest.flatten(inner)) == [16]
    with tf.Graph().as_default():
        for nested in (
            lambda i: tf.cond(i > 3, lambda: body(i), lambda: i),
            lambda i: tf.while_loop(lambda i: i < 3, body, [i]),
        ):
            with pytest.raises(ValueError, match="'mixed_up' .* call it in the body itself"):
                tf.while_loop(lambda i: i < 9, nested, [tf.constant(1)])


def step_of(optimizer: Any, value: Any, version: int) -> tuple[Any, Any]:
    """Make the variables and the loss of a step; its gradients are value and 2 * value."""
    dense = tf.compat.v1.get_variable("dense", initializer=[0.0], use_resource=version == 2)
    table = tf.compat.v1.get_variable("table", initializer=[[0.0], [0.0]])
    step = tf.compat.v1.train.get_or_create_global_step()
    loss = tf.reduce_sum(dense * value) + tf.reduce_sum(tf.gather(table, [1, 1])) * value
    return optimizer.minimize(loss, global_step=step), [dense, table, step]


def scenario_several_passes_make_a_step_in_a_graph() -> None:
    for version, average in ((1, True), (2, False)):
        with control_flow(version), tf.Graph().as_default(), tf.compat.v1.Session() as session:
            optimizer = hvd.DistributedOptimizer(
                tf.compat.v1.train.MomentumOptimizer(1.0, 0.0),
                backward_passes_per_step=3,
                average_aggregated_gradients=average,
            )
            value = tf.compat.v1.placeholder(tf.float32, [])
            train, state = step_of(optimizer, value, version)
            assert len(tf.compat.v1.global_variables()) == 5  # with two slots
            session.run(tf.compat.v1.global_variables_initializer())
            scale = sum(range(1, hvd.size() + 1)) / hvd.size() / (3 if average else 1)
            expected = 0.0
            for batch in range(7):
                session.run(train, {value: (hvd.rank() + 1) * (batch + 1.0)})
                if batch % 3 == 2:
                    expected -= scale * (3 * batch)
                dense, table, step = session.run(state)
                np.testing.assert_allclose(dense, [expected], rtol=1e-6)
                np.testing.assert_allclose(table, [[0.0], [2 * expected]], rtol=1e-6)
                assert step == (batch + 1) // 3


def scenario_several_passes_make_a_step_eagerly_and_in_a_function() -> None:
    for in_function in (False, True):
        optimizer = hvd.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2
        )
        used, unused = tf.Variable([0.0, 0.0]), tf.Variable(1.0)

        def train(
            value: Any, used: Any = used, unused: Any = unused, optimizer: Any = optimizer
        ) -> None:
            pairs = optimizer.compute_gradients(lambda: used[0] * value, [used, unused])
            assert pairs[1][0] is None
            optimizer.apply_gradients(pairs)

        step = tf.function(train) if in_function else train
        sent = tensors_sent_by(lambda step=step: [step(tf.constant(v)) for v in (1.0, 2.0, 4.0)])
        assert sent == 1
        assert used.numpy().tolist() == [-3.0, 0.0]
        step(tf.constant(hvd.rank() + 1.0))
        assert used.numpy().tolist() == [-3.0 - 4.0 - (hvd.size() + 1) / 2, 0.0]


def scenario_rows_in_a_graph_go_their_way() -> None:
    for words, tensors in ((4, 2), (400, 3)):  # dense, and by rows
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            table = tf.compat.v1.get_variable("table", [words, 2], initializer=tf.zeros_initializer)
            loss = tf.reduce_sum(tf.gather(table, [0, hvd.rank(), hvd.rank()]))
            plain = tf.compat.v1.train.MomentumOptimizer(1.0, 0.5)
            train = hvd.DistributedOptimizer(plain, op=hvd.Sum).minimize(loss)
            session.run(tf.compat.v1.global_variables_initializer())
            assert tensors_sent_by(lambda s=session, t=train: s.run(t)) == tensors
            values = session.run(table)
            assert values[:2].tolist() == [[-4.0] * 2, [-2.0] * 2]  # of two ranks
            assert not values[2:].any()


def scenario_ranks_that_disagree_are_told_and_go_on() -> None:
    with tf.Graph().as_default():
        bad = hvd.allreduce(tf.ones([2 + hvd.rank()]), name="bad")
        good = hvd.allreduce(tf.ones([2]), name="good")
        with tf.compat.v1.Session() as session:
            with pytest.raises(tf.errors.FailedPreconditionError, match="'bad'"):
                session.run(bad)
            assert session.run(good).tolist() == [1.0, 1.0]


def scenario_what_there_is_no_graph_for_says_what_to_use() -> None:
    with pytest.raises(ValueError, match="hvd.broadcast_variables"):
        hvd.broadcast_global_variables(0)
    plain = gradient_descent()
    with pytest.raises(ValueError, match="backward_passes_per_step is a whole number"):
        hvd.DistributedOptimizer(plain, backward_passes_per_step=0)
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


test_sessions = make_tests(body, sizes(2), env=ENVIRONMENT)
