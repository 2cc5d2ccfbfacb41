"""Measure the cost of hvdlite's TensorFlow operations, for a tensor and for a training step.

    python benchmarks/tensorflow_ops.py --np 2

`tensorflow_ops` runs a tf.function of 161 small tensors in a world of one, so that only the way
into the core and back is measured. It compares hvd.allreduce of each tensor, a tf.numpy_function
that copies each tensor, and the same function with neither. Figures are microseconds per tensor.

`tensorflow_step` runs a training step of a plain TensorFlow MLP on N ranks. It compares compute
alone, hvd.DistributedGradientTape, and MultiWorkerMirroredStrategy. The strategy needs processes of
its own, so two worlds take turns in rounds. Figures are medians on the slowest rank, in
milliseconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from workers import add_common_arguments, print_row, run_ranks

TENSORS = 161
WIDTHS = [512, 1024, 1024, 1024, 1024, 100]  # 3.8 M parameters in 10 tensors
BATCH = 32
WORLDS = 3  # The two worlds run in so many rounds.
STEPS = 60
QUICK_STEPS = 3
MODES = ("ops", "hvdlite", "strategy")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    steps = QUICK_STEPS if arguments.quick else STEPS
    if arguments.mode == "ops":
        measure_ops(steps)
    elif arguments.mode == "hvdlite":
        measure_hvdlite(steps)
    elif arguments.mode == "strategy":
        measure_strategy(steps)
    else:
        return run_everything(arguments)
    return 0


def run_everything(arguments: argparse.Namespace) -> int:
    """Run in the user's process: start the worlds in turn, and print the rows."""
    quick = ["--quick"] * arguments.quick
    status = run_ranks(__file__, 1, arguments.output, ["--mode", "ops", *quick])
    if status != 0:
        return status
    figures: dict[str, list[float]] = {"compute": [], "hvdlite": [], "strategy": []}
    for _ in range(1 if arguments.quick else WORLDS):
        for name, value in run_hvdlite_world(arguments.np, quick).items():
            figures[name].append(value)
        figures["strategy"].append(run_strategy_world(arguments.np, quick))
    medians = {name: statistics.median(values) for name, values in figures.items()}
    row: dict[str, Any] = {"benchmark": "tensorflow_step", "np": arguments.np, "tensors": 10}
    row |= {f"{name}_ms": round(value, 2) for name, value in medians.items()}
    for name in ("hvdlite", "strategy"):
        row[f"{name}_overhead_ms"] = round(medians[name] - medians["compute"], 2)
    print_row(row, "tensorflow-cpu")
    return 0


# Per tensor


def measure_ops(steps: int) -> None:
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    hvd.init()
    tensors = [tf.random.normal([16]) for _ in range(TENSORS)]

    def function_of(send: Callable[[Any, int], Any]) -> Callable[[], Any]:
        @tf.function
        def run(inputs: list[Any]) -> Any:
            return [send(value * 1.5, index) + 1.0 for index, value in enumerate(inputs)]

        return lambda: run(tensors)[-1].numpy()

    def copy(value: Any, index: int) -> Any:
        result = tf.numpy_function(lambda array: array.copy(), [value], tf.float32)
        result.set_shape(value.shape)
        return result

    contestants = {
        "alone": function_of(lambda value, index: value),
        "hvdlite": function_of(lambda value, index: hvd.allreduce(value, name=f"tensor.{index}")),
        "numpy_function": function_of(copy),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for step in range(5 + 5 * steps):
        for name, call in contestants.items():
            begin = time.perf_counter_ns()
            call()
            if step >= 5:
                times[name].append((time.perf_counter_ns() - begin) / 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours = (medians["hvdlite"] - medians["alone"]) / TENSORS
    theirs = (medians["numpy_function"] - medians["alone"]) / TENSORS
    row = {
        "benchmark": "tensorflow_ops",
        "tensors": TENSORS,
        "alone_us": round(medians["alone"], 1),
        "hvdlite_us": round(medians["hvdlite"], 1),
        "hvdlite_us_per_tensor": round(ours, 2),
        "numpy_function_us_per_tensor": round(theirs, 2),
        "below_numpy_function": round(theirs / ours, 1),
    }
    print_row(row, "tensorflow-cpu")
    hvd.shutdown()


# Per step


def make_variables() -> list[Any]:
    import tensorflow as tf

    tf.random.set_seed(0)
    variables = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        variables.append(tf.Variable(tf.random.normal([inputs, outputs]) * inputs**-0.5))
        variables.append(tf.Variable(tf.zeros([outputs])))
    return variables


def loss_of(variables: list[Any], inputs: Any) -> Any:
    import tensorflow as tf

    hidden = inputs
    for index in range(0, len(variables), 2):
        hidden = hidden @ variables[index] + variables[index + 1]
        if index + 2 < len(variables):
            hidden = tf.nn.relu(hidden)
    return tf.reduce_mean(hidden**2)


def update(variables: list[Any], gradients: list[Any]) -> None:
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(0.001 * gradient)


def time_steps(steps: int, contestants: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Let the contestants take turns; return the median step of each in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for step in range(3 + steps):
        for name, call in contestants.items():
            begin = time.perf_counter_ns()
            call()
            if step >= 3:
                times[name].append((time.perf_counter_ns() - begin) / 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def one_thread() -> None:
    """Let TensorFlow use one thread to compute and two to schedule, as on every other rank."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)


def measure_hvdlite(steps: int) -> None:
    one_thread()
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    hvd.init()
    variables = make_variables()
    inputs = tf.random.normal([BATCH, WIDTHS[0]])

    @tf.function
    def alone() -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, inputs)
        update(variables, tape.gradient(loss, variables))

    @tf.function
    def reduced() -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(variables, inputs)
        update(variables, tape.gradient(loss, variables))

    def alone_then_meet() -> None:
        alone()
        hvd.barrier()

    medians = time_steps(steps, {"compute": alone_then_meet, "hvdlite": reduced})
    everyone = hvd.allgather_object(medians)
    if hvd.rank() == 0:
        print(json.dumps({name: max(one[name] for one in everyone) for name in medians}))
    hvd.shutdown()


def run_hvdlite_world(ranks: int, quick: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--mode", "hvdlite", *quick]
    result = subprocess.run(
        [sys.executable, "-m", "hvdlite.launch", "-np", str(ranks), *command],
        env=quiet_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    row: dict[str, float] = json.loads(result.stdout.splitlines()[-1].removeprefix("[0] "))
    return row


def measure_strategy(steps: int) -> None:
    one_thread()
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = make_variables()
    inputs = tf.random.normal([BATCH, WIDTHS[0]])

    def replica() -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, inputs)
        gradients = tape.gradient(loss, variables)
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)

        def apply(_: Any, *reduced: Any) -> None:
            for variable, gradient in zip(variables, reduced, strict=True):
                strategy.extended.update(variable, decrease, args=(gradient,))

        context.merge_call(apply, args=tuple(gradients))

    def decrease(variable: Any, gradient: Any) -> None:
        variable.assign_sub(0.001 * gradient)

    @tf.function
    def step() -> None:
        strategy.run(replica)

    median = time_steps(steps, {"strategy": step})["strategy"]
    print(json.dumps({"strategy": median}), flush=True)


def run_strategy_world(ranks: int, quick: list[str]) -> float:
    """Start the strategy's workers on free ports; return the median of the slowest one, in ms."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
    addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    for listener in listeners:
        listener.close()
    workers = []
    for rank in range(ranks):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        environment = {**quiet_environment(), "TF_CONFIG": json.dumps(task)}
        command = [sys.executable, __file__, "--mode", "strategy", *quick]
        workers.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    medians = []
    for worker in workers:
        output, _ = worker.communicate(timeout=600)
        if worker.returncode != 0:
            raise RuntimeError(f"a worker of the strategy failed with status {worker.returncode}")
        medians.append(json.loads(output.splitlines()[-1])["strategy"])
    return max(medians)


def quiet_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}


if __name__ == "__main__":
    sys.exit(main())
