"""Measure the cost of hvdlite's TensorFlow operations, and of a step of TensorFlow and of Keras.

    python benchmarks/tensorflow_ops.py --np 2

`tensorflow_ops` runs a tf.function of 161 small tensors in a world of one, with and without
hvd.allreduce of each tensor, so that only the way into the core and back is measured. Figures are
microseconds.

`tensorflow_step` runs a training step of a plain TensorFlow MLP on N ranks. It compares compute
alone, hvd.DistributedGradientTape, and MultiWorkerMirroredStrategy. The strategy needs processes of
its own, so two worlds take turns in rounds. Figures are medians on the slowest rank, in
milliseconds.

`keras_step` runs steps of Keras's `fit` on N ranks, in which contestants take turns, each with its
own copy of a model. Ranks of `silent` send nothing. Those of `barrier` also meet after each step,
which no synchronous training can do without. Those of `hvdlite` train with `DistributedOptimizer`,
those of `callbacks` with hvdlite's two callbacks, too, and those of `distribute` with
`hvd.distribute`. There is a row for each model, with medians on the slowest rank;
`hvdlite_to_barrier` and `distribute_to_callbacks` are ratios of these.
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
PARTS = ("ops", "step", "keras")

EPOCHS = 8
QUICK_EPOCHS = 2
STEPS_OF_EPOCH = 20  # The first one is not counted.
CONTESTANTS = ("silent", "barrier", "hvdlite", "callbacks", "distribute")
# What a rank gets in each step: batch and shape of its inputs.
MODELS = {"digits": (24, (8, 8, 1)), "mlp": (256, (784,)), "convolutions": (32, (32, 32, 3))}
THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    parser.add_argument("--only", choices=PARTS, help="this part only")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        ROLES[arguments.role](arguments.quick)
        return 0
    parts = {"ops": run_ops, "step": run_step, "keras": run_keras}
    for part in [arguments.only] if arguments.only else PARTS:
        status = parts[part](arguments)
        if status != 0:
            return status
    return 0


# Per tensor


def run_ops(arguments: argparse.Namespace) -> int:
    quick = ["--quick"] * arguments.quick
    return run_ranks(__file__, 1, arguments.output, ["--role", "ops", *quick])


def measure_ops(quick: bool) -> None:
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    hvd.init()
    tensors = [tf.random.normal([16]) for _ in range(TENSORS)]

    def function_of(send: Callable[[Any, int], Any]) -> Callable[[], Any]:
        @tf.function
        def run(inputs: list[Any]) -> Any:
            return [send(value * 1.5, index) + 1.0 for index, value in enumerate(inputs)]

        return lambda: run(tensors)[-1].numpy()

    contestants = {
        "alone": function_of(lambda value, index: value),
        "hvdlite": function_of(lambda value, index: hvd.allreduce(value, name=f"tensor.{index}")),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for step in range(5 + 5 * (QUICK_STEPS if quick else STEPS)):
        for name, call in contestants.items():
            begin = time.perf_counter_ns()
            call()
            if step >= 5:
                times[name].append((time.perf_counter_ns() - begin) / 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours = (medians["hvdlite"] - medians["alone"]) / TENSORS
    row = {
        "benchmark": "tensorflow_ops",
        "tensors": TENSORS,
        "alone_us": round(medians["alone"], 1),
        "hvdlite_us": round(medians["hvdlite"], 1),
        "hvdlite_us_per_tensor": round(ours, 2),
    }
    print_row(row, "tensorflow-cpu")
    hvd.shutdown()


# Per step


def run_step(arguments: argparse.Namespace) -> int:
    """Start the worlds in turn, and print the row."""
    quick = ["--quick"] * arguments.quick
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


def time_steps(quick: bool, contestants: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Let the contestants take turns; return the median step of each in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for step in range(3 + (QUICK_STEPS if quick else STEPS)):
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


def measure_hvdlite(quick: bool) -> None:
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

    medians = time_steps(quick, {"compute": alone_then_meet, "hvdlite": reduced})
    everyone = hvd.allgather_object(medians)
    if hvd.rank() == 0:
        print(json.dumps({name: max(one[name] for one in everyone) for name in medians}))
    hvd.shutdown()


def run_hvdlite_world(ranks: int, quick: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--role", "hvdlite", *quick]
    result = subprocess.run(
        [sys.executable, "-m", "hvdlite.launch", "-np", str(ranks), *command],
        env=quiet_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    row: dict[str, float] = json.loads(result.stdout.splitlines()[-1].removeprefix("[0] "))
    return row


def measure_strategy(quick: bool) -> None:
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

    median = time_steps(quick, {"strategy": step})["strategy"]
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
        command = [sys.executable, __file__, "--role", "strategy", *quick]
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


# Per step of Keras


def run_keras(arguments: argparse.Namespace) -> int:
    # As hvdlite-run would choose; `run_ranks` asks for one thread.
    threads = max(1, len(os.sched_getaffinity(0)) // arguments.np)
    os.environ.update(dict.fromkeys(THREADS, str(threads)), TF_CPP_MIN_LOG_LEVEL="2")
    quick = ["--quick"] * arguments.quick
    return run_ranks(__file__, arguments.np, arguments.output, ["--role", "keras", *quick])


def make_model(name: str) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    dense, flat = keras.layers.Dense, keras.layers.Flatten
    pool = keras.layers.MaxPooling2D

    def convolution(filters: int) -> Any:
        return keras.layers.Conv2D(filters, 3, padding="same", activation="relu")

    layers = {
        "digits": lambda: [convolution(16), convolution(32), pool(), flat(), dense(64, "relu")],
        "mlp": lambda: [dense(512, "relu"), dense(512, "relu")],
        "convolutions": lambda: [
            *(convolution(64), convolution(64), pool(), convolution(128), pool()),
            *(flat(), dense(128, "relu")),
        ],
    }[name]()
    return keras.Sequential([keras.Input(MODELS[name][1]), *layers, dense(10)])


def measure_keras(quick: bool) -> None:
    """Run one rank, and print the rows on rank 0."""
    import numpy as np

    import hvdlite.numpy as hvd

    hvd.init()
    for name, (batch, shape) in itertools.islice(MODELS.items(), 1 if quick else None):
        generator = np.random.default_rng(hvd.rank())
        inputs = generator.normal(size=(batch * STEPS_OF_EPOCH, *shape)).astype("float32")
        labels = generator.integers(10, size=batch * STEPS_OF_EPOCH)
        everyone = hvd.allgather(inputs), hvd.allgather(labels)
        fits = {one: contestant(one, name, batch) for one in CONTESTANTS}
        times: dict[str, list[float]] = {one: [] for one in CONTESTANTS}
        for epoch in range(1 + (QUICK_EPOCHS if quick else EPOCHS)):
            for one, fit in fits.items():
                took = fit(*everyone) if one == "distribute" else fit(inputs, labels)
                times[one] += took if epoch > 0 else []
        medians = {one: statistics.median(took) * 1e3 for one, took in times.items()}
        by_rank = hvd.allgather_object(medians)
        if hvd.rank() == 0:
            slowest = {one: max(told[one] for told in by_rank) for one in CONTESTANTS}
            row: dict[str, Any] = {"benchmark": "keras_step", "np": hvd.size(), "model": name}
            row |= {f"{one}_ms": round(value, 2) for one, value in slowest.items()}
            row["hvdlite_to_barrier"] = round(slowest["hvdlite"] / slowest["barrier"], 3)
            ratio = slowest["distribute"] / slowest["callbacks"]
            row["distribute_to_callbacks"] = round(ratio, 3)
            print_row(row, "tensorflow-cpu")
    hvd.shutdown()


def contestant(kind: str, name: str, batch: int) -> Callable[[Any, Any], list[float]]:
    """Make a function that trains a model of its own for an epoch, and returns its steps' times."""
    import keras

    import hvdlite.keras as hvd
    from hvdlite.numpy import barrier

    optimizer = keras.optimizers.Adam(1e-4)
    if kind in ("hvdlite", "callbacks"):
        optimizer = hvd.DistributedOptimizer(optimizer)
    model = make_model(name)
    if kind == "distribute":
        model = hvd.distribute(model)
        batch *= hvd.size()
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ends: list[float] = []

    def note(batch: int, logs: Any) -> None:
        if kind == "barrier":
            barrier()
        ends.append(time.perf_counter())

    callbacks: list[Any] = [keras.callbacks.LambdaCallback(on_train_batch_end=note)]
    if kind == "callbacks":
        callbacks.append(hvd.callbacks.MetricAverageCallback())
        callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))

    def fit(inputs: Any, labels: Any) -> list[float]:
        ends.clear()
        barrier()  # The ranks begin together.
        model.fit(inputs, labels, batch, callbacks=callbacks, shuffle=False, verbose=0)
        return [end - begin for begin, end in itertools.pairwise(ends)]

    return fit


ROLES: dict[str, Callable[[bool], None]] = {
    "ops": measure_ops,
    "hvdlite": measure_hvdlite,
    "strategy": measure_strategy,
    "keras": measure_keras,
}


if __name__ == "__main__":
    sys.exit(main())
