"""Train a Keras network on handwritten digits while ranks die, join and leave, on either backend.

    hvdlite-run -np 3 --min-np 2 python examples/keras_elastic.py
    KERAS_BACKEND=torch hvdlite-run -np 3 --min-np 2 python examples/keras_elastic.py

Kill ranks while it runs (`kill -9 PID`; --verbose shows the numbers). Whenever the function under
hvd.elastic.run is called again, the rest of the epoch is divided among the ranks that there are
then, so the global batch stays the same.
"""

import argparse
import time

import keras
import numpy as np
from keras_digits import LEARNING_RATE, TEST_IMAGES, Share, load, make_model  # beside this file

import hvdlite.keras as hvd

BATCHES_PER_COMMIT = 5


class Rest(Share):
    """This rank's share of the batches that are left of an epoch."""

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, state: hvd.elastic.KerasState
    ) -> None:
        super().__init__(images, labels, hvd.rank(), hvd.size())
        self.epoch, self.done = state.epoch, state.batch

    def __len__(self) -> int:
        return super().__len__() - self.done

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return super().__getitem__(self.done + index)


@hvd.elastic.run
def train(
    state: hvd.elastic.KerasState, images: np.ndarray, labels: np.ndarray, epochs: int, pause: float
) -> None:
    """Train from where the state is; hvdlite calls this again when ranks have joined or left."""
    callbacks = [
        hvd.callbacks.MetricAverageCallback(),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(pause)),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, BATCHES_PER_COMMIT),  # Ranks may join here.
    ]
    while state.epoch < epochs:
        if hvd.rank() == 0:
            print(f"epoch {state.epoch} from batch {state.batch} on {hvd.size()} ranks")
        rest, verbose = Rest(images, labels, state), 2 if hvd.rank() == 0 else 0
        state.model.fit(rest, callbacks=callbacks, verbose=verbose)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train on handwritten digits, elastically")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--pause", type=float, default=0, help="seconds to sleep in each step")
    options = parser.parse_args()
    hvd.init()
    images, labels = load()
    model = make_model(hvd.DistributedOptimizer(keras.optimizers.Adam(LEARNING_RATE)))
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    train(state, images[TEST_IMAGES:], labels[TEST_IMAGES:], options.epochs, options.pause)
    if hvd.rank() == 0:
        accuracy = model.evaluate(images[:TEST_IMAGES], labels[:TEST_IMAGES], verbose=0)[1]
        print(f"test accuracy {accuracy:.1%} with Keras on {keras.backend.backend()}")
