"""Measure a step of Keras's `fit` on TensorFlow: what synchrony costs, and what hvdlite adds.

    python benchmarks/keras_step.py --np 2

Three contestants take turns in the same ranks, each with its own copy of the model. Ranks of
`silent` send nothing. Those of `barrier` also meet after each step, which no synchronous training
can do without. Those of `hvdlite` train with `DistributedOptimizer`. A row has a model, and the
median step of each contestant in milliseconds, on the slowest rank; `hvdlite_to_barrier` is the
ratio of the last two.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from workers import add_common_arguments, print_row, run_ranks

EPOCHS = 8
QUICK_EPOCHS = 2
STEPS = 20  # of an epoch; the first one is not counted
CONTESTANTS = ("silent", "barrier", "hvdlite")
# What a rank gets in each step: batch and shape of its inputs.
MODELS = {"digits": (24, (8, 8, 1)), "mlp": (256, (784,)), "convolutions": (32, (32, 32, 3))}
THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_common_arguments(parser)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(arguments.quick)
        return 0
    # As hvdlite-run would choose; `run_ranks` asks for one thread.
    threads = max(1, len(os.sched_getaffinity(0)) // arguments.np)
    os.environ.update(dict.fromkeys(THREADS, str(threads)), TF_CPP_MIN_LOG_LEVEL="2")
    return run_ranks(__file__, arguments.np, arguments.output, ["--quick"] * arguments.quick)


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


def measure(quick: bool) -> None:
    """Run one rank, and print the rows on rank 0."""
    import numpy as np

    import hvdlite.numpy as hvd

    hvd.init()
    for name, (batch, shape) in itertools.islice(MODELS.items(), 1 if quick else None):
        generator = np.random.default_rng(hvd.rank())
        inputs = generator.normal(size=(batch * STEPS, *shape)).astype("float32")
        labels = generator.integers(10, size=batch * STEPS)
        fits = {one: contestant(one, name, batch) for one in CONTESTANTS}
        times: dict[str, list[float]] = {one: [] for one in CONTESTANTS}
        for epoch in range(1 + (QUICK_EPOCHS if quick else EPOCHS)):
            for one, fit in fits.items():
                took = fit(inputs, labels)
                times[one] += took if epoch > 0 else []
        medians = {one: statistics.median(took) * 1e3 for one, took in times.items()}
        everyone = hvd.allgather_object(medians)
        if hvd.rank() == 0:
            slowest = {one: max(told[one] for told in everyone) for one in CONTESTANTS}
            row: dict[str, Any] = {"benchmark": "keras_step", "np": hvd.size(), "model": name}
            row |= {f"{one}_ms": round(value, 2) for one, value in slowest.items()}
            row["hvdlite_to_barrier"] = round(slowest["hvdlite"] / slowest["barrier"], 3)
            print_row(row, "tensorflow-cpu")
    hvd.shutdown()


def contestant(kind: str, name: str, batch: int) -> Callable[[Any, Any], list[float]]:
    """Make a function that trains a model of its own for an epoch, and returns its steps' times."""
    import keras

    from hvdlite.keras import DistributedOptimizer
    from hvdlite.numpy import barrier

    optimizer = keras.optimizers.Adam(1e-4)
    if kind == "hvdlite":
        optimizer = DistributedOptimizer(optimizer)
    model = make_model(name)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ends: list[float] = []

    def note(batch: int, logs: Any) -> None:
        if kind == "barrier":
            barrier()
        ends.append(time.perf_counter())

    noted = keras.callbacks.LambdaCallback(on_train_batch_end=note)

    def fit(inputs: Any, labels: Any) -> list[float]:
        ends.clear()
        barrier()  # The ranks begin together.
        model.fit(inputs, labels, batch, callbacks=[noted], shuffle=False, verbose=0)
        return [end - begin for begin, end in itertools.pairwise(ends)]

    return fit


if __name__ == "__main__":
    raise SystemExit(main())
