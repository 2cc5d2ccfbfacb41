"""Process sets in TensorFlow: every collective over overlapping sets, gradients, tape, XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hvdlite.errors import ArgumentError
from parallel.scenarios import make_tests, run_all, sizes
from parallel.tensorflow.tensorflow_worlds import (
    ENVIRONMENT,
    eagerly,
    hvd,
    in_graph,
    keras,
    mine,
    same,
    tf,
)

pytestmark = pytest.mark.long

PRELOAD = ("tensorflow",)
Form = Callable[[Callable[..., Any]], Callable[..., Any]]


def start() -> None:
    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init(process_sets=[[0, 1], [1, 2], [0]])


def own_sets() -> list[Any]:
    return [ps for ps in hvd.process_sets() if ps.included()]


def sum_of(ps: Any) -> float:
    return float(sum(rank + 1 for rank in ps.ranks))


def scenario_every_collective_over_overlapping_sets(form: Form) -> None:
    """Sums over the members, and what else depends on the set."""
    for ps in own_sets():
        index, count, total = ps.rank(), ps.size(), sum_of(ps)

        @form
        def everything(ps: Any = ps, count: int = count) -> Any:
            how = {"process_set": ps}
            parts = tf.range(count, dtype=tf.float32) + 10.0 * hvd.rank()
            row = tf.IndexedSlices(mine(1, 2), tf.constant([hvd.rank()]), tf.constant([4, 2]))
            return [
                hvd.allreduce(mine(2), op=hvd.Sum, **how),
                hvd.grouped_allreduce([mine(2), row], op=hvd.Sum, **how)[0],
                hvd.allreduce(mine(2), weight=2.0, **how) * float(count),
                tf.reduce_sum(hvd.allreduce(row, op=hvd.Sum, **how).values, axis=0),
                tf.reduce_sum(hvd.allgather(mine(1, 2), **how), axis=0),
                tf.reduce_sum(hvd.grouped_allgather([mine(1, 2)], **how)[0], axis=0),
                hvd.reducescatter(mine(2 * count), op=hvd.Sum, **how),
                hvd.grouped_reducescatter([mine(2 * count)], op=hvd.Sum, **how)[0],
            ], [
                hvd.alltoall(parts, **how),
                hvd.alltoall(parts, [1] * count, **how)[0],
                hvd.broadcast(mine(2), ps.ranks[-1], **how),
                hvd.size_op(ps.process_set_id),
                hvd.process_set_included_op(ps.process_set_id),
            ]

        sums, others = everything()
        for number, result in enumerate(sums):
            assert result.shape == [2] and same(result, total, 1e-6), (ps.ranks, number, result)
        exchanged = [10 * rank + index for rank in ps.ranks]
        expected = [exchanged, exchanged, [ps.ranks[-1] + 1] * 2, count, 1]
        assert [result.numpy().tolist() for result in others] == expected
        hvd.barrier(process_set=ps)
        variable = tf.Variable(mine(2))
        hvd.broadcast_variables([variable], ps.ranks[-1], process_set=ps)
        assert same(variable, ps.ranks[-1] + 1)
        assert hvd.allgather_object(hvd.rank(), process_set=ps) == ps.ranks


def scenario_outsider_is_refused_at_once_or_when_it_runs() -> None:
    for ps in hvd.process_sets():
        if ps.included():
            continue
        assert int(hvd.process_set_included_op(ps.process_set_id)) == 0
        text = f"rank {hvd.rank()} is no(t a)? member of "
        with pytest.raises(ArgumentError, match=text):
            hvd.allreduce(mine(2), process_set=ps)
        with pytest.raises(ArgumentError, match=text):
            hvd.broadcast_variables([tf.Variable(mine(2))], ps.ranks[0], process_set=ps)
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            tf.function(lambda ps=ps: hvd.allreduce(mine(2), process_set=ps))()


def scenario_condition_keeps_outsiders_out() -> None:
    for ps in hvd.process_sets():

        @tf.function
        def reduce(tensor: Any, ps: Any = ps) -> Any:
            if tf.equal(hvd.process_set_included_op(ps.process_set_id), 1):
                tensor = hvd.allreduce(tensor, op=hvd.Sum, process_set=ps)
            return tensor

        assert same(reduce(mine(2)), sum_of(ps) if ps.included() else hvd.rank() + 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="process set that was removed"):
        hvd.size_op(77)


def scenario_names_in_a_function_are_counted_per_set() -> None:
    """Rank 1 has twice as many operations in its function as the others, gradients included."""

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.constant(0.0)
            for ps in own_sets():
                for _ in range(2):
                    y += tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum, process_set=ps))
        return tape.gradient(y, x)

    expected = sum(2.0 * ps.size() for ps in own_sets())
    assert same(step(tf.ones([2])), expected)


def scenario_xla_reduces_over_a_set() -> None:
    for ps in own_sets():

        @tf.function(jit_compile=True)
        def reduce(x: Any, ps: Any = ps) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = hvd.allreduce(x, op=hvd.Sum, process_set=ps)
            return y, tape.gradient(y, x)

        value, gradient = reduce(mine(3))
        assert same(value, sum_of(ps))
        assert same(gradient, ps.size())


def scenario_tapes_of_overlapping_sets_are_in_flight_together(form: Form) -> None:
    """Rank 1 reduces one part of the model with rank 0 and another with rank 2."""
    variables = [tf.Variable(1.0) for _ in hvd.process_sets()]

    @form
    def gradients() -> Any:
        results = []
        for ps, variable in zip(hvd.process_sets(), variables, strict=True):
            with tf.GradientTape() as tape:
                loss = (hvd.rank() + 1.0) * variable
            tape = hvd.DistributedGradientTape(tape, process_set=ps)
            results.append(tape.gradient(loss, variable))
        return results

    for _ in range(2):
        for ps, result in zip(hvd.process_sets(), gradients(), strict=True):
            mean = sum_of(ps) / ps.size() if ps.included() else hvd.rank() + 1.0
            assert same(result, mean, 1e-6)


def scenario_unregistered_set_is_refused() -> None:
    unknown = hvd.ProcessSet([0, 2])
    with pytest.raises(ArgumentError, match="not registered"):
        hvd.DistributedGradientTape(process_set=unknown)
    with pytest.raises(ArgumentError, match="not registered"):
        tf.function(lambda: hvd.allreduce(mine(1), process_set=unknown))()


def scenario_batch_normalization_over_a_set() -> None:
    for ps in own_sets():
        whole = tf.random.stateless_normal([hvd.size(), 4, 2], seed=[1, 2])
        members = tf.reshape(tf.gather(whole, ps.ranks), [-1, 2])
        expected = keras.layers.BatchNormalization()(members, training=True)
        layer = hvd.SyncBatchNormalization(process_set=ps)
        begin = 4 * ps.rank()
        result = layer(whole[hvd.rank()], training=True)
        assert same(result, tf.cast(expected[begin : begin + 4], tf.float64), 1e-5)


def scenario_sets_come_and_go_under_functions() -> None:
    for times in range(20):
        ps = hvd.add_process_set([0, 2])
        if ps.included():
            reduce = tf.function(lambda ps=ps: hvd.allreduce(mine(2), process_set=ps))
            assert same(reduce(), 2.0)
        hvd.remove_process_set(ps)
        if 0 < times < 3 and hvd.rank() == 0:
            with pytest.raises(tf.errors.InvalidArgumentError, match="there is no process set"):
                reduce()


def _scenarios() -> dict[str, str]:
    return run_all(globals(), start, forms=(eagerly, in_graph))


test_scenario = make_tests(_scenarios, sizes(4), env=ENVIRONMENT)
