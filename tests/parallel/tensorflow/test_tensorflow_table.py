"""Every collective of TensorFlow x dtype x op x scale x process set, and every gradient.

Each rank computes the inputs of all ranks and the expected results: values by plain arithmetic,
gradients by the formula in docs/collectives.md. Every case runs eagerly and in a tf.function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from parallel.scenarios import make_tests, sizes
from parallel.tensorflow.tensorflow_worlds import ENVIRONMENT, hvd, run_scenarios, tf

pytestmark = pytest.mark.long

PRELOAD = ("tensorflow",)
Form = Callable[[Callable[..., Any]], Callable[..., Any]]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
# By dtype: the distance from 1 to the next number.
FLOATS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
OPS = ["Average", "Sum", "Min", "Max", "Product"]
SCALES: tuple[dict[str, float], ...] = ({}, {"prescale_factor": 0.5, "postscale_factor": 3.0})

# A process set, the ranks of its members, and this rank's position among them.
Place = tuple[Any, list[int], int]
sets: dict[str, Any] = {}


def places() -> Iterator[Place]:
    """Return the process sets of which this rank is a member: all ranks, and all but rank 0."""
    everyone = list(range(hvd.size()))
    if not sets and hvd.size() > 2:
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


def close(result: Any, expected: Any, case: object) -> None:
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6, err_msg=str(case))


def scenario_gradients_of_allreduce(form: Form) -> None:
    for process_set, members, _ in places():
        upstream = [given(rank, 5, 1) for rank in members]
        mine = given(hvd.rank(), 5)
        for op, share in ((hvd.Sum, 1.0), (hvd.Average, 1.0 / len(members))):
            for scales in SCALES:
                how = {"op": op, "process_set": process_set, **scales}
                factor = share * np.prod([*scales.values(), 1.0])
                result = gradient(
                    form, lambda x, how=how: hvd.allreduce(x, **how), mine, given(hvd.rank(), 5, 1)
                )
                close(result, factor * sum(upstream), how)
                result = gradient(
                    form,
                    lambda x, how=how: hvd.grouped_allreduce([x, 2 * x], **how),
                    mine,
                    [given(hvd.rank(), 5, 1)] * 2,
                )
                close(result, 3 * factor * sum(upstream), how)


def scenario_gradients_of_allgather(form: Form) -> None:
    for process_set, members, _ in places():
        rows = sum(rank + 1 for rank in members)
        mean = sum(given(rank, rows, 1) for rank in members) / len(members)
        begin = sum(rank + 1 for rank in members if rank < hvd.rank())
        own = mean[begin : begin + hvd.rank() + 1]
        mine, upstream = given(hvd.rank(), hvd.rank() + 1), given(hvd.rank(), rows, 1)
        how = {"process_set": process_set}
        close(gradient(form, lambda x, h=how: hvd.allgather(x, **h), mine, upstream), own, members)
        result = gradient(
            form, lambda x, h=how: hvd.grouped_allgather([x, 2 * x], **h), mine, [upstream] * 2
        )
        close(result, 3 * own, members)


def scenario_gradients_of_broadcast(form: Form) -> None:
    for process_set, members, _ in places():
        mean = sum(given(rank, 3, 1) for rank in members) / len(members)
        for root in members:
            result = gradient(
                form,
                lambda x, r=root, p=process_set: hvd.broadcast(x, r, process_set=p),
                given(hvd.rank(), 3),
                given(hvd.rank(), 3, 1),
            )
            close(result, mean if hvd.rank() == root else 0 * mean, (members, root))


def scenario_gradients_of_reducescatter(form: Form) -> None:
    for process_set, members, place in places():
        n = len(members)
        rows = 2 * n + 1  # the first member has one more
        upstream = [given(rank, 2 + (i == 0), 1) for i, rank in enumerate(members)]
        gathered = np.concatenate(upstream)
        for op, share in ((hvd.Sum, n), (hvd.Average, 1)):
            for scales in SCALES:
                how = {"op": op, "process_set": process_set, **scales}
                expected = share * np.prod([*scales.values(), 1.0]) * gathered
                mine = given(hvd.rank(), rows)
                result = gradient(
                    form, lambda x, h=how: hvd.reducescatter(x, **h), mine, upstream[place]
                )
                close(result, expected, how)
                result = gradient(
                    form,
                    lambda x, h=how: hvd.grouped_reducescatter([x, 2 * x], **h),
                    mine,
                    [upstream[place]] * 2,
                )
                close(result, 3 * expected, how)


def scenario_gradients_of_alltoall(form: Form) -> None:
    for process_set, members, place in places():
        n = len(members)
        # The member at position a sends (a + b) % 3 rows to the one at position b.
        splits = [[(a + b) % 3 for b in range(n)] for a in range(n)]
        back = []
        for b, rank in enumerate(members):
            received = given(rank, sum(splits[a][b] for a in range(n)), 1)
            begin = sum(splits[a][b] for a in range(place))
            back.append(received[begin : begin + splits[place][b]])
        mine = given(hvd.rank(), sum(splits[place]))
        upstream = given(hvd.rank(), sum(splits[a][place] for a in range(n)), 1)
        result = gradient(
            form,
            lambda x, s=splits[place], p=process_set: hvd.alltoall(x, s, process_set=p)[0],
            mine,
            upstream,
        )
        close(result, np.concatenate(back), members)


def scenario_gradients_in_functions_that_xla_compiles() -> None:
    for process_set, members, _ in places():
        upstream = [given(rank, 5, 1) for rank in members]
        for op, share in ((hvd.Sum, 1.0), (hvd.Average, 1.0 / len(members))):
            result = gradient(
                lambda function: tf.function(function, jit_compile=True),
                lambda x, o=op, p=process_set: hvd.allreduce(x, op=o, process_set=p),
                given(hvd.rank(), 5),
                given(hvd.rank(), 5, 1),
            )
            close(result, share * sum(upstream), (members, op))


def values(rank: int, dtype: str, rows: int, salt: int = 0) -> Any:
    """Make a rank's input, in float64: small whole numbers for integers and bool."""
    generator = np.random.default_rng([rank, rows, salt, len(dtype)])
    if dtype in FLOATS:
        narrow = tf.as_dtype(dtype).as_numpy_dtype
        return generator.standard_normal((rows, 2)).astype(narrow).astype("float64")
    low, high = (0, 2) if dtype == "bool" else (0 if dtype[0] == "u" else -4, 5)
    return generator.integers(low, high, (rows, 2)).astype("float64")


def put(dtype: str, rows: int, salt: int = 0) -> Any:
    return tf.cast(values(hvd.rank(), dtype, rows, salt), dtype)


def reduced(members: list[int], dtype: str, op: str, scales: dict[str, float], *of: int) -> Any:
    """Reduce by plain arithmetic, in float64: scale, combine, scale; average = sum / ranks."""
    combine = {"Min": np.minimum, "Max": np.maximum, "Product": np.multiply}.get(op, np.add)
    total = None
    for rank in members:
        one = values(rank, dtype, *of) * scales.get("prescale_factor", 1.0)
        total = one if total is None else combine(total, one)
    assert total is not None
    total = total * scales.get("postscale_factor", 1.0)
    return total / len(members) if op == "Average" else total


def agrees(result: Any, expected: Any, dtype: str, case: object) -> None:
    assert result.dtype == dtype, case
    assert tuple(result.shape) == expected.shape, case
    if dtype not in FLOATS:
        whole = np.trunc(expected).astype("int64").astype(dtype)  # wraps around as integers do
        np.testing.assert_array_equal(result, whole, err_msg=str(case))
        return
    few = 16 * FLOATS[dtype]
    wide = np.asarray(tf.cast(result, tf.float64))
    np.testing.assert_allclose(wide, expected, rtol=few, atol=few, err_msg=str(case))


def share(rows: int, place: int, count: int) -> slice:
    each, more = divmod(rows, count)
    begin = each * place + min(place, more)
    return slice(begin, begin + each + (place < more))


def scenario_values_of_reductions(form: Form) -> None:
    for process_set, members, place in places():
        rows = len(members) + 1
        cases = [
            (dtype, op, scales)
            for dtype in [*FLOATS, *INTEGERS]
            for op in OPS
            for scales in (SCALES if dtype in FLOATS and op != "Min" else SCALES[:1])
        ]

        def everything(process_set: Any = process_set, rows: int = rows, cases: Any = cases) -> Any:
            results = []
            for dtype, op, scales in cases:
                how = {"op": getattr(hvd, op), "process_set": process_set, **scales}
                first, second = put(dtype, rows), put(dtype, rows, 1)
                results.append(
                    [
                        hvd.allreduce(first, **how),
                        *hvd.grouped_allreduce([first, second], **how),
                        hvd.reducescatter(first, **how),
                        *hvd.grouped_reducescatter([first, second], **how),
                    ]
                )
            return results

        mine = share(rows, place, len(members))
        for case, results in zip(cases, form(everything)(), strict=True):
            dtype, op, scales = case
            first = reduced(members, dtype, op, scales, rows)
            second = reduced(members, dtype, op, scales, rows, 1)
            expected = [first, first, second, first[mine], first[mine], second[mine]]
            for i, (result, one) in enumerate(zip(results, expected, strict=True)):
                agrees(result, one, dtype, (members, case, i))


def scenario_values_in_a_function_that_xla_compiles() -> None:
    for process_set, members, _ in places():
        cases = [
            (dtype, op, scales)
            for dtype in [*FLOATS, *INTEGERS]
            for op in OPS
            for scales in (SCALES if dtype in FLOATS and op in ("Sum", "Average") else SCALES[:1])
        ]
        inputs = [put(dtype, 3) for dtype, _, _ in cases]

        def everything(tensors: Any, ps: Any, cases: Any) -> Any:
            return [
                hvd.allreduce(tensor, op=getattr(hvd, op), process_set=ps, **scales)
                for tensor, (_, op, scales) in zip(tensors, cases, strict=True)
            ]

        compiled = functools.partial(everything, ps=process_set, cases=cases)
        results = tf.function(lambda tensors, c=compiled: c(tensors), jit_compile=True)(inputs)
        for case, result in zip(cases, results, strict=True):
            dtype, op, scales = case
            agrees(result, reduced(members, dtype, op, scales, 3), dtype, (members, case))


def scenario_values_that_only_travel(form: Form) -> None:
    dtypes = [*FLOATS, *INTEGERS, "bool"]
    for process_set, members, place in places():
        n = len(members)
        splits = [[(a + 2 * b) % 3 for b in range(n)] for a in range(n)]
        root = members[-1]

        def everything(
            ps: Any = process_set, n: int = n, root: int = root, mine: Any = splits[place]
        ) -> Any:
            results = []
            for dtype in dtypes:
                own, whole = put(dtype, hvd.rank() + 1), put(dtype, 2 * n)
                some = put(dtype, sum(mine))
                results.append(
                    [
                        hvd.allgather(own, process_set=ps),
                        *hvd.grouped_allgather([own, whole], process_set=ps),
                        hvd.broadcast(whole, root, process_set=ps),
                        hvd.alltoall(whole, process_set=ps),
                        hvd.alltoall(some, mine, process_set=ps)[0],
                    ]
                )
            return results

        def sent_to_me(dtype: str, splits: Any, members: Any = members, place: int = place) -> Any:
            parts = []
            for a, rank in enumerate(members):
                theirs = values(rank, dtype, sum(splits[a]))
                begin = sum(splits[a][:place])
                parts.append(theirs[begin : begin + splits[a][place]])
            return np.concatenate(parts)

        for dtype, results in zip(dtypes, form(everything)(), strict=True):
            gathered = np.concatenate([values(rank, dtype, rank + 1) for rank in members])
            wholes = np.concatenate([values(rank, dtype, 2 * n) for rank in members])
            expected = [
                *(gathered, gathered, wholes),
                values(root, dtype, 2 * n),
                sent_to_me(dtype, [[2] * n] * n),
                sent_to_me(dtype, splits),
            ]
            for i, (result, one) in enumerate(zip(results, expected, strict=True)):
                agrees(result, one, dtype, (members, dtype, i))
            variable = tf.Variable(put(dtype, 3))
            (same,) = hvd.broadcast_([variable], root, process_set=process_set)
            assert same is variable
            agrees(variable.read_value(), values(root, dtype, 3), dtype, (members, dtype))


def scenario_values_of_keras_functions() -> None:
    """The collectives of `hvdlite.keras` on NumPy arrays; NumPy does not have bfloat16."""
    import hvdlite.keras as keras_hvd

    for process_set, members, place in places():
        rows = len(members) + 1
        for dtype in ["float16", "float32", "float64", *INTEGERS]:
            mine = values(hvd.rank(), dtype, rows).astype(dtype)
            for op in OPS:
                for scales in SCALES if dtype in FLOATS else SCALES[:1]:
                    how = {"op": getattr(hvd, op), "process_set": process_set}
                    expected = reduced(members, dtype, op, scales, rows)
                    agrees(
                        keras_hvd.allreduce(mine, **how, **scales), expected, dtype, (op, scales)
                    )
                part = reduced(members, dtype, op, {}, rows)[share(rows, place, len(members))]
                agrees(keras_hvd.reducescatter(mine, **how), part, dtype, op)
            gathered = np.concatenate([values(rank, dtype, rows) for rank in members])
            agrees(keras_hvd.allgather(mine, process_set=process_set), gathered, dtype, "gather")
            sent = keras_hvd.broadcast(mine, members[-1], process_set=process_set)
            agrees(sent, values(members[-1], dtype, rows), dtype, "broadcast")


def scenario_gradients_keep_their_dtype(form: Form) -> None:
    verbs = {
        "allreduce": (hvd.allreduce, 1),
        "scaled": (lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5), 0.5 * hvd.size()),
        "narrow": (lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16), 1),
        "weighted": (lambda x: hvd.allreduce(x, weight=1.0), 1),
        "allgather": (hvd.allgather, 1),
        "broadcast": (lambda x: hvd.broadcast(x, hvd.size() - 1), hvd.rank() == hvd.size() - 1),
        "reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Sum), hvd.size()),
        "scattered": (lambda x: hvd.reducescatter(x, postscale_factor=0.5), 0.5),
        "alltoall": (hvd.alltoall, 1),
    }
    shape = (2 * hvd.size(), 2)

    def slopes() -> Any:
        results = []
        for dtype in FLOATS:
            for verb, _ in verbs.values():
                x = tf.ones(shape, dtype)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = verb(x)
                results.append(tape.gradient(y, x))
        return results

    results = iter(form(slopes)())
    for dtype in FLOATS:
        for name, (_, expected) in verbs.items():
            agrees(next(results), np.full(shape, float(expected)), dtype, (name, dtype))


def body() -> dict[str, str]:
    return run_scenarios(globals())


# The set of all ranks but one runs every case among two.
test_table = make_tests(body, sizes(3), env=ENVIRONMENT)
