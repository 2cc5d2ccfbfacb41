"""The collectives on TensorFlow tensors: values, and the errors of misuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from harness import base_environment, run_world
from hvdlite import basics
from parallel.scenarios import make_tests, sizes, tensors_sent_by
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
INTEGERS = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
REDUCED = [*INTEGERS, "float16", "bfloat16", "float32", "float64"]
# Dtypes that are only copied: they are compared as numbers.
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
          "float8_e4m3b11fnuz"]  # fmt: skip


def raises(kind: type[Exception], text: str) -> pytest.RaisesExc[Exception]:
    return pytest.raises(kind, match=text)


def scenario_allreduce_of_every_dtype_and_op(form: Form) -> None:
    product = 1
    for rank in ranks():
        product *= rank
    expected = {
        hvd.Sum: sum(ranks()),
        hvd.Min: 1,
        hvd.Max: hvd.size(),
        hvd.Product: product,
        hvd.Average: sum(ranks()) / hvd.size(),
    }

    def reduce_all() -> list[Any]:
        return [
            hvd.allreduce(mine(3, 2, dtype=dtype), op=op) for dtype in REDUCED for op in expected
        ]

    results = iter(form(reduce_all)())
    for dtype in REDUCED:
        for op, value in expected.items():
            result = next(results)
            assert result.dtype == dtype and result.shape == (3, 2)
            assert same(result, tf.cast(tf.constant(value, tf.float64), dtype)), (dtype, op, result)


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
    with raises(hvd.ArgumentError, "weight"):
        hvd.allreduce(mine(2), op=hvd.Sum, weight=1.0)


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


def scenario_factors_on_integers(form: Form) -> None:
    for dtype in INTEGERS:
        for tensor, before, after in [(mine(3), 2.6, 0.7), (mine(2) * 10, 0.25, 1.5)]:
            result = form(
                lambda x, before=before, after=after: hvd.allreduce(
                    x, op=hvd.Sum, prescale_factor=before, postscale_factor=after
                )
            )(tf.cast(tensor, dtype))
            unit = int(tensor[0]) // (hvd.rank() + 1)
            total = sum(int(unit * number * before) for number in ranks())
            assert result.dtype == dtype and same(result, int(total * after)), (dtype, result)
    scattered = hvd.reducescatter(
        mine(2 * hvd.size(), dtype="int32"), op=hvd.Sum, prescale_factor=1.5
    )
    assert same(scattered, sum(int(1.5 * number) for number in ranks()))


def scenario_complex_numbers(form: Form) -> None:
    for dtype in ("complex64", "complex128"):
        number = tf.complex(mine(2, 3, dtype="float64"), 2 * mine(2, 3, dtype="float64"))
        for op, factor in ((hvd.Sum, 1), (hvd.Average, hvd.size())):
            result = form(lambda x, op=op: hvd.allreduce(x, op=op, postscale_factor=0.5))(
                tf.cast(number, dtype)
            )
            expected = sum(ranks()) / factor / 2
            assert result.dtype == dtype
            assert same(tf.math.real(result), expected, 1e-6)
            assert same(tf.math.imag(result), 2 * expected, 1e-6)
        root = hvd.size() - 1
        for result in (hvd.broadcast(number, root), hvd.allgather(number)[-2:]):
            assert same(tf.math.imag(result), 2 * hvd.size())
    with raises(tf.errors.InvalidArgumentError, "'z.*', of dtype complex128, has no max"):
        hvd.allreduce(number, op=hvd.Max, name="z")
    assert same(tf.math.real(hvd.allreduce(number, op=hvd.Sum)), sum(ranks()))


def is_known(dtype: str) -> bool:
    """Return whether this release of TensorFlow has that type."""
    try:
        tf.as_dtype(dtype)
    except TypeError:
        return False
    return True


def scenario_bool_by_what_leaves_a_bool(form: Form) -> None:
    flags = tf.constant([False, True, hvd.rank() == 0] * hvd.size())
    alone = hvd.size() == 1
    for op, last in ((hvd.Min, alone), (hvd.Max, True), (hvd.Product, alone)):
        whole, rows = form(lambda x, op=op: (hvd.allreduce(x, op=op), hvd.reducescatter(x, op=op)))(
            flags
        )
        assert whole.dtype == tf.bool and whole.numpy().tolist()[:3] == [False, True, last], op
        assert rows.numpy().tolist() == [False, True, last], op


def scenario_types_that_are_copied_only(form: Form) -> None:
    root = hvd.size() - 1
    for dtype in filter(is_known, FLOAT8):
        numbers = mine(hvd.size(), 3).numpy()
        here = tf.convert_to_tensor(numbers.astype(tf.as_dtype(dtype).as_numpy_dtype))
        for result, expected in (
            (form(lambda x: hvd.broadcast(x, root))(here), hvd.size()),
            (form(hvd.allgather)(here), hvd.size()),
            (form(lambda x: hvd.alltoall(x))(here), hvd.size()),
        ):
            assert result.dtype == dtype
            assert (result.numpy()[-1:].astype("float32") == expected).all(), (dtype, result)
        with raises(hvd.ArgumentError, f"'eight', of dtype {dtype}, cannot be reduced"):
            form(lambda x: hvd.allreduce(x, name="eight"))(here)
    for tensor in (tf.constant(["text"]), tf.bitcast(mine(2, dtype="int8"), tf.qint8)):
        with raises(hvd.ArgumentError, "'x': tensors of dtype .* cannot be sent"):
            hvd.broadcast(tensor, root, name="x")


def scenario_grouped(form: Form) -> None:
    dtypes = ["float32", "float64", "float32", "int64"]

    def reduce() -> Any:
        tensors = [mine(i + 1, dtype=dtype) * i for i, dtype in enumerate(dtypes)]
        return hvd.grouped_allreduce(tensors, op=hvd.Sum)

    for i, result in enumerate(form(reduce)()):
        assert result.dtype == dtypes[i] and result.shape == [i + 1]
        assert same(result, i * sum(ranks()))
    assert hvd.grouped_allreduce([]) == []


def scenario_allgather(form: Form) -> None:
    gather = form(hvd.allgather)
    for dtype in [*REDUCED, "bool"]:
        result = gather(tf.cast(tf.fill([hvd.rank() + 1, 3], hvd.rank()), dtype))
        rows = [r for r in range(hvd.size()) for _ in range(r + 1)]
        expected = tf.cast(tf.repeat(tf.constant(rows)[:, None], 3, axis=1), dtype)
        assert result.dtype == dtype and result.shape == expected.shape
        assert same(result, expected)
    assert gather(tf.ones([int(hvd.rank() == hvd.size() - 1), 2])).shape == (1, 2)
    assert gather(tf.ones([0, 2])).shape == (0, 2)
    shape = tf.function(hvd.allgather).get_concrete_function(tf.TensorSpec([4, 3])).output_shapes
    assert shape.as_list() == [None, 3]


def scenario_broadcast(form: Form) -> None:
    for root in range(hvd.size()):
        for dtype in [*REDUCED, "bool"]:
            here = tf.cast(tf.fill([2, 3], hvd.rank() + 1), dtype)
            result = form(lambda x, root=root: hvd.broadcast(x, root))(here)
            assert result.dtype == dtype and same(result, tf.cast(root + 1, dtype))


def scenario_indexed_slices(form: Form) -> None:
    def reduce(**arguments: Any) -> Any:
        values = tf.cast(tf.fill([hvd.rank() + 1, 2], hvd.rank() + 1), tf.float64)
        indices = tf.range(hvd.rank(), 2 * hvd.rank() + 1)
        slices = tf.IndexedSlices(values, indices, dense_shape=tf.constant([8, 2]))
        result = hvd.allreduce(slices, **arguments)
        assert isinstance(result, tf.IndexedSlices) != bool(arguments.get("sparse_as_dense"))
        return tf.convert_to_tensor(result)

    expected = [[0.0, 0.0] for _ in range(8)]
    for rank in range(hvd.size()):
        for row in range(rank, 2 * rank + 1):
            expected[row] = [value + rank + 1 for value in expected[row]]
    mean = tf.constant(expected, tf.float64) / hvd.size()
    for arguments in ({}, {"sparse_as_dense": True}, {"prescale_factor": 0.5, "average": True}):
        factor = arguments.get("prescale_factor", 1.0)
        result = form(lambda arguments=arguments: reduce(**arguments))()
        assert same(result, mean * factor, 1e-14), (arguments, result)
    assert same(form(lambda: reduce(op=hvd.Sum))(), mean * hvd.size(), 1e-14)
    weighted = form(lambda: reduce(weight=2.0))()
    assert same(weighted, mean, 1e-14)
    with raises(hvd.ArgumentError, "averaged or summed"):
        reduce(op=hvd.Max)


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


def scenario_loop_in_a_function() -> None:
    """Iterations that do not wait for each other use one name in turn."""

    @tf.function  # type: ignore[untyped-decorator]
    def loop(x: Any, count: Any) -> Any:
        total = tf.zeros_like(x)
        for i in tf.range(count):
            factor = tf.cast(i, x.dtype)
            total += hvd.allreduce(x * factor, op=hvd.Sum)
            total += tf.reduce_sum(hvd.allgather(x * factor), axis=0)[None]
        return total

    count = 100
    expected = 2 * sum(ranks()) * sum(range(count))
    assert same(loop(mine(1, dtype="float64"), count), expected)


def scenario_many_in_flight_in_another_order_on_each_rank() -> None:
    count = 50

    @tf.function  # type: ignore[untyped-decorator]
    def all_at_once() -> Any:
        order = [(i + 7 * hvd.rank()) % count for i in range(count)]
        results = {i: hvd.allreduce(mine(i + 1) * i, op=hvd.Sum, name=f"t.{i}") for i in order}
        return [results[i] for i in range(count)]

    for i, result in enumerate(all_at_once()):
        assert same(result, i * sum(ranks()))


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
    with raises(hvd.ArgumentError, r"use tf.reshape\(tensor, \[1\]\)"):
        hvd.allgather(tf.constant(3.0))


def scenario_each_rank_takes_its_own_gpu() -> None:
    """Replace the devices that TensorFlow sees by fakes."""
    from hvdlite.tensorflow.device import take_own_gpu

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


def worlds_in_turn() -> list[float]:
    """Functions traced in one world run in the next."""
    reduce = in_graph(lambda x: hvd.allreduce(x, op=hvd.Sum))
    values = []
    for _ in range(3):
        hvd.init()
        values.append(float(reduce(tf.constant(2.0))))
        values.append(float(hvd.allreduce(tf.constant(3.0), op=hvd.Sum)))
        hvd.shutdown()
        with raises(hvd.NotInitializedError, "init"):
            hvd.allreduce(tf.constant(1.0))
        with raises(tf.errors.AbortedError, "not been initialized"):
            reduce(tf.constant(2.0))
    return values


def test_init_again_after_shutdown() -> None:
    (result,) = run_world(1, worlds_in_turn, env=ENVIRONMENT)
    assert result.value == [2.0, 3.0] * 3


def test_importing_the_adapter_imports_neither_torch_nor_keras_wrappers(tmp_path: Path) -> None:
    code = (
        "import sys, hvdlite.tensorflow; "
        "print([one for one in ('torch', 'hvdlite.keras', 'hvdlite.torch') if one in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,  # "-c" puts it first on the path: the installed package is meant
        env={**base_environment(), **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
