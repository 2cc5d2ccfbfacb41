"""tf.IndexedSlices of tapes and of allreduce: gathered as rows."""

from __future__ import annotations

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

PRELOAD = ("tensorflow",)
Form = Callable[[Callable[..., Any]], Callable[..., Any]]
WORDS, WIDTH = 64, 4

# The words of each rank.
CASES: dict[str, list[list[int]]] = {
    "different rows": [[1], [2, 30], [63, 1]],
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
    words = CASES["equal rows"]
    shares = [(rank + 1) * hvd.size() / 6 for rank in range(hvd.size())]
    by_rank = [expected_sum([words[i] if i == rank else [] for i in range(3)]) for rank in range(3)]
    weighted = sum(share * one for share, one in zip(shares, by_rank, strict=True))
    plain = expected_sum(words)
    for arguments, expected, tolerance in (
        ({}, plain, 1e-6),
        ({"gradient_predivide_factor": 2.0}, plain, 1e-6),
        ({"compression": hvd.Compression.fp16}, plain, 1e-2),
        ({"weight": hvd.rank() + 1}, weighted, 1e-6),
    ):
        result = tf.convert_to_tensor(make_gradient(form, **arguments)(words[hvd.rank()]))
        np.testing.assert_allclose(result, expected / hvd.size(), rtol=tolerance)


def scenario_adasum_needs_dense_gradients(form: Form) -> None:
    words = CASES["different rows"]
    with pytest.raises(hvd.UnsupportedError, match="use sparse_as_dense=True"):
        make_gradient(form, op=hvd.Adasum)(words[hvd.rank()])
    dense = make_gradient(form, op=hvd.Adasum, sparse_as_dense=True)(words[hvd.rank()])
    assert not isinstance(dense, tf.IndexedSlices)


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


def scenario_explicit_slices_stay_rows(form: Form) -> None:
    """Equal indices of one rank are sent once; the shape may be a tuple, as in Keras's tests."""

    def reduce(shape: Any, **how: Any) -> Any:
        slices = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([3, 1, 3]), shape)
        return hvd.allreduce(slices, op=hvd.Sum, **how)

    for shape in (tf.constant([5, 1]), (5, 1), np.array([5, 1])):
        result = form(lambda shape=shape: reduce(shape))()
        assert isinstance(result, tf.IndexedSlices)
        assert result.indices.numpy().tolist() == [3, 1] * hvd.size()
        assert result.values.numpy().ravel().tolist() == [5.0, 2.0] * hvd.size()
        assert tf.convert_to_tensor(result).shape == [5, 1]
    dense = form(lambda: reduce(tf.constant([5, 1]), sparse_as_dense=True))()
    assert dense.numpy().ravel().tolist() == [0.0, 2.0 * hvd.size(), 0.0, 5.0 * hvd.size(), 0.0]


def my_slices(dtype: str = "float64") -> Any:
    """Make the slices of a rank: row r of its r + 1 rows twice."""
    rank = hvd.rank()
    indices = tf.constant([*range(rank + 1), rank])
    values = tf.cast(tf.fill([rank + 2, 2], 5 * (rank + 1)), dtype)
    return tf.IndexedSlices(values, indices, tf.constant([WORDS, 2]))


def slices_of(rank: int) -> Any:
    total = np.zeros((WORDS, 2))
    np.add.at(total, [*range(rank + 1), rank], 5.0 * (rank + 1))
    return total


def scenario_a_group_with_slices_in_it(form: Form) -> None:
    total = sum(slices_of(rank) for rank in range(hvd.size()))

    def reduce(compression: Any) -> Any:
        mine, layer = my_slices(), tf.fill([3], hvd.rank() + 1.0)
        return hvd.grouped_allreduce([mine], prescale_factor=0.5) + hvd.grouped_allreduce(
            [layer, mine, layer * 2, mine], compression=compression, prescale_factor=0.5
        )

    for compression in (hvd.Compression.none, hvd.Compression.bf16):
        alone, *mixed = form(lambda c=compression: reduce(c))()
        for result in (alone, mixed[1], mixed[3]):
            assert isinstance(result, tf.IndexedSlices) and result.dtype == tf.float64
            np.testing.assert_allclose(tf.convert_to_tensor(result), total / 6, rtol=2e-2)
        np.testing.assert_allclose(mixed[0], [1.0] * 3, rtol=1e-6)
        np.testing.assert_allclose(mixed[2], [2.0] * 3, rtol=1e-6)


def scenario_slices_of_integers(form: Form) -> None:
    """Scaled rows are rounded towards zero one by one; averages of them are floats."""
    for arguments, kind, share in (
        ({"op": hvd.Sum, "prescale_factor": 0.5}, tf.int32, 0.5),
        ({"op": hvd.Average}, tf.float64, 1 / hvd.size()),
        ({"weight": 2.0}, tf.float64, 1 / hvd.size()),
    ):
        result = form(lambda how=arguments: hvd.allreduce(my_slices("int32"), **how))()
        assert result.dtype == kind, (arguments, result.dtype)
        expected = sum(slices_of(rank) * share for rank in range(hvd.size()))
        if kind == tf.int32:
            expected = sum(np.trunc(slices_of(rank) * share) for rank in range(hvd.size()))
        values = tf.cast(result.values, tf.float64)
        total = tf.math.unsorted_segment_sum(values, result.indices, WORDS)
        np.testing.assert_allclose(total, expected, rtol=1e-6, err_msg=str(arguments))


def scenario_what_rows_have_no_reduction_for_is_not_implemented(form: Form) -> None:
    for op in (hvd.Max, hvd.Adasum):
        for verb in (hvd.allreduce, lambda one, **how: hvd.grouped_allreduce([one], **how)):
            for kind in (NotImplementedError, hvd.ArgumentError):
                with pytest.raises(kind, match="whose rows can be averaged or summed"):
                    form(lambda verb=verb, op=op: verb(my_slices(), op=op))()


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
