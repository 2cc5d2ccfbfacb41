"""The library of TensorFlow operations: its linked libraries, and its behaviour below Python.

It must be one small binary for all releases; all operations must be in flight at once on one
thread; results must use the memory of their inputs.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import run_world
from hvdlite import _core
from parallel.tensorflow.tensorflow_worlds import ENVIRONMENT, hvd, tf
from patience import wait_until

PRELOAD = ("tensorflow",)
TENSORS = 161
LIBRARY = Path(_core.__file__).parent / "tensorflow" / "libhvdlite_tensorflow.so"


def raw() -> tuple[Any, Any]:
    from hvdlite.tensorflow import library

    return library, tf.constant([-1.0, 1.0, 1.0, math.nan], tf.float64)


def sums_of_many(order: Callable[[int], range]) -> Any:
    """Make a function of 161 sums that each rank traces, and so starts, in a different order."""
    library, terms = raw()
    ops = library.raw_ops()

    @tf.function
    def step(x: Any) -> dict[int, Any]:
        return {
            index: ops.hvdlite_allreduce([x * index], terms, tensor_name=f"t.{index}", op=1)[0]
            for index in order(hvd.rank())
        }

    return step


def all_under_way_on_one_thread() -> list[float]:
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    step = sums_of_many(lambda rank: range(TENSORS) if rank == 0 else range(TENSORS - 1, -1, -1))
    for _ in range(20):
        results = step(tf.ones([16]))
    hvd.shutdown()
    return [float(results[index][0]) for index in range(TENSORS)]


def test_161_operations_are_under_way_on_one_thread() -> None:
    # With as many cores as ranks a rank may start its last tensor first, which the other rank
    # starts last: a rank that waited for one before starting the next would wait for ever.
    for result in run_world(2, all_under_way_on_one_thread, env=ENVIRONMENT):
        assert result.value == [2.0 * index for index in range(TENSORS)]


def forwarded() -> tuple[int, int]:
    """Return the number of outputs that reuse their input's memory, and of all outputs."""
    from hvdlite.tensorflow import library

    counts = (ctypes.c_uint64 * 2)()
    size = ctypes.sizeof(ctypes.c_uint64)
    library.native().hvdlite_tensorflow_forwarded(counts, ctypes.byref(counts, size))
    return counts[0], counts[1]


def memory() -> dict[str, Any]:
    hvd.init()
    library, terms = raw()
    ops = library.raw_ops()
    step = sums_of_many(lambda _: range(TENSORS))
    step(tf.ones([16]))
    before = forwarded()
    step(tf.ones([16]))
    after = forwarded()
    eager = tf.constant([1.0, 2.0])
    variable = tf.Variable([3.0, 4.0])
    ops.hvdlite_allreduce([eager], terms, tensor_name="eager", op=1)
    ops.hvdlite_allreduce([variable.read_value()], terms, tensor_name="variable", op=1)

    @tf.function
    def of_a_variable() -> Any:
        return ops.hvdlite_allreduce([variable], terms, tensor_name="in graph", op=1)[0]

    return {
        "forwarded": after[0] - before[0],
        "outputs": after[1] - before[1],
        "sum": of_a_variable().numpy().tolist(),
        "eager": eager.numpy().tolist(),
        "variable": variable.numpy().tolist(),
    }


def test_results_take_the_memory_of_intermediates_and_of_nothing_else() -> None:
    for result in run_world(2, memory, env=ENVIRONMENT):
        told = result.value
        # x * 0 and x * 1 may share a buffer with something after TensorFlow has simplified them.
        assert told["outputs"] == TENSORS
        assert told["forwarded"] >= TENSORS - 2
        assert told["sum"] == [6.0, 8.0]
        assert told["eager"] == [1.0, 2.0]
        assert told["variable"] == [3.0, 4.0]


def worlds_in_turn() -> dict[str, list[Any]]:
    """Run one function in two worlds; leave each while an operation waits for the other rank."""
    library, terms = raw()
    ops = library.raw_ops()

    def total_of(name: str) -> Any:
        return tf.function(
            lambda: ops.hvdlite_allreduce([tf.ones(2)], terms, tensor_name=name, op=1)[0]
        )

    of_a_constant, alone = total_of("constant"), total_of("alone")
    told: dict[str, list[Any]] = {"sums": [], "sent": [], "left": [], "outside": []}

    def wait_for_nobody() -> None:
        with pytest.raises(tf.errors.AbortedError) as caught:
            alone()
        told["left"].append(caught.value.message)

    for _ in range(2):
        hvd.init()
        before = forwarded()[1]
        told["sums"] += [float(of_a_constant()[0]) for _ in range(3)]
        told["sent"].append(forwarded()[1] - before)
        waiting = threading.Thread(target=wait_for_nobody)
        if hvd.rank() == 0:
            waiting.start()
            all_sent = before + 4
            wait_until(lambda until=all_sent: forwarded()[1] >= until, "the fourth call")
        hvd.barrier()
        hvd.shutdown()
        if waiting.ident is not None:
            waiting.join()
        with pytest.raises(tf.errors.AbortedError) as caught:
            of_a_constant()
        told["outside"].append(caught.value.message)
    return told


def test_a_function_goes_on_in_the_next_world() -> None:
    results = run_world(2, worlds_in_turn, env=ENVIRONMENT)
    for result in results:
        told = result.value
        assert told["sums"] == [2.0] * 6
        assert told["sent"] == [3, 3], "a constant was reduced once and remembered"
        assert len(told["left"]) == (2 if result.rank == 0 else 0)
        for message in told["left"]:
            assert "'alone' waits for it" in message or "was shut down" in message
        for message in told["outside"]:
            assert "call hvd.init() first" in message


def without_a_world() -> list[str]:
    library, terms = raw()
    ops = library.raw_ops()
    with pytest.raises(hvd.NotInitializedError, match="init"):
        hvd.allreduce(tf.ones(2))
    messages = []
    for call in (
        lambda: ops.hvdlite_allreduce([tf.ones(2)], terms, tensor_name="x"),
        lambda: ops.hvdlite_allgather([tf.ones(2)], terms, tensor_name="x"),
        lambda: ops.hvdlite_broadcast([tf.ones(2)], terms, tensor_name="x"),
        lambda: ops.hvdlite_reducescatter([tf.ones(2)], terms, tensor_name="x"),
        lambda: ops.hvdlite_alltoall(tf.ones(2), tf.zeros(0, tf.int64), terms, tensor_name="x"),
        lambda: ops.hvdlite_query(terms, what="rank"),
        tf.function(lambda: ops.hvdlite_allreduce([tf.ones(2)], terms, tensor_name="x")),
    ):
        with pytest.raises(tf.errors.AbortedError) as caught:
            call()
        messages.append(caught.value.message)
    hvd.init()
    with pytest.raises(tf.errors.InvalidArgumentError, match="terms are"):
        ops.hvdlite_allreduce([tf.ones(2)], terms[:3], tensor_name="x")
    with pytest.raises(tf.errors.InvalidArgumentError, match="op 77 is unknown"):
        ops.hvdlite_allreduce([tf.ones(2)], terms, tensor_name="x", op=77)
    return messages


def test_operations_without_a_world_say_to_make_one() -> None:
    (result,) = run_world(1, without_a_world, env=ENVIRONMENT)
    assert len(result.value) == 7
    for message in result.value:
        assert "hvdlite has not been initialized; call hvd.init() first" in message


def with_an_untested_version() -> list[str]:
    import warnings

    from hvdlite.tensorflow import library

    library.NEWEST_TESTED = (2, 9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library.raw_ops()
    return [str(warning.message) for warning in caught if "hvdlite" in str(warning.message)]


def test_untested_version_is_said() -> None:
    (result,) = run_world(1, with_an_untested_version, env=ENVIRONMENT)
    (message,) = result.value
    assert "tested with TensorFlow 2.16 to 2.9" in message


def devices_of_kernels() -> set[str]:
    from tensorflow.python.framework import kernels

    from hvdlite.tensorflow import library

    library.raw_ops()
    found = kernels.get_registered_kernels_for_op("HvdliteAllreduce").kernel
    return {kernel.device_type for kernel in found}


def test_kernels_for_gpus_can_be_left_out() -> None:
    environment = {**ENVIRONMENT, "HVDLITE_TENSORFLOW_GPU": "0"}
    (result,) = run_world(1, devices_of_kernels, env=environment)
    assert result.value == {"CPU"}


def test_library_is_small_and_needs_one_library_of_tensorflow() -> None:
    assert LIBRARY.stat().st_size < 100_000
    readelf = shutil.which("readelf")
    assert readelf is not None, "binutils come with g++"
    shown = subprocess.run(
        [readelf, "--dynamic", "--wide", LIBRARY], capture_output=True, text=True, check=True
    ).stdout
    needed = [line.split("[")[1].rstrip("]") for line in shown.splitlines() if "(NEEDED)" in line]
    assert [name for name in needed if "tensorflow" in name] == ["libtensorflow_framework.so.2"]
    assert "RUNPATH" not in shown
    assert "RPATH" not in shown
