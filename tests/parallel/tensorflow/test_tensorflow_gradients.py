"""The gradients of the collectives, by the formulas in docs/collectives.md.

Each rank computes the inputs of all ranks and the expected gradients. Most cases run eagerly and in
a tf.function, over all ranks and over a process set of all but rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from parallel.scenarios import make_tests, raises, sizes
from parallel.tensorflow.tensorflow_worlds import (
    ENVIRONMENT,
    hvd,
    in_graph,
    mine,
    run_scenarios,
    same,
    tf,
)

PRELOAD = ("tensorflow",)
Form = Callable[[Callable[..., Any]], Callable[..., Any]]
FLOATS = ["float16", "float64"]
SCALES = {"prescale_factor": 0.5, "postscale_factor": 3.0}

# A process set, the ranks of its members, and this rank's position among them.
Place = tuple[Any, list[int], int]
sets: dict[str, Any] = {}


def places() -> Iterator[Place]:
    """Return the process sets of which this rank is a member: all ranks, and all but rank 0."""
    everyone = list(range(hvd.size()))
    if not sets:
        sets["all but rank 0"] = hvd.add_process_set(everyone[1:])
    yield hvd.global_process_set, everyone, hvd.rank()
    for one in sets.values():
        if one.included():
            yield one, everyone[1:], one.rank()


def given(rank: int, rows: int, salt: int = 0) -> Any:
    """Make a rank's input, or the gradient of its output."""
    return np.random.default_rng([rank, rows, salt]).standard_normal((rows, 2)).astype("float32")


def gradient(form: Form, collective: Callable[[Any], Any], inputs: Any, upstream: Any) -> Any:
    """Differentiate a collective, for this rank's gradient of its result."""

    def slope(inputs: Any, upstream: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = collective(inputs)
        return tape.gradient(outputs, inputs, output_gradients=upstream)

    of = form(slope)(tf.constant(inputs), tf.nest.map_structure(tf.constant, upstream))
    return of.numpy()


def gradient_of(function: Callable[[Any], Any], x: Any) -> Any:
    """Differentiate the sum of a function's results."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(function(x))
    return tape.gradient(y, x)


def close(result: Any, expected: Any, case: object) -> None:
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6, err_msg=str(case))


def scenario_of_allreduce(form: Form) -> None:
    for process_set, members, _ in places():
        upstream = [given(rank, 5, 1) for rank in members]
        mine = given(hvd.rank(), 5)
        for op, scales, factor in ((hvd.Sum, SCALES, 1.5), (hvd.Average, {}, 1 / len(members))):
            how = {"op": op, "process_set": process_set, **scales}
            result = gradient(
                form,
                lambda x, how=how: hvd.grouped_allreduce([x, 2 * x], **how),
                mine,
                [given(hvd.rank(), 5, 1)] * 2,
            )
            close(result, 3 * factor * sum(upstream), how)


def scenario_of_allgather(form: Form) -> None:
    for process_set, members, _ in places():
        rows = sum(rank + 1 for rank in members)
        mean = sum(given(rank, rows, 1) for rank in members) / len(members)
        begin = sum(rank + 1 for rank in members if rank < hvd.rank())
        own = mean[begin : begin + hvd.rank() + 1]
        mine, upstream = given(hvd.rank(), hvd.rank() + 1), given(hvd.rank(), rows, 1)
        result = gradient(
            form,
            lambda x, ps=process_set: hvd.grouped_allgather([x, 2 * x], process_set=ps),
            mine,
            [upstream] * 2,
        )
        close(result, 3 * own, members)


def scenario_of_broadcast(form: Form) -> None:
    for process_set, members, _ in places():
        mean = sum(given(rank, 3, 1) for rank in members) / len(members)
        for root in members[-2:]:
            result = gradient(
                form,
                lambda x, r=root, p=process_set: hvd.broadcast(x, r, process_set=p),
                given(hvd.rank(), 3),
                given(hvd.rank(), 3, 1),
            )
            close(result, mean if hvd.rank() == root else 0 * mean, (members, root))


def scenario_of_reducescatter(form: Form) -> None:
    for process_set, members, place in places():
        n = len(members)
        rows = 2 * n + 1  # the first member has one more
        upstream = [given(rank, 2 + (i == 0), 1) for i, rank in enumerate(members)]
        gathered = np.concatenate(upstream)
        for op, scales, factor in ((hvd.Sum, {}, n), (hvd.Average, SCALES, 1.5)):
            how = {"op": op, "process_set": process_set, **scales}
            result = gradient(
                form,
                lambda x, h=how: hvd.grouped_reducescatter([x, 2 * x], **h),
                given(hvd.rank(), rows),
                [upstream[place]] * 2,
            )
            close(result, 3 * factor * gathered, how)


def scenario_of_alltoall(form: Form) -> None:
    for process_set, members, place in places():
        n = len(members)
        # The member at position a sends (a + 2 * b) % 3 rows to the one at position b.
        splits = [[(a + 2 * b) % 3 for b in range(n)] for a in range(n)]
        back = []
        for b, rank in enumerate(members):
            received = given(rank, sum(splits[a][b] for a in range(n)), 1)
            begin = sum(splits[a][b] for a in range(place))
            back.append(received[begin : begin + splits[place][b]])
        result = gradient(
            form,
            lambda x, s=splits[place], p=process_set: hvd.alltoall(x, s, process_set=p)[0],
            given(hvd.rank(), sum(splits[place])),
            given(hvd.rank(), sum(splits[a][place] for a in range(n)), 1),
        )
        close(result, np.concatenate(back), members)


def scenario_of_every_dtype(form: Form) -> None:
    """They keep the dtype, also with upstream gradients of float32, as Horovod's users give."""
    verbs: dict[str, tuple[Callable[[Any], Any], float]] = {
        "allreduce": (hvd.allreduce, 1),
        "scaled": (lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5), 0.5 * hvd.size()),
        "narrow": (lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16), 1),
        "grouped": (lambda x: hvd.grouped_allreduce([x, x]), 2),
        "allgather": (hvd.allgather, 1),
        "gathers": (lambda x: hvd.grouped_allgather([x, x]), 2),
        "broadcast": (lambda x: hvd.broadcast(x, hvd.size() - 1), hvd.rank() == hvd.size() - 1),
        "reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Sum), hvd.size()),
        "scatters": (lambda x: hvd.grouped_reducescatter([x, x], postscale_factor=0.5), 1),
        "alltoall": (hvd.alltoall, 1),
    }
    shape = (2 * hvd.size(), 2)

    def slopes() -> Any:
        results = []
        for dtype in FLOATS:
            for verb, _ in verbs.values():
                x = tf.ones(shape, dtype)
                with tf.GradientTape(persistent=True) as tape:
                    tape.watch(x)
                    y = verb(x)
                ones = tf.nest.map_structure(lambda one: tf.ones(tf.shape(one), "float32"), y)
                results.append([tape.gradient(y, x), tape.gradient(y, x, output_gradients=ones)])
        return results

    results = iter(form(slopes)())
    for dtype in FLOATS:
        for name, (_, expected) in verbs.items():
            for result in next(results):
                assert result.dtype == dtype and result.shape == shape, (name, dtype)
                assert same(result, float(expected), 1e-6), (name, dtype, result)


def scenario_there_is_none_of_a_weighted_average(form: Form) -> None:
    with raises(LookupError, "a weighted average has no gradient"):
        form(lambda x: gradient_of(lambda x: hvd.allreduce(x, weight=2.0), x))(mine(3))


def scenario_of_a_gradient(form: Form) -> None:
    def curvature(x: Any, verb: Any, arguments: Any) -> Any:
        return gradient_of(
            lambda x: gradient_of(lambda x: verb(x**3, **arguments), x),
            x,
        )

    x = tf.fill([hvd.size()], 2.0)
    for verb, arguments, factor in [
        (hvd.allreduce, {"op": hvd.Sum}, hvd.size()),
        (hvd.alltoall, {}, 1),
        (hvd.reducescatter, {"op": hvd.Sum}, hvd.size()),
        (hvd.allgather, {}, 1),
    ]:
        result = form(lambda x, v=verb, a=arguments: curvature(x, v, a))(x)
        assert same(result, 12.0 * factor), (verb, result)


def scenario_of_two_targets_in_flight_together(form: Form) -> None:
    def both(x: Any) -> tuple[Any, Any]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = hvd.allreduce(x, op=hvd.Sum)
            first, second = y * 2, y * 5
        return tape.gradient(first, x), tape.gradient(second, x)

    first, second = form(both)(mine(3))
    assert same(first, 2 * hvd.size()) and same(second, 5 * hvd.size())


def scenario_of_a_function_from_outside() -> None:
    reduce = in_graph(lambda x: hvd.allreduce(x**2, op=hvd.Sum))
    for _ in range(2):
        assert same(gradient_of(reduce, mine(3)), 2 * hvd.size() * (hvd.rank() + 1))


def scenario_there_is_none_of_max(form: Form) -> None:
    for verb in (hvd.allreduce, hvd.reducescatter):
        text = f"{verb.__name__} .* with op=hvd.Max has no gradient; use hvd.Average or hvd.Sum"
        with raises(Exception, text):
            form(lambda x, v=verb: gradient_of(lambda x: v(x, op=hvd.Max), x))(mine(3))


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_gradients = make_tests(body, sizes(3), env=ENVIRONMENT)
