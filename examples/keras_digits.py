"""Train a small Keras network on handwritten digits, on any number of ranks and either backend.

    hvdlite-run -np 2 python examples/keras_digits.py --compare
    KERAS_BACKEND=torch hvdlite-run -np 2 python examples/keras_digits.py

The global batch is the same on any number of ranks, and so is the loss curve after the warm-up.
With --compare, rank 0 first trains alone on whole batches, at the same learning rates. With
--width 4 a step has more to compute, as in larger models.
"""

import argparse
import json
import math
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits
from speed import Stopwatch, report  # beside this file

import hvdlite.keras as hvd

GLOBAL_BATCH = 48  # of all ranks together: for 1, 2, 3, 4, 6... ranks
TEST_IMAGES = 357  # of 1,797
LEARNING_RATE = 2e-3  # of the global batch


def load() -> tuple[np.ndarray, np.ndarray]:
    """Load the images (8x8 pixels) and their digits, shuffled in the same way everywhere."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return (digits.images[order, :, :, None] / 16).astype("float32"), digits.target[order]


class Share(keras.utils.PyDataset):
    """This rank's share of each global batch; every rank has the same number of batches."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, rank: int, ranks: int) -> None:
        super().__init__()
        self.images, self.labels = images, labels
        self.rank, self.ranks, self.epoch = rank, ranks, 0

    def __len__(self) -> int:
        return len(self.images) // GLOBAL_BATCH

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        shuffled = np.random.default_rng(self.epoch).permutation(len(self.images))
        batch = shuffled[index * GLOBAL_BATCH : (index + 1) * GLOBAL_BATCH]
        mine = batch[self.rank :: self.ranks]
        return self.images[mine], self.labels[mine]

    def on_epoch_end(self) -> None:
        self.epoch += 1


def make_model(optimizer: keras.Optimizer, width: int = 1) -> keras.Model:
    keras.utils.set_random_seed(0)
    convolution = {"kernel_size": 3, "padding": "same", "activation": "relu"}
    layers = [
        *(keras.Input((8, 8, 1)), keras.layers.Conv2D(16 * width, **convolution)),
        *(keras.layers.Conv2D(32 * width, **convolution), keras.layers.MaxPooling2D()),
        *(keras.layers.Flatten(), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def train(model: keras.Model, data: Share, epochs: int, callbacks: list) -> tuple[list, float]:
    """Train; return the loss of each epoch, and the samples per second of all ranks."""
    warmup = hvd.callbacks.LearningRateWarmupCallback(LEARNING_RATE, warmup_epochs=2)
    watch, verbose = Stopwatch(), 2 if hvd.rank() == 0 else 0
    # Keras may pause before the first batch of an epoch, which does not count.
    timing = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: watch.end(GLOBAL_BATCH) if batch else watch.begin()
    )
    fitted = model.fit(data, epochs=epochs, callbacks=[*callbacks, warmup, timing], verbose=verbose)
    return fitted.history["loss"], watch.rate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train on handwritten digits with Keras")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=int, default=1, help="so many times as many filters")
    parser.add_argument("--compare", action="store_true", help="rank 0 also trains alone, first")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    arguments = parser.parse_args()
    hvd.init()
    images, labels = load()
    curves, alone_rate = {}, math.nan
    if arguments.compare and hvd.rank() == 0:
        alone = make_model(keras.optimizers.Adam(LEARNING_RATE), arguments.width)
        whole = Share(images[TEST_IMAGES:], labels[TEST_IMAGES:], 0, 1)
        curves["1 rank, alone"], alone_rate = train(alone, whole, arguments.epochs, [])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(LEARNING_RATE))
    model = make_model(optimizer, arguments.width)
    callbacks = [hvd.callbacks.MetricAverageCallback()]
    callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    if hvd.rank() == 0:
        arguments.output.mkdir(parents=True, exist_ok=True)
    share = Share(images[TEST_IMAGES:], labels[TEST_IMAGES:], hvd.rank(), hvd.size())
    together = f"{hvd.size()} rank(s), hvdlite"
    curves[together], rate = train(model, share, arguments.epochs, callbacks)
    if hvd.rank() == 0:
        model.save(arguments.output / "digits.keras")  # once, so that no rank waits for it
        (arguments.output / "keras_loss.json").write_text(json.dumps(curves))
        accuracy = model.evaluate(images[:TEST_IMAGES], labels[:TEST_IMAGES], verbose=0)[1]
        print(f"test accuracy {accuracy:.1%} with Keras on {keras.backend.backend()}")
        print(report(rate, hvd.size(), hvd.local_size(), alone_rate))
