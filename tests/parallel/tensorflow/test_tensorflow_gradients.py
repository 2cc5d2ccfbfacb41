"""The gradients of the collectives, in closed form and against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from parallel.scenarios import make_tests, sizes
from parallel.tensorflow.tensorflow_worlds import (
    ENVIRONMENT,
    hvd,
    in_graph,
    mine,
    ranks,
    run_scenarios,
    same,
    tf,
)

PRELOAD = ("tensorflow",)
Form = Callable[[Callable[..., Any]], Callable[..., Any]]


def raises(kind: type[Exception], text: str) -> pytest.RaisesExc[Exception]:
    return pytest.raises(kind, match=text)


def gradient_of(function: Callable[[Any], Any], x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(function(x))
    return tape.gradient(y, x)


def scenario_gradient_of_allreduce(form: Form) -> None:
    for op, factor in [(hvd.Sum, hvd.size()), (hvd.Average, 1)]:

        def reduce(x: Any, op: int = op) -> Any:
            return hvd.allreduce(x, op=op, prescale_factor=0.5) * (hvd.rank() + 1)

        # The sum of the ranks' losses has the sum of their factors.
        expected = 0.5 * factor * sum(ranks()) / hvd.size()
        gradient = form(lambda x, reduce=reduce: gradient_of(reduce, x))(mine(3))
        assert same(gradient, expected, 1e-6), (op, gradient)

    def group(x: Any) -> Any:
        first, second = hvd.grouped_allreduce([x, x * 2], op=hvd.Sum)
        return first + second

    gradient = form(lambda x: gradient_of(group, x))(mine(3))
    assert same(gradient, 3 * hvd.size())


def scenario_gradient_of_weighted_average(form: Form) -> None:
    share = (hvd.rank() + 1) / sum(ranks()) * hvd.size()
    for weight in (hvd.rank() + 1, tf.constant(hvd.rank() + 1.0)):

        def reduce(x: Any, weight: Any = weight) -> Any:
            return hvd.allreduce(x, weight=weight)

        gradient = form(lambda x, reduce=reduce: gradient_of(reduce, x))(mine(3))
        assert same(gradient, share, 1e-6)


def scenario_gradient_through_compression_and_twice(form: Form) -> None:
    def reduce(x: Any) -> Any:
        return hvd.allreduce(x, compression=hvd.Compression.bf16, op=hvd.Sum)

    gradient = form(lambda x: gradient_of(reduce, x))(mine(3))
    assert gradient.dtype == tf.float32 and same(gradient, hvd.size())

    def slope(x: Any) -> Any:
        return gradient_of(lambda x: hvd.allreduce(x**3, op=hvd.Sum), x)

    gradient = form(lambda x: gradient_of(slope, x))(mine(2))
    assert same(gradient, hvd.size() * 6 * (hvd.rank() + 1))


def scenario_gradients_of_two_targets_in_flight_together(form: Form) -> None:
    def both(x: Any) -> tuple[Any, Any]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = hvd.allreduce(x, op=hvd.Sum)
            first, second = y * 2, y * 5
        return tape.gradient(first, x), tape.gradient(second, x)

    first, second = form(both)(mine(3))
    assert same(first, 2 * hvd.size()) and same(second, 5 * hvd.size())


def scenario_gradient_of_a_function_from_outside() -> None:
    reduce = in_graph(lambda x: hvd.allreduce(x**2, op=hvd.Sum))
    for _ in range(2):
        assert same(gradient_of(reduce, mine(3)), 2 * hvd.size() * (hvd.rank() + 1))


def scenario_gradient_of_allgather(form: Form) -> None:
    rows = hvd.rank() + 1

    def gather(x: Any) -> Any:
        gathered = hvd.allgather(x)
        factors = tf.range(1.0, tf.cast(tf.shape(gathered)[0], tf.float32) + 1)[:, None]
        return gathered * factors * (hvd.rank() + 1.0)

    gradient = form(lambda x: gradient_of(gather, x))(tf.ones([rows, 2]))
    begin = sum(range(1, rows))
    mean = sum(ranks()) / hvd.size()
    expected = tf.range(begin + 1.0, begin + rows + 1.0)[:, None] * mean
    assert gradient.shape == (rows, 2) and same(gradient, expected)


def scenario_gradient_of_broadcast(form: Form) -> None:
    root = hvd.size() - 1

    def share(x: Any) -> Any:
        return hvd.broadcast(x, root) * (hvd.rank() + 1)

    gradient = form(lambda x: gradient_of(share, x))(mine(3))
    assert same(gradient, sum(ranks()) / hvd.size() if hvd.rank() == root else 0)


def scenario_incoming_gradients_of_another_dtype(form: Form) -> None:
    """A tape takes output_gradients of any dtype, and Horovod's users give float32."""
    size = hvd.size()
    verbs: list[Callable[[Any], Any]] = [
        hvd.allreduce,
        hvd.allgather,
        hvd.reducescatter,
        hvd.alltoall,
        lambda x: hvd.broadcast(x, 0),
        lambda x: hvd.grouped_allreduce([x, x]),
        lambda x: hvd.grouped_allgather([x, x]),
        lambda x: hvd.grouped_reducescatter([x, x]),
    ]
    for verb in verbs:

        def differentiate(x: Any, dtype: Any, verb: Callable[[Any], Any] = verb) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = verb(x)
            ones = tf.nest.map_structure(lambda one: tf.ones(tf.shape(one), dtype), y)
            return tape.gradient(y, x, output_gradients=ones)

        x = tf.ones([2 * size, 3], tf.float64)
        narrow, wide = (
            form(lambda x, d=d, call=differentiate: call(x, d))(x) for d in (tf.float32, tf.float64)
        )
        assert narrow.dtype == tf.float64 and same(narrow, wide)


def scenario_gradient_equals_finite_differences(form: Form) -> None:
    """Differentiate the sum of all ranks' losses, by one element of one rank at a time.

    This holds for allreduce and alltoall; the others give a mean, see test_tensorflow_table.
    """

    def loss(x: Any) -> Any:
        mean = hvd.allreduce(x)
        total = hvd.allreduce(tf.sin(x), op=hvd.Sum)
        rows = hvd.alltoall(tf.repeat(x * x, hvd.size()))
        return tf.reduce_sum(mean**3 * x) + (hvd.rank() + 1) * tf.reduce_sum(
            total**2
        ) * tf.reduce_sum(rows)

    x = tf.constant([0.3, -0.7], tf.float64) * (hvd.rank() + 1)
    compiled = form(loss)
    analytic = form(lambda x: gradient_of(loss, x))(x)
    step = 1e-5
    for rank in range(hvd.size()):
        for element in range(2):
            shift = step * tf.one_hot(element, 2, dtype=tf.float64) * float(rank == hvd.rank())
            up, down = (hvd.allreduce(compiled(x + s), op=hvd.Sum) for s in (shift, -shift))
            if rank == hvd.rank():
                assert same(analytic[element], (up - down) / (2 * step), 1e-7)


def scenario_no_gradient_of_max(form: Form) -> None:
    with raises(Exception, "op=hvd.Max has no gradient; use hvd.Average or hvd.Sum"):
        form(lambda x: gradient_of(lambda x: hvd.allreduce(x, op=hvd.Max), x))(mine(3))


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_gradients = make_tests(body, sizes(3), env=ENVIRONMENT)
