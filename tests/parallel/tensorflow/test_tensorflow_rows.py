"""The collectives that work on rows, on TensorFlow tensors: values, gradients, misuse.

Each scenario runs eagerly and in a tf.function. Ranks make each other's inputs with `make`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from parallel.scenarios import make_tests, on_hosts
from parallel.tensorflow.tensorflow_worlds import ENVIRONMENT, hvd, run_scenarios, same, tf

PRELOAD = ("tensorflow",)
Form = Callable[[Callable[..., Any]], Callable[..., Any]]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
TAILS: list[tuple[int, ...]] = [(), (3,), (2, 0)]
OPS = ["Average", "Sum", "Min", "Max", "Product"]


def raises(kind: type[Exception], text: str) -> pytest.RaisesExc[Exception]:
    return pytest.raises(kind, match=text)


def everybody() -> range:
    return range(hvd.size())


def make(rank: int, rows: int, tail: tuple[int, ...] = (), dtype: str = "float32") -> Any:
    """Make a rank's tensor: small whole numbers for integers, anything for floats."""
    shape, seed = (rows, *tail), (rank, rows)
    if dtype in FLOATS:
        return tf.cast(tf.random.stateless_normal(shape, seed, dtype=tf.float64), dtype)
    return tf.cast(tf.random.stateless_uniform(shape, seed, 0, 5, tf.int32), dtype)


def share_of(rank: int, rows: int) -> slice:
    each, more = divmod(rows, hvd.size())
    begin = each * rank + min(rank, more)
    return slice(begin, begin + each + (rank < more))


def splits_of(rank: int, seed: int) -> list[int]:
    return [(3 * rank + 2 * peer + seed) % 4 for peer in everybody()]


def scenario_alltoall_by_splits(form: Form) -> None:
    exchange = form(hvd.alltoall)
    for seed, dtype in enumerate([*INTEGERS, *FLOATS, "bool"]):
        tail = TAILS[seed % len(TAILS)]
        splits = splits_of(hvd.rank(), seed)
        kind = (tf.int32, tf.int64)[seed % 2]
        tensor = make(hvd.rank(), sum(splits), tail, dtype)
        output, received = exchange(tensor, tf.constant(splits, kind))
        parts = []
        for rank in everybody():
            theirs = splits_of(rank, seed)
            parts.append(tf.split(make(rank, sum(theirs), tail, dtype), theirs)[hvd.rank()])
        expected = tf.concat(parts, 0)
        assert output.dtype == dtype and output.shape == expected.shape
        assert same(output, expected), (seed, output, expected)
        assert received.dtype == kind
        assert received.numpy().tolist() == [splits_of(r, seed)[hvd.rank()] for r in everybody()]


def scenario_alltoall_without_splits(form: Form) -> None:
    exchange = form(hvd.alltoall)
    for rows in (0, 1, 3):
        output = exchange(make(hvd.rank(), rows * hvd.size(), (2,)))
        own = slice(rows * hvd.rank(), rows * (hvd.rank() + 1))
        parts = [make(r, rows * hvd.size(), (2,))[own] for r in everybody()]
        assert same(output, tf.concat(parts, 0))


def scenario_reducescatter_is_a_share_of_an_allreduce(form: Form) -> None:
    cases = list(itertools.product([*INTEGERS, *FLOATS], [1, 2 * hvd.size() + 1]))
    cases += [("int32", 0), ("float32", hvd.size())]
    tensors = [make(hvd.rank(), rows, TAILS[rows % 2], dtype) for dtype, rows in cases]

    def both(tensors: list[Any], op: int) -> tuple[Any, Any]:
        return hvd.grouped_reducescatter(tensors, op=op), hvd.grouped_allreduce(tensors, op=op)

    for op in OPS:
        parts, wholes = form(lambda tensors, op=op: both(tensors, getattr(hvd, op)))(tensors)
        for part, whole, (dtype, rows) in zip(parts, wholes, cases, strict=True):
            expected = whole[share_of(hvd.rank(), rows)]
            assert part.dtype == dtype and part.shape == expected.shape
            assert same(part, expected), (dtype, op, part, expected)


def scenario_reducescatter_with_scales_and_compression(form: Form) -> None:
    rows = 2 * hvd.size() + 1
    tensor = make(hvd.rank(), rows, (3,))
    for arguments in (
        {"op": hvd.Sum, "prescale_factor": 0.3, "postscale_factor": 1.7},
        {"compression": hvd.Compression.fp16},
        {"name": "named"},
    ):

        def both(x: Any, arguments: Any = arguments) -> tuple[Any, Any]:
            other = {key: value for key, value in arguments.items() if key != "name"}
            return hvd.reducescatter(x, **arguments), hvd.allreduce(x, **other)

        part, whole = form(both)(tensor)
        assert part.dtype == tf.float32 and same(part, whole[share_of(hvd.rank(), rows)])
    assert hvd.grouped_reducescatter([]) == []


def scenario_grouped_allgather(form: Form) -> None:
    dtypes = [*INTEGERS, *FLOATS, "bool", "float32"]

    def tensors_of(rank: int) -> list[Any]:
        return [
            make(rank, (rank + i) % 3, TAILS[i % len(TAILS)], dtype)
            for i, dtype in enumerate(dtypes)
        ]

    results = form(lambda: hvd.grouped_allgather(tensors_of(hvd.rank())))()
    theirs = [tensors_of(rank) for rank in everybody()]
    for i, (result, dtype) in enumerate(zip(results, dtypes, strict=True)):
        expected = tf.concat([tensors[i] for tensors in theirs], 0)
        assert result.dtype == dtype and result.shape == expected.shape
        assert same(result, expected)
    assert hvd.grouped_allgather([]) == []


def scenario_shapes_while_tracing() -> None:
    spec = tf.TensorSpec([4, 3])
    for verb in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        assert tf.function(verb).get_concrete_function(spec).output_shapes.as_list() == [None, 3]
    pair = tf.function(lambda x: hvd.alltoall(x, [4] + [0] * (hvd.size() - 1)))
    shapes = pair.get_concrete_function(spec).output_shapes
    assert [shape.as_list() for shape in shapes] == [[None, 3], [None]]


def scenario_in_a_loop() -> None:
    @tf.function  # type: ignore[untyped-decorator]
    def repeat(x: Any, times: Any) -> Any:
        for _ in tf.range(times):
            x = hvd.alltoall(x) + tf.reduce_sum(hvd.reducescatter(x, op=hvd.Sum)) * 0
            x.set_shape([hvd.size()])
        return x

    start = tf.range(hvd.size(), dtype=tf.float32) + 10.0 * hvd.rank()
    assert same(repeat(start, tf.constant(4)), start)
    once = [10.0 * rank + hvd.rank() for rank in everybody()]
    assert same(repeat(start, tf.constant(3)), once)


def scenario_gradient_of_alltoall(form: Form) -> None:
    for splits in (splits_of(hvd.rank(), 1), None):

        def slope(x: Any, splits: Any = splits) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                result = hvd.alltoall(x**2, splits)
                output = result if splits is None else result[0]
                loss = tf.reduce_sum(output) * (hvd.rank() + 1)
            return tape.gradient(loss, x)

        sent = [2] * hvd.size() if splits is None else splits
        expected = tf.repeat(tf.constant([2.0 * (r + 1) for r in everybody()]), sent)
        gradient = form(slope)(tf.ones([sum(sent), 2]))
        assert same(gradient, tf.repeat(expected[:, None], 2, axis=1))


def scenario_gradient_of_reducescatter(form: Form) -> None:
    rows = 2 * hvd.size() + 1
    weights = tf.range(1.0, rows + 1)

    def slope(x: Any, op: int) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            scales = {"prescale_factor": 0.5, "postscale_factor": 3.0}
            first, second = hvd.grouped_reducescatter([x, 2 * x], op=op, **scales)
            loss = tf.reduce_sum((first + second) * weights[share_of(hvd.rank(), rows)])
        return tape.gradient(loss, x)

    for op, factor in [(hvd.Sum, 4.5 * hvd.size()), (hvd.Average, 4.5)]:
        gradient = form(lambda x, op=op: slope(x, op))(tf.ones([rows]))
        assert same(gradient, weights * factor, 1e-5)
    with raises(hvd.ArgumentError, "reducescatter .* with op=hvd.Max has no gradient; use"):
        form(lambda x: slope(x, hvd.Max))(tf.ones([rows]))


def scenario_gradient_of_grouped_allgather(form: Form) -> None:
    def slope(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            first, second = hvd.grouped_allgather([x, x * x])
            loss = tf.reduce_sum(first) + tf.reduce_sum(second)
        return tape.gradient(loss, x)

    assert same(form(slope)(tf.ones([hvd.rank() + 1])), 3.0)


def scenario_gradient_of_a_gradient(form: Form) -> None:
    def curvature(x: Any, verb: Any, arguments: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(verb(x**3, **arguments))
            slope = tf.reduce_sum(inner.gradient(loss, x))
        return outer.gradient(slope, x)

    x = tf.fill([hvd.size()], 2.0)
    for verb, factor in [(hvd.alltoall, 1), (hvd.reducescatter, hvd.size()), (hvd.allgather, 1)]:
        arguments = {"op": hvd.Sum} if verb is hvd.reducescatter else {}
        result = form(lambda x, v=verb, a=arguments: curvature(x, v, a))(x)
        assert same(result, 12.0 * factor), (verb, result)


def scenario_bad_splits_are_an_error_everywhere(form: Form) -> None:
    n, guilty = hvd.size(), hvd.size() - 1
    exchange = form(lambda x, splits: hvd.alltoall(x, splits, name="bad"))
    fine = [n + 1, *[0] * (n - 1)]
    for splits, text in [
        ([1] * n, rf"rank {guilty} has splits \[1.*\], which add up to {n}, but {n + 1} rows"),
        ([1] * (n + 1), f"rank {guilty} has {n + 1} splits in a process set of {n}"),
    ]:
        mine = tf.constant(splits if hvd.rank() == guilty else fine)
        with raises(tf.errors.InvalidArgumentError, f"alltoall 'bad': {text}"):
            exchange(tf.ones([n + 1]), mine)
    output, _ = exchange(tf.ones([n + 1]), tf.constant(fine))
    assert output.shape == [n * (n + 1) if hvd.rank() == 0 else 0]


def scenario_misuse_says_what_to_do() -> None:
    for verb in (hvd.alltoall, hvd.reducescatter):
        with raises(hvd.ArgumentError, r"of a scalar; use tf.reshape\(tensor, \[1\]\)"):
            verb(tf.constant(1.0))
        compiled = tf.function(verb, jit_compile=True)
        with raises(hvd.ArgumentError, "cannot be compiled by XLA; use jit_compile=False"):
            compiled(tf.ones([hvd.size()]))
    with raises(hvd.ArgumentError, "splits of dtype float32; give one whole number"):
        hvd.alltoall(tf.ones([2]), [0.5])
    with raises(hvd.ArgumentError, "is bool, which Average does not reduce; convert it"):
        hvd.reducescatter(tf.ones([2], tf.bool))


def scenario_mismatch_is_an_error_and_the_world_goes_on(form: Form) -> None:
    n = hvd.size()
    if n == 1:
        return
    odd = hvd.rank() == n - 1
    for field, tensor in {
        "dtype": tf.ones([n, 2], tf.float64 if odd else tf.float32),
        "shape": tf.ones([n, 3 if odd else 2]),
    }.items():
        for verb in (hvd.alltoall, hvd.reducescatter, hvd.allgather):
            text = f"{verb.__name__} 'broken': ranks disagree about the {field}: rank "
            with raises(tf.errors.FailedPreconditionError, text):
                form(lambda x, verb=verb: verb(x, name="broken"))(tensor)
    assert same(hvd.reducescatter(tf.ones([n]), op=hvd.Sum), n)


def body() -> dict[str, str]:
    return run_scenarios(globals())


WORLDS = [[0], [0, 1, 1, 0]]


test_tensorflow_rows = make_tests(body, on_hosts(*WORLDS), env=ENVIRONMENT)
