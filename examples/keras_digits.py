"""Train a small Keras network on handwritten digits, on any number of ranks and either backend.

    hvdlite-run -np 2 python examples/keras_digits.py --compare
    KERAS_BACKEND=torch hvdlite-run -np 2 python examples/keras_digits.py

It is the script for one device, plus two lines. The batch is that of all ranks, and so the loss
curve is the same on any number of them. With --compare, rank 0 first trains alone. With --width 4
a step has more to compute, as in larger models.
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

BATCH = 48
TEST_IMAGES = 357  # of 1,797


def load() -> tuple[np.ndarray, np.ndarray]:
    """Load the images (8x8 pixels) and their digits, shuffled in the same way everywhere."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return (digits.images[order, :, :, None] / 16).astype("float32"), digits.target[order]


def make_model(width: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    convolution = {"kernel_size": 3, "padding": "same", "activation": "relu"}
    layers = [
        *(keras.Input((8, 8, 1)), keras.layers.Conv2D(16 * width, **convolution)),
        *(keras.layers.Conv2D(32 * width, **convolution), keras.layers.MaxPooling2D()),
        *(keras.layers.Flatten(), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)),
    ]
    return keras.Sequential(layers)


def train(
    model: keras.Model, data: tuple, epochs: int, callbacks: list, verbose: int | str = "auto"
) -> tuple[list, float]:
    """Train; return the loss of each epoch, and the samples per second of all ranks."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    watch = Stopwatch()
    # Keras may pause before the first batch of an epoch, which does not count.
    timing = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: watch.end(BATCH) if batch else watch.begin()
    )
    fitted = model.fit(
        *data,
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        callbacks=[*callbacks, timing],
        verbose=verbose,
    )
    return fitted.history["loss"], watch.rate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train on handwritten digits with Keras")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=int, default=1, help="so many times as many filters")
    parser.add_argument("--compare", action="store_true", help="rank 0 also trains alone, first")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    arguments = parser.parse_args()
    hvd.init()  # 1
    images, labels = load()
    training = images[TEST_IMAGES:], labels[TEST_IMAGES:]
    arguments.output.mkdir(parents=True, exist_ok=True)
    curves, alone_rate = {}, math.nan
    if arguments.compare and hvd.rank() == 0:
        alone = train(make_model(arguments.width), training, arguments.epochs, [], verbose=2)
        curves["1 rank, alone"], alone_rate = alone
    model = hvd.distribute(make_model(arguments.width))  # 2
    best = keras.callbacks.ModelCheckpoint(arguments.output / "digits.keras")
    curve, rate = train(model, training, arguments.epochs, [best])
    curves[f"{hvd.size()} rank(s), hvdlite"] = curve
    accuracy = model.evaluate(images[:TEST_IMAGES], labels[:TEST_IMAGES], verbose=0)[1]
    if hvd.rank() == 0:
        (arguments.output / "keras_loss.json").write_text(json.dumps(curves))
        print(f"test accuracy {accuracy:.1%} with Keras on {keras.backend.backend()}")
        print(report(rate, hvd.size(), hvd.local_size(), alone_rate))
