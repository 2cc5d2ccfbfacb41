"""Train a small Keras network on handwritten digits, on any number of ranks and either backend.

    python examples/keras_digits.py
    hvdlite-run -np 2 python examples/keras_digits.py
    KERAS_BACKEND=torch hvdlite-run -np 2 python examples/keras_digits.py

It is the script for one device, plus two lines. The batch is that of all ranks, and so the losses
are the same on any number of them; demo-output keeps them. With --width 4 a step has more to
compute, as in larger models.
"""

import argparse
import time
from pathlib import Path

import keras
import numpy as np
from results import Result, save, sentence  # beside this file
from sklearn.datasets import load_digits

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


class Timing(keras.callbacks.Callback):
    """Measures how long the batches of each epoch take, without what Keras does before them."""

    seconds: list[float]

    def on_train_begin(self, logs: dict | None = None) -> None:
        self.seconds = []

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        if batch == 0:
            self.seconds.append(-time.perf_counter())

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.seconds[-1] += time.perf_counter()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train on handwritten digits with Keras")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=int, default=1, help="so many times as many filters")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    arguments = parser.parse_args()
    hvd.init()  # 1
    images, labels = load()
    model = hvd.distribute(make_model(arguments.width))  # 2
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    arguments.output.mkdir(parents=True, exist_ok=True)
    timing, saving = Timing(), keras.callbacks.ModelCheckpoint(arguments.output / "digits.keras")
    training = images[TEST_IMAGES:], labels[TEST_IMAGES:]
    fitted = model.fit(
        *training, BATCH, arguments.epochs, shuffle=False, callbacks=[timing, saving]
    )
    accuracy = model.evaluate(images[:TEST_IMAGES], labels[:TEST_IMAGES], verbose=0)[1]
    if hvd.rank() == 0:
        result = Result(hvd.size(), fitted.history["loss"], timing.seconds, accuracy)
        name = f"keras-{keras.backend.backend()}-{arguments.width}"
        results = save(result, arguments.output, name)
        print(f"Keras on {keras.backend.backend()}: {sentence(result, results)}")
