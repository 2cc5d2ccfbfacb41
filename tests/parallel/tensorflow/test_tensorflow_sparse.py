"""tf.IndexedSlices of tapes: gathered as rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from parallel.scenarios import make_tests, sizes, tensors_sent_by
from parallel.tensorflow.tensorflow_worlds import (
    ENVIRONMENT,
    eagerly,
    hvd,
    run_scenarios,
    tf,
)

pytestmark = pytest.mark.long

PRELOAD = ("tensorflow",)
Form = Callable[[Callable[..., Any]], Callable[..., Any]]
WORDS, WIDTH = 64, 4

# The words of each rank.
CASES: dict[str, list[list[int]]] = {
    "different rows": [[1], [2, 30], [63, 1]],
    "many rows": [list(range(40)), list(range(10, 50)), list(range(64))],
    "rows of one rank": [[], [7, 9], []],
    "no rows at all": [[], [], []],
    "equal rows": [[5] * 30, [5] * 30 + [6], [6] * 40],
    "every row, by one rank": [[], [], list(range(64))],
}


def expected_sum(words: Sequence[Sequence[int]]) -> Any:
    """Sum the gradients of all ranks as one process does: rank r's words count r + 1 each."""
    total = np.zeros((WORDS, WIDTH))
    for rank, of_rank in enumerate(words):
        np.add.at(total, list(of_rank), rank + 1.0)
    return total


def make_gradient(form: Form, **arguments: Any) -> Callable[[Sequence[int]], Any]:
    """Return a function of words, traced once, that returns the gradient of a table."""
    table = tf.Variable(tf.ones([WORDS, WIDTH]))

    def gradient(words: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, words)) * (hvd.rank() + 1)
        return hvd.DistributedGradientTape(tape, **arguments).gradient(loss, table)

    if form is not eagerly:
        gradient = tf.function(gradient, input_signature=[tf.TensorSpec([None], tf.int32)])
    return lambda words: gradient(tf.constant(words, tf.int32, [len(words)]))


def scenario_every_case_in_turn(form: Form) -> None:
    gradient = make_gradient(form, op=hvd.Sum)
    for case, words in CASES.items():
        results: list[Any] = []
        sent = tensors_sent_by(lambda w=words, r=results: r.append(gradient(w[hvd.rank()])))
        assert sent == 2, case  # values and indices
        assert isinstance(results[0], tf.IndexedSlices), case
        np.testing.assert_array_equal(tf.convert_to_tensor(results[0]), expected_sum(words), case)
        assert sorted(results[0].indices.numpy()) == sorted({w for one in words for w in one})


def scenario_averages_weights_and_narrow_ones(form: Form) -> None:
    total = sum(range(1, hvd.size() + 1))
    weights = [(rank + 1) * hvd.size() / total for rank in range(hvd.size())]
    for arguments, tolerance in (
        ({}, 1e-6),
        ({"gradient_predivide_factor": 2.0}, 1e-6),
        ({"compression": hvd.Compression.fp16}, 1e-2),
        ({"weight": hvd.rank() + 1}, 1e-6),
    ):
        gradient = make_gradient(form, **arguments)
        for case in ("different rows", "many rows", "equal rows"):
            words = CASES[case]
            expected = expected_sum(words)
            if "weight" in arguments:
                parts = [[words[i] if i == rank else [] for i in range(3)] for rank in range(3)]
                expected = sum(
                    w * expected_sum(part) for w, part in zip(weights, parts, strict=True)
                )
            result = tf.convert_to_tensor(gradient(words[hvd.rank()]))
            np.testing.assert_allclose(result, expected / hvd.size(), rtol=tolerance)


def scenario_adasum_is_about_dense_gradients(form: Form) -> None:
    words = CASES["different rows"]
    by_itself = make_gradient(form, op=hvd.Adasum)(words[hvd.rank()])
    asked = make_gradient(form, op=hvd.Adasum, sparse_as_dense=True)(words[hvd.rank()])
    assert isinstance(by_itself, tf.IndexedSlices)
    np.testing.assert_array_equal(tf.convert_to_tensor(by_itself), asked)


def scenario_tables_of_many_dtypes_and_shapes_beside_dense_ones(form: Form) -> None:
    kinds = (([50], "float32"), ([9, 2], "float64"), ([300, 2, 3], "bfloat16"), ([4, 1], "float32"))
    tables = [tf.Variable(tf.ones(shape, dtype)) for shape, dtype in kinds]
    layer = tf.Variable(tf.ones([3]))
    words = tf.constant([hvd.rank(), hvd.rank(), 3], tf.int64)

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer)
            for table in tables:
                loss += tf.cast(tf.reduce_sum(tf.gather(table, words)), tf.float32)
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [*tables, layer])

    *of_tables, of_layer = form(step)()
    assert of_layer.numpy().tolist() == [3.0] * 3
    for table, result in zip(tables, of_tables, strict=True):
        assert result.dtype == table.dtype and result.indices.dtype == tf.int64
        rows = tf.cast(tf.convert_to_tensor(result), tf.float32).numpy()
        assert rows.reshape(len(rows), -1)[:4, 0].tolist() == [2.0, 2.0, 2.0, 3.0]
        assert not rows[4:].any()


def scenario_in_a_loop_of_a_function() -> None:
    """Each iteration sends other rows, and iterations stay in order."""
    table = tf.Variable(tf.ones([WORDS, WIDTH]))

    @tf.function  # type: ignore[untyped-decorator]
    def total(count: Any) -> Any:
        total = tf.zeros([WORDS, WIDTH])
        for i in tf.range(count):
            with tf.GradientTape() as tape:
                words = tf.range(WORDS) if i % 3 == 0 else tf.range(hvd.rank(), hvd.rank() + i)
                loss = tf.reduce_sum(tf.gather(table, words))
            gradient = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, table)
            total += tf.convert_to_tensor(gradient)
        return total

    expected = np.zeros(WORDS)
    for i in range(12):
        for rank in range(hvd.size()):
            words = range(WORDS) if i % 3 == 0 else range(rank, rank + i)
            expected[list(words)] += 1
    np.testing.assert_array_equal(total(12)[:, 0], expected)


def scenario_unknown_shapes(form: Form) -> None:
    """A table whose shape is known only when it runs, and rows without a table."""
    table = tf.Variable(tf.ones([WORDS, WIDTH]), shape=[None, WIDTH])

    def step(words: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, words))
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, table)

    compiled = form(step)
    for words in (tf.range(WORDS), tf.constant([hvd.rank()])):
        expected = np.zeros((WORDS, WIDTH))
        for rank in range(hvd.size()):
            expected[words if len(words) > 1 else rank] += 1
        np.testing.assert_array_equal(tf.convert_to_tensor(compiled(words)), expected)


def scenario_slices_without_a_shape_stay_rows(form: Form) -> None:
    table = tf.Variable(tf.ones([2, 2]))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def total(table: Any) -> Any:
        rows = tf.constant([0, 1, 1])
        return tf.reduce_sum(table), lambda up: tf.IndexedSlices(up * tf.ones([3, 2]), rows)

    def step(op: int) -> Any:
        with tf.GradientTape() as tape:
            loss = total(table)
        result = hvd.DistributedGradientTape(tape, op=op).gradient(loss, table)
        return tf.math.unsorted_segment_sum(result.values, result.indices, 2)

    assert form(lambda: step(hvd.Sum))().numpy().tolist() == [[3.0, 3.0], [6.0, 6.0]]
    with pytest.raises(hvd.ArgumentError, match="without a dense_shape"):
        form(lambda: step(hvd.Adasum))()


def scenario_explicit_slices_stay_rows(form: Form) -> None:
    def reduce(shape: Any) -> Any:
        indices = tf.range(WORDS)
        values = tf.ones([WORDS, WIDTH])
        return hvd.allreduce(tf.IndexedSlices(values, indices, shape))

    # Keras' own tests give a tuple.
    for shape in (tf.constant([WORDS, WIDTH]), (WORDS, WIDTH), np.array([WORDS, WIDTH])):
        result = form(lambda shape=shape: reduce(shape))()
        assert isinstance(result, tf.IndexedSlices)
        assert result.indices.shape == [WORDS * hvd.size()]
        assert tf.convert_to_tensor(result).shape == [WORDS, WIDTH]


def my_slices(rank: int, dtype: str = "float64") -> Any:
    """Make the slices of a rank: row r of its r + 1 rows twice."""
    indices = tf.constant([*range(rank + 1), rank])
    values = tf.cast(tf.fill([rank + 2, 2], 5 * (rank + 1)), dtype)
    return tf.IndexedSlices(values, indices, tf.constant([WORDS, 2]))


def sum_of_slices(members: Sequence[int]) -> Any:
    total = np.zeros((WORDS, 2))
    for rank in members:
        np.add.at(total, [*range(rank + 1), rank], 5.0 * (rank + 1))
    return total


def scenario_a_group_with_slices_in_it(form: Form) -> None:
    everyone = range(hvd.size())
    some = hvd.add_process_set([0, hvd.size() - 1])
    for process_set, members in ((hvd.global_process_set, list(everyone)), (some, some.ranks)):
        if hvd.rank() not in members:
            continue
        total = sum_of_slices(members)
        for op, share in ((hvd.Average, 1 / len(members)), (hvd.Sum, 1.0)):
            for scale in (1.0, 0.5):
                for compression in (hvd.Compression.none, hvd.Compression.bf16):

                    def reduce(
                        op: Any = op,
                        scale: Any = scale,
                        ps: Any = process_set,
                        c: Any = compression,
                    ) -> Any:
                        mine, layer = my_slices(hvd.rank()), tf.fill([3], hvd.rank() + 1.0)
                        how = {"op": op, "prescale_factor": scale, "process_set": ps}
                        alone = hvd.grouped_allreduce([mine], **how)
                        return alone + hvd.grouped_allreduce(
                            [layer, mine, layer * 2, mine], compression=c, **how
                        )

                    alone, *mixed = form(reduce)()
                    assert len(mixed) == 4
                    for result in (alone, mixed[1], mixed[3]):
                        assert isinstance(result, tf.IndexedSlices)
                        assert result.dtype == tf.float64
                        np.testing.assert_allclose(
                            tf.convert_to_tensor(result), total * share * scale, rtol=2e-2
                        )
                    dense = sum(rank + 1 for rank in members) * share * scale
                    np.testing.assert_allclose(mixed[0], [dense] * 3, rtol=1e-6)
                    np.testing.assert_allclose(mixed[2], [2 * dense] * 3, rtol=1e-6)
    hvd.remove_process_set(some)


def scenario_slices_of_every_dtype(form: Form) -> None:
    """Scaled integer rows are rounded towards zero one by one; averages of them are floats."""
    integers = ("uint8", "int8", "int16", "int32", "int64")
    for dtype in (*integers, "float16", "bfloat16", "float32", "float64"):
        for op, scale in ((hvd.Sum, 1.0), (hvd.Sum, 0.5), (hvd.Average, 1.0)):

            def reduce(dtype: Any = dtype, op: Any = op, scale: Any = scale) -> Any:
                return hvd.allreduce(my_slices(hvd.rank(), dtype), op=op, prescale_factor=scale)

            def average(dtype: Any = dtype) -> Any:
                return hvd.allreduce(my_slices(hvd.rank(), dtype), weight=2.0)

            result = form(reduce)()
            averages = dtype in integers and op == hvd.Average
            assert result.dtype.is_floating if averages else result.dtype == dtype, result.dtype
            share = scale / (hvd.size() if op == hvd.Average else 1)
            expected = np.zeros((WORDS, 2))
            for rank in range(hvd.size()):
                rows = sum_of_slices([rank]) * share
                expected += np.trunc(rows) if dtype in integers and not averages else rows
            for found in (result, form(average)()) if averages else (result,):
                values = tf.cast(found.values, tf.float64)
                total = tf.math.unsorted_segment_sum(values, found.indices, WORDS)
                np.testing.assert_allclose(total, expected, rtol=1e-2, err_msg=f"{dtype} {op}")


def scenario_what_rows_have_no_reduction_for_is_not_implemented(form: Form) -> None:
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        for verb in (hvd.allreduce, lambda one, **how: hvd.grouped_allreduce([one], **how)):
            for kind in (NotImplementedError, hvd.ArgumentError):
                with pytest.raises(kind, match="whose rows can be averaged or summed"):
                    form(lambda verb=verb, op=op: verb(my_slices(hvd.rank()), op=op))()


def scenario_groups_of_gradients_with_slices_among_them(form: Form) -> None:
    table, layer = tf.Variable(tf.ones([WORDS, WIDTH])), tf.Variable(tf.ones([3]))
    other = tf.Variable(tf.ones([2]))
    words = CASES["different rows"]
    for how in ({"num_groups": 2}, {"num_groups": 1}, {"groups": [[layer, table], [other]]}):
        for scale in ({}, {"op": hvd.Sum}):

            def step(how: Any = how, scale: Any = scale) -> Any:
                with tf.GradientTape() as tape:
                    rows = tf.gather(table, tf.constant(words[hvd.rank()]))
                    loss = tf.reduce_sum(rows) * (hvd.rank() + 1)
                    loss += tf.reduce_sum(layer) + 2 * tf.reduce_sum(other)
                tape = hvd.DistributedGradientTape(tape, **how, **scale)
                return tape.gradient(loss, [layer, table, other])

            of_layer, of_table, of_other = form(step)()
            share = 1.0 if scale else 1 / hvd.size()
            assert isinstance(of_table, tf.IndexedSlices)
            np.testing.assert_allclose(
                tf.convert_to_tensor(of_table), expected_sum(words) * share, rtol=1e-6
            )
            np.testing.assert_allclose(of_layer, [hvd.size() * share] * 3, rtol=1e-6)
            np.testing.assert_allclose(of_other, [2 * hvd.size() * share] * 2, rtol=1e-6)


def scenario_a_group_whose_first_member_travels_by_itself() -> None:
    """The rows of the table travel in requests of their own, whichever request comes first."""
    table, layer = tf.Variable(tf.ones([5, 3])), tf.Variable(tf.ones([5, 3]))

    def late(seconds: Any) -> Any:
        time.sleep(float(seconds))
        return np.float32(1.0)

    @tf.function  # type: ignore[untyped-decorator]
    def step(seconds: Any) -> Any:
        with tf.GradientTape() as tape:
            one = tf.numpy_function(late, [seconds], tf.float32)
            one.set_shape([])
            loss = tf.reduce_sum(tf.gather(table, tf.range(5)))
            loss = (loss + 100.0 * one * tf.reduce_sum(layer)) * (hvd.rank() + 1)
        return hvd.DistributedGradientTape(tape, num_groups=1).gradient(loss, [table, layer])

    mean = (hvd.size() + 1) / 2
    for number in range(10):
        of_table, of_layer = step(tf.constant(0.02 * ((number + hvd.rank()) % 2)))
        np.testing.assert_allclose(tf.convert_to_tensor(of_table), np.full((5, 3), mean))
        np.testing.assert_allclose(of_layer, np.full((5, 3), 100.0 * mean))


def scenario_xla_gets_dense_ones() -> None:
    table, layer = tf.Variable(tf.ones([6, 2])), tf.Variable(tf.ones([2]))

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
    def step(words: Any) -> Any:
        with hvd.DistributedGradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, words)) + tf.reduce_sum(layer)
        return tape.gradient(loss, [table, layer])

    words = tf.constant([hvd.rank(), hvd.rank(), 5])
    of_table, of_layer = step(words)
    third = 1 / hvd.size()
    expected = [[2 * third] * 2, [2 * third] * 2, [2 * third] * 2, [0, 0], [0, 0], [1, 1]]
    np.testing.assert_allclose(of_table, expected, rtol=1e-6)
    assert of_layer.numpy().tolist() == [1.0, 1.0]
    with pytest.raises(hvd.ArgumentError, match="jit_compile=False"):
        slices = tf.IndexedSlices(tf.ones([1, 2]), [0], tf.constant([6, 2]))
        tf.function(lambda: hvd.allreduce(slices), jit_compile=True)()


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_sparse = make_tests(body, sizes(3), env=ENVIRONMENT)
