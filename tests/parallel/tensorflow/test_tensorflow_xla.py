"""Functions that XLA compiles: one grouped custom call, the same results, the same errors."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any
from unittest import mock

import pytest

from harness import run_world
from parallel.scenarios import make_tests, sizes
from parallel.tensorflow.tensorflow_worlds import (
    ENVIRONMENT,
    hvd,
    mine,
    ranks,
    run_scenarios,
    same,
    start,
    tf,
)

PRELOAD = ("tensorflow",)
DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


def compiled(function: Any) -> Any:
    return tf.function(function, jit_compile=True)


def total() -> int:
    return sum(ranks())


def scenario_one_tensor() -> None:
    # A single result of a custom call has another address than several have.
    step = compiled(lambda x: hvd.allreduce(x * 2.0, op=hvd.Sum) + 1.0)
    for _ in range(3):
        assert same(step(mine(3, 2)), 2 * total() + 1)


def scenario_every_dtype_and_operation_and_several_shapes() -> None:
    product = 1
    for rank in ranks():
        product *= rank
    expected = {
        hvd.Sum: total(),
        hvd.Average: total() / hvd.size(),
        hvd.Product: product,
        hvd.Min: 1,
        hvd.Max: hvd.size(),
    }
    cases = [(dtype, op) for dtype in DTYPES for op in expected]

    @compiled
    def step(x: Any) -> Any:
        results = []
        for dtype, op in cases:
            vector = tf.cast(x, dtype)
            tensors = [vector, vector[0], tf.cast(x, tf.float32), vector[:0]]
            name = f"odd; name, %2c of \u00e9 {dtype} {op}"
            results.append(hvd.grouped_allreduce(tensors, op=op, name=name))
        return results

    for (dtype, op), results in zip(cases, step(mine(4)), strict=True):
        for result, shape in zip(results, ([4], [], [4], [0]), strict=True):
            assert result.shape == shape
            value = expected[op] if result.dtype.is_floating else int(expected[op])
            assert same(result, value, 1e-6), (dtype, op, result)
        assert results[0].dtype == dtype
    scaled = compiled(
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=1 / 3, postscale_factor=-2.0)
    )
    assert same(scaled(mine(5, dtype="float64")), -2 / 3 * total(), 1e-14)


def scenario_loop() -> None:
    @compiled
    def step(x: Any) -> Any:
        return tf.while_loop(
            lambda i, x: i < 4,
            lambda i, x: (i + 1, hvd.allreduce(x, name="in a loop") + 1.0),
            (0, x),
        )[1]

    assert same(step(mine(2)), total() / hvd.size() + 4, 1e-6)


def scenario_calls_come_in_the_order_of_the_program() -> None:
    # XLA may run them in any order, and several at once; the ranks need the same order.
    @tf.function
    def inner(x: Any) -> Any:
        return hvd.allreduce(x, name="called twice", op=hvd.Sum)

    @compiled
    def step(tensors: Any) -> Any:
        results = [inner(tensors[0]), inner(tensors[1])]
        results += [hvd.allreduce(tf.minimum(x @ x, x), op=hvd.Sum) for x in tensors]
        results += tf.while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, hvd.allreduce(x)), (0, mine(1))
        )[1:]
        return [*results, hvd.allreduce(tf.minimum(tensors[0] @ tensors[1], 1.0), op=hvd.Min)]

    tensors = [mine(size, size) for size in (64, 64, 200, 128, 300, 32)]
    for _ in range(20):
        *sums, looped, least = step(tensors)
        for result in sums:
            assert same(result, total())
        assert same(looped, total() / hvd.size(), 1e-6)
        assert same(least, 1)


def scenario_threads_run_functions_of_their_own() -> None:
    # The turn of one function must not make another function wait.
    met = threading.Barrier(2)
    results: dict[str, Any] = {}

    def first(x: Any) -> Any:
        return hvd.allreduce(x, name="of the first thread", op=hvd.Sum)

    def second(x: Any) -> Any:
        return hvd.allreduce(x, name="of the second thread", op=hvd.Sum)

    steps = [compiled(first), compiled(second)]
    for step in steps:
        step(mine(3))

    def run(step: Any, late: bool) -> None:
        met.wait()
        time.sleep(0.1 * late)
        results[step.__name__] = step(mine(3))

    # The ranks begin with different values.
    threads = [
        threading.Thread(target=run, args=(step, (index + hvd.rank()) % 2 == 1))
        for index, step in enumerate(steps)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(results["first"], total())
    assert same(results["second"], total())


def scenario_gradient() -> None:
    """Also of an average, and with an upstream gradient of another dtype."""
    for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1 / hvd.size())):

        @compiled
        def step(x: Any, op: int = op) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = hvd.allreduce(x * 3.0, op=op, prescale_factor=0.5)
            return tape.gradient(y, x, output_gradients=mine(2))

        gradient = step(mine(2, dtype="float64"))
        assert gradient.dtype == tf.float64 and same(gradient, 1.5 * factor * total(), 1e-6)


def scenario_mismatch_is_an_error_and_the_world_goes_on() -> None:
    def step(x: Any) -> Any:
        bad = hvd.allreduce(x, name="of no common shape")
        return bad, hvd.allreduce(x[:2], name="after it")  # for which no rank may wait

    step = compiled(step)
    if hvd.size() > 1:
        for _ in range(3):
            with pytest.raises(tf.errors.OpError, match="ranks disagree about the shape") as caught:
                step(tf.ones([2 + hvd.rank()]))
            assert "CollectiveError" not in caught.value.message
        good, after = step(mine(2))
        assert same(good, total() / hvd.size())
        assert same(after, total() / hvd.size())
    assert same(compiled(lambda x: hvd.allreduce(x, op=hvd.Sum))(mine(2)), total())


def scenario_what_xla_cannot_do_says_so() -> None:
    for call in (
        lambda x: hvd.allreduce(x, weight=2.0),
        hvd.allgather,
        lambda x: hvd.broadcast(x, 0),
        hvd.alltoall,
        hvd.reducescatter,
        lambda x: hvd.allreduce(tf.boolean_mask(x, x > 0)),
    ):
        with pytest.raises(hvd.ArgumentError, match="jit_compile=False"):
            compiled(call)(mine(2))


def scenario_gpu_is_refused_while_tracing() -> None:
    from hvdlite.tensorflow import requests

    with (
        mock.patch.object(requests, "_platform", lambda: "GPU"),
        pytest.raises(hvd.ArgumentError, match="for GPU, only for CPU; use jit_compile=False"),
    ):
        compiled(hvd.allreduce)(mine(2))


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_xla = make_tests(body, sizes(1, 2), env=ENVIRONMENT)


def killed_while_the_other_waits() -> str:
    start()
    step = compiled(lambda x: hvd.allreduce(x, name="waits"))
    step(tf.ones(3))
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(tf.errors.OpError) as caught:
        step(tf.ones(3))
    return str(caught.value.message)


def test_killed_rank_ends_a_compiled_step() -> None:
    survivor, victim = run_world(
        2, killed_while_the_other_waits, env=ENVIRONMENT, expect_failure=True
    )
    assert victim.returncode == -signal.SIGKILL
    assert "rank 1 died" in survivor.value
    assert "waits" in survivor.value
    assert "[hvdlite.errors.CollectiveError]" in survivor.value
