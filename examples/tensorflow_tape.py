"""Train a small convolutional network on handwritten digits in a custom TensorFlow loop.

    hvdlite-run -np 2 python examples/tensorflow_tape.py

The global batch is the same on any number of ranks, and so is the loss.
"""

import argparse
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from results import Result, sentence  # beside this file
from sklearn.datasets import load_digits

import hvdlite.tensorflow as hvd

GLOBAL_BATCH = 48  # of all ranks together: for 1, 2, 3, 4, 6... ranks
TEST_IMAGES = 357  # of 1,797


def load() -> tuple[np.ndarray, np.ndarray]:
    """Load the images (8x8 pixels) and their digits, shuffled in the same way everywhere."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = digits.images.astype("float32")[..., np.newaxis] / 16
    return images[order], digits.target[order]


def make_model() -> keras.Model:
    keras.utils.set_random_seed(hvd.rank())  # Ranks begin differently, until rank 0 broadcasts.
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def make_step(
    model: keras.Model, optimizer: keras.optimizers.Optimizer
) -> Callable[[np.ndarray, np.ndarray], tf.Tensor]:
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return hvd.allreduce(loss, name="loss")

    return step


def train(model: keras.Model, epochs: int) -> list[float]:
    """Train on this rank's share of each global batch; return the seconds that each epoch took."""
    images, labels = (part[TEST_IMAGES:] for part in load())
    steps_per_epoch = -(-len(images) // GLOBAL_BATCH)
    rate = keras.optimizers.schedules.CosineDecay(4e-3, epochs * steps_per_epoch)
    optimizer = keras.optimizers.Adam(rate)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.weights, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
    step = make_step(model, optimizer)
    seconds = []
    for epoch in range(epochs):
        began = time.perf_counter()
        shuffled = np.random.default_rng(epoch).permutation(len(images))
        losses = []
        for begin in range(0, len(shuffled), GLOBAL_BATCH):
            mine = shuffled[begin : begin + GLOBAL_BATCH][hvd.rank() :: hvd.size()]
            losses.append(step(images[mine], labels[mine]))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}", flush=True)
        seconds.append(time.perf_counter() - began)
    return seconds


def accuracy(model: keras.Model) -> float:
    """Return the share of the test images that the model recognises."""
    images, labels = (part[:TEST_IMAGES] for part in load())
    return float(np.mean(np.argmax(model(images), axis=1) == labels))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train on handwritten digits")
    parser.add_argument("--epochs", type=int, default=15)
    arguments = parser.parse_args()
    hvd.init()
    model = make_model()
    seconds = train(model, arguments.epochs)
    if hvd.rank() == 0:
        result = Result(hvd.size(), [], seconds, accuracy(model))
        print(sentence(result, [result]))
