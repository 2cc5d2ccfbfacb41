"""The collectives on TensorFlow tensors: dtypes, shapes, and the errors of misuse.

Values of every kind are in tests/cpp and in core/test_collective_table.py. Here are those that show
what TensorFlow's side does: its dtypes and shapes, eagerly and in a tf.function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from hvdlite import basics
from parallel.scenarios import make_tests, raises, sizes, tensors_sent_by
from parallel.tensorflow.tensorflow_worlds import (
    ENVIRONMENT,
    hvd,
    mine,
    ranks,
    run_scenarios,
    same,
    tf,
)

PRELOAD = ("tensorflow",)
Form = Callable[[Callable[..., Any]], Callable[..., Any]]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
# Dtypes that are only copied: they are compared as numbers.
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
          "float8_e4m3b11fnuz"]  # fmt: skip


def scenario_the_adapter_imports_no_other_framework() -> None:
    assert "hvdlite.tensorflow" in sys.modules
    assert not {"torch", "hvdlite.keras", "hvdlite.torch"} & sys.modules.keys()


def scenario_reductions_of_every_dtype_and_op(form: Form) -> None:
    product = 1
    for rank in ranks():
        product *= rank
    expected = {
        hvd.Sum: sum(ranks()),
        hvd.Average: sum(ranks()) / hvd.size(),
        hvd.Product: product,
        hvd.Min: 1,
        hvd.Max: hvd.size(),
    }
    cases = [
        (dtype, op)
        for dtype in [*INTEGERS, *FLOATS, *COMPLEX]
        for op in expected
        if dtype not in COMPLEX or op not in (hvd.Min, hvd.Max)
    ]
    rows = 2 * hvd.size() + 1  # the first rank gets one more of them

    def reduce_all() -> list[Any]:
        results = []
        for dtype, op in cases:
            one = mine(rows, 2, dtype=dtype)
            results += [hvd.allreduce(one, op=op), hvd.reducescatter(one, op=op)]
        return results

    results = iter(form(reduce_all)())
    for dtype, op in cases:
        value = tf.cast(tf.cast(tf.constant(expected[op], tf.float64), dtype), tf.complex128)
        for result, count in ((next(results), rows), (next(results), 2 + (hvd.rank() == 0))):
            assert result.dtype == dtype and result.shape == (count, 2)
            assert bool(tf.reduce_all(tf.cast(result, tf.complex128) == value)), (dtype, op, result)


def scenario_reductions_of_bool(form: Form) -> None:
    flags = tf.constant([False, True, hvd.rank() == 0] * hvd.size())
    alone = hvd.size() == 1
    for op, last in ((hvd.Min, alone), (hvd.Max, True), (hvd.Product, alone)):
        whole, rows = form(lambda x, op=op: (hvd.allreduce(x, op=op), hvd.reducescatter(x, op=op)))(
            flags
        )
        assert whole.dtype == tf.bool and whole.numpy().tolist()[:3] == [False, True, last], op
        assert rows.numpy().tolist() == [False, True, last], op


def scenario_adasum(form: Form) -> None:
    """It adds vectors that are orthogonal, and averages those that are equal."""
    own = tf.one_hot([hvd.rank()], hvd.size())
    reduce = form(lambda x: hvd.grouped_allreduce([x, tf.ones_like(x)], op=hvd.Adasum))
    assert all(same(result, 1.0, 1e-6) for result in reduce(own))


def is_known(dtype: str) -> bool:
    """Return whether this release of TensorFlow has that type."""
    try:
        tf.as_dtype(dtype)
    except TypeError:
        return False
    return True


def filled(dtype: str, rows: int, rank: int) -> Any:
    """Make a NumPy array of a rank's number plus one; TensorFlow casts some dtypes to no other."""
    return np.full([rows, 3], rank + 1).astype(tf.as_dtype(dtype).as_numpy_dtype)


def scenario_every_dtype_travels(form: Form) -> None:
    size, root = hvd.size(), hvd.size() - 1
    dtypes = [*INTEGERS, *FLOATS, *COMPLEX, "bool", *filter(is_known, FLOAT8)]
    # Rank r has r + 1 rows, and sends (r + 2 * p) % 3 rows to rank p.
    splits = [[(rank + 2 * peer) % 3 for peer in range(size)] for rank in range(size)]
    mine, theirs = splits[hvd.rank()], [one[hvd.rank()] for one in splits]

    inputs = [
        [
            tf.convert_to_tensor(filled(dtype, rows, hvd.rank()))
            for rows in (hvd.rank() + 1, sum(mine), 2 * size)
        ]
        for dtype in dtypes
    ]

    # As an argument, because TensorFlow makes no constants of some dtypes.
    def travel(inputs: list[Any]) -> list[Any]:
        results = []
        for own, sent, even in inputs:
            results += [
                hvd.allgather(own),
                *hvd.grouped_allgather([own, tf.ones([2])]),
                hvd.broadcast(even, root),
                hvd.alltoall(even),
                *hvd.alltoall(sent, tf.constant(mine, tf.int32)),
            ]
        return results

    results = iter(form(travel)(inputs))
    for dtype in dtypes:
        gathered, even, exchanged = (
            np.concatenate([filled(dtype, rows, rank) for rank, rows in enumerate(of_ranks)])
            for of_ranks in (range(1, size + 1), [2] * size, theirs)
        )
        ones = np.ones([2 * size], "float32")
        whole, counts = filled(dtype, 2 * size, root), np.array(theirs, "int32")
        for i, one in enumerate([gathered, gathered, ones, whole, even, exchanged, counts]):
            result = next(results).numpy()
            assert result.dtype == one.dtype and result.shape == one.shape, (dtype, i)
            assert (result == one).all(), (dtype, i, result)


def scenario_what_cannot_travel_or_be_reduced(form: Form) -> None:
    for dtype in filter(is_known, FLOAT8):
        eight = tf.convert_to_tensor(filled(dtype, 2, 0))
        with raises(hvd.ArgumentError, f"'eight', of dtype {dtype}, cannot be reduced"):
            form(lambda x: hvd.allreduce(x, name="eight"))(eight)
    for tensor in (tf.constant(["text"]), tf.bitcast(mine(2, dtype="int8"), tf.qint8)):
        with raises(hvd.ArgumentError, "'x': tensors of dtype .* cannot be sent"):
            hvd.broadcast(tensor, 0, name="x")


def scenario_rows(form: Form) -> None:
    """No rows at all, splits of another dtype, and shapes while a function is traced."""
    gather = form(hvd.allgather)
    assert gather(tf.ones([int(hvd.rank() == hvd.size() - 1), 2])).shape == (1, 2)
    assert gather(tf.ones([0, 2])).shape == (0, 2)
    assert form(hvd.alltoall)(tf.ones([0, 2])).shape == (0, 2)
    part = form(lambda x: hvd.reducescatter(x, compression=hvd.Compression.fp16))(mine(1, 2))
    assert part.dtype == tf.float32 and part.shape == (int(hvd.rank() == 0), 2)
    everything = tf.constant([2] * hvd.size(), tf.int64)
    rows, received = form(hvd.alltoall)(mine(2 * hvd.size()), everything)
    assert rows.shape == [2 * hvd.size()] and received.dtype == tf.int64
    spec = tf.TensorSpec([4, 3])
    for verb in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        assert tf.function(verb).get_concrete_function(spec).output_shapes.as_list() == [None, 3]
    pair = tf.function(lambda x: hvd.alltoall(x, [4] + [0] * (hvd.size() - 1)))
    shapes = pair.get_concrete_function(spec).output_shapes
    assert [shape.as_list() for shape in shapes] == [[None, 3], [None]]
    assert hvd.grouped_reducescatter([]) == hvd.grouped_allgather([]) == []


def scenario_constants_in_a_function_are_sent_every_time() -> None:
    @tf.function  # type: ignore[untyped-decorator]
    def ones() -> Any:
        return hvd.allreduce(tf.constant([1.0, 2.0]), op=hvd.Sum)

    assert same(ones(), [hvd.size(), 2.0 * hvd.size()])
    assert tensors_sent_by(lambda: [ones() for _ in range(3)]) == 3


def scenario_shapes(form: Form) -> None:
    for shape in [(), (0,), (3, 0, 2), (1, 1, 1), (5,), (2, 3, 4, 5)]:
        result = form(lambda x: hvd.allreduce(x, op=hvd.Sum))(mine(*shape))
        assert result.shape == shape and same(result, sum(ranks()))

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])  # type: ignore[untyped-decorator]
    def any_rows(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    for rows in (1, 4, 1):
        assert same(any_rows(mine(rows, 2)), tf.fill([rows, 2], float(sum(ranks()))))


def scenario_average_argument_of_older_scripts() -> None:
    assert same(hvd.allreduce(mine(2), False), sum(ranks()))
    assert same(hvd.allreduce(mine(2), True), sum(ranks()) / hvd.size())
    with raises(hvd.ArgumentError, "not both"):
        hvd.allreduce(mine(2), average=True, op=hvd.Sum)


def scenario_input_is_left_alone(form: Form) -> None:
    tensor, variable = mine(4), tf.Variable(mine(4))

    def reduce(tensor: Any) -> tuple[Any, Any]:
        return hvd.allreduce(tensor, op=hvd.Sum), hvd.allreduce(variable, op=hvd.Sum) + tensor

    first, second = form(reduce)(tensor)
    assert same(first, sum(ranks())) and same(second, sum(ranks()) + hvd.rank() + 1)
    assert same(tensor, hvd.rank() + 1) and same(variable, hvd.rank() + 1)


def scenario_scales_and_weights(form: Form) -> None:
    def scaled(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)

    def weighted(x: Any, weight: Any) -> Any:
        return hvd.allreduce(x, weight=weight)

    assert same(form(scaled)(mine(2)), 2 * sum(ranks()))
    weights = range(hvd.size())
    expected = sum(w * (w + 1) for w in weights) / (sum(weights) or 1)
    for weight in (hvd.rank(), float(hvd.rank()), tf.constant(hvd.rank())):
        result = form(weighted)(mine(2, dtype="float64"), weight)
        assert same(result, expected, 1e-14), (weight, result, expected)
    poisoned = mine(2) if hvd.rank() == 0 else tf.fill([2], float("nan"))
    assert same(form(weighted)(poisoned, float(hvd.rank() == 0)), 1)
    for tensor in (mine(2), tf.IndexedSlices(mine(1), [0])):
        with raises(hvd.ArgumentError, "weight= cannot be combined with op=hvd.Sum"):
            hvd.allreduce(tensor, op=hvd.Sum, weight=1.0)


def scenario_compression(form: Form) -> None:
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):

        def reduce(x: Any, compression: Any = compression) -> Any:
            return hvd.allreduce(x, compression=compression, op=hvd.Sum)

        result = form(reduce)(mine(3))
        assert result.dtype == tf.float32 and same(result, sum(ranks()))
        assert form(reduce)(mine(3, dtype="int32")).dtype == tf.int32
        if compression is hvd.Compression.none:
            continue
        # The same bits as by hand.
        tensor = tf.math.sin(tf.range(3000, dtype=tf.float64)) * (hvd.rank() + 0.1)
        narrow, _ = compression.compress(tensor)
        by_hand = tf.cast(hvd.allreduce(narrow, op=hvd.Sum), tf.float64)
        assert (form(reduce)(tensor).numpy() == by_hand.numpy()).all()


def scenario_grouped(form: Form) -> None:
    dtypes = ["float32", "float64", "float32", "int64"]

    def reduce() -> Any:
        tensors = [mine(i + 1, dtype=dtype) * i for i, dtype in enumerate(dtypes)]
        return hvd.grouped_allreduce(tensors, op=hvd.Sum)

    for i, result in enumerate(form(reduce)()):
        assert result.dtype == dtypes[i] and result.shape == [i + 1]
        assert same(result, i * sum(ranks()))
    assert hvd.grouped_allreduce([]) == []


def scenario_queries(form: Form) -> None:
    names = ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"]
    values = form(lambda: [getattr(hvd, f"{name}_op")() for name in names])()
    assert [int(value) for value in values] == [getattr(hvd, name)() for name in names]


def scenario_barrier_in_a_function() -> None:
    counted = tf.Variable(0)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        counted.assign_add(1)
        hvd.barrier()

    step()
    assert tensors_sent_by(step) == 1
    assert counted.numpy() == 2

    @tf.function  # type: ignore[untyped-decorator]
    def nothing_needs_it(x: Any) -> Any:
        hvd.barrier()
        return x + 1

    nothing_needs_it(tf.constant(1.0))
    assert tensors_sent_by(lambda: nothing_needs_it(tf.constant(1.0))) == 1


def scenario_loops_and_inner_functions_of_a_function() -> None:
    """Runs that do not wait for each other use one name in turn."""
    root = hvd.size() - 1

    @tf.function  # type: ignore[untyped-decorator]
    def all_verbs(x: Any) -> Any:
        results = [
            hvd.allreduce(x, op=hvd.Sum),
            tf.reduce_sum(hvd.allgather(x), axis=0)[None],
            hvd.reducescatter(tf.repeat(x, hvd.size()), op=hvd.Sum),
            tf.reduce_sum(hvd.alltoall(tf.repeat(x, hvd.size())), axis=0)[None],
            hvd.broadcast(x, root) / hvd.size() * sum(ranks()),
        ]
        return tf.add_n(results)

    @tf.function  # type: ignore[untyped-decorator]
    def loop(x: Any, count: Any) -> Any:
        total = all_verbs(x) + all_verbs(2 * x)
        for i in tf.range(count):
            total += all_verbs(x * tf.cast(i, x.dtype))
        return total

    count = 60
    expected = 5 * sum(ranks()) * (3 + sum(range(count)))
    for _ in range(3):
        assert same(loop(mine(1, dtype="float64"), count), expected, 1e-6)


def scenario_a_retrace_on_one_rank_keeps_the_names() -> None:
    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, unused: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum) + hvd.allreduce(x * 2, op=hvd.Sum)

    for number in range(4):
        unused = number if hvd.rank() == 0 else 0  # a Python number: traced for each value
        assert same(step(mine(2), unused), 3 * sum(ranks()))


def scenario_branch_in_a_function() -> None:
    @tf.function  # type: ignore[untyped-decorator]
    def choose(x: Any, doubled: Any) -> Any:
        if doubled:
            return hvd.allreduce(2 * x, op=hvd.Sum)
        return hvd.allreduce(x, op=hvd.Sum)

    for doubled in (True, False):
        assert same(choose(mine(2), tf.constant(doubled)), (1 + doubled) * sum(ranks()))


def scenario_broadcast_variables(form: Form) -> None:
    dtypes = ["float32", "int64", "bool", "uint16", "uint32", "uint64", "complex64", "complex128",
              "float32"]  # fmt: skip
    for root in range(hvd.size()):
        variables = [
            tf.Variable(tf.cast(tf.fill([i, 2], hvd.rank() + 1), dtype))
            for i, dtype in enumerate(dtypes)
        ]
        form(lambda variables=variables, root=root: hvd.broadcast_variables(variables, root))()
        for variable, dtype in zip(variables, dtypes, strict=True):
            assert bool(tf.reduce_all(variable == tf.cast(root + 1, dtype))), (dtype, variable)
    hvd.broadcast_variables([], 0)
    with raises(hvd.ArgumentError, "not a variable"):
        hvd.broadcast_variables([tf.ones(2)], 0)


def scenario_objects() -> None:
    assert hvd.broadcast_object({"seed": hvd.rank()}, hvd.size() - 1) == {"seed": hvd.size() - 1}
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def scenario_eager_forms_of_horovod() -> None:
    last = hvd.size() - 1
    variable = tf.Variable([hvd.rank(), 3])
    assert hvd.broadcast_variables([variable], 0, inplace=True) is None
    assert variable.numpy().tolist() == [0, 3]
    variable.assign([hvd.rank(), 4])
    assert hvd.broadcast_([variable], last, name="again")[0] is variable
    assert variable.numpy().tolist() == [last, 4]
    first = hvd.broadcast_object_fn(root_rank=last, session=None)
    assert first({"rank": hvd.rank()}) == {"rank": last}
    assert hvd.broadcast_object(hvd.rank(), last, None, "one") == last
    assert hvd.allgather_object(hvd.rank(), None, "all") == list(range(hvd.size()))
    with tf.GradientTape() as tape:
        weight = tf.Variable(2.0)
        loss = weight * float(hvd.rank())
    gradient = hvd.DistributedGradientTape(tape).gradient(loss, weight, None, True)
    assert float(gradient) == last / 2


def scenario_a_graph_that_a_session_runs_is_refused() -> None:
    with tf.Graph().as_default():
        for call in (
            lambda: hvd.allreduce(tf.ones([2])),
            lambda: hvd.allreduce(tf.ones([2]), name="named"),
            lambda: hvd.broadcast(tf.ones([2]), 0),
            hvd.rank_op,
        ):
            with raises(hvd.ArgumentError, "call it eagerly, or in a tf.function"):
                call()


def scenario_misuse_says_what_to_do() -> None:
    with raises(hvd.ArgumentError, "string"):
        hvd.allreduce("text")
    with raises(hvd.ArgumentError, "is a object, not a tensor"):
        hvd.allreduce(object())
    with raises(hvd.ArgumentError, "bool.*convert it"):
        hvd.allreduce(tf.ones(3, tf.bool))
    with raises(hvd.ArgumentError, f"root_rank={hvd.size()} is not a rank"):
        hvd.broadcast(tf.ones(3), hvd.size())
    with raises(tf.errors.InvalidArgumentError, "Adasum takes floating-point tensors"):
        hvd.allreduce(tf.ones(3, tf.int32), op=hvd.Adasum)
    for verb in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with raises(hvd.ArgumentError, r"of a scalar; use tf.reshape\(tensor, \[1\]\)"):
            verb(tf.constant(3.0))
    with raises(hvd.ArgumentError, "splits of dtype float32; give one whole number"):
        hvd.alltoall(tf.ones([2]), [0.5])
    with raises(hvd.ArgumentError, "is bool, which Average does not reduce; convert it"):
        hvd.reducescatter(tf.ones([2], tf.bool))


def scenario_each_rank_takes_its_own_gpu() -> None:
    """Replace the devices that TensorFlow sees by fakes."""
    from hvdlite.tensorflow import _take_own_gpu as take_own_gpu

    gpus = ["GPU:0", "GPU:1"]

    def shown(visible: list[str], error: type[Exception] | None = None) -> list[str]:
        with (
            mock.patch.object(tf.config, "list_physical_devices", lambda _: gpus),
            mock.patch.object(tf.config, "get_visible_devices", lambda _: visible),
            mock.patch.object(tf.config, "set_visible_devices", side_effect=error) as show,
        ):
            take_own_gpu(basics.engine())
        return [call.args[0] for call in show.call_args_list]

    own = [gpus[hvd.rank() % 2]] if hvd.size() > 1 else []
    assert shown(gpus) == own
    assert shown(gpus, RuntimeError) == own  # TensorFlow is in use, and its devices do not change
    assert shown(gpus[1:]) == []
    assert shown([]) == []


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_tensorflow_ops = make_tests(body, sizes(1, 3), env=ENVIRONMENT)
