"""Elastic training with Keras on TensorFlow in which a rank dies, and another one joins."""

import os
import signal
import time

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf

EPOCHS, STEPS, RANKS, LEARNING_RATE = 3, 10, 2, 0.02

hvd.init()
keras.utils.set_random_seed(3 + hvd.rank())
inputs = np.random.default_rng(1).normal(size=(64, 5)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((inputs, inputs.sum(axis=1, keepdims=True)))
dataset = dataset.repeat().shuffle(64, seed=hvd.rank()).batch(8)
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8), keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(LEARNING_RATE * hvd.size()))
model.compile(loss="mse", optimizer=optimizer)
worlds = []


class Accident(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.05)
        if state.epoch == 1 and batch == 3 and os.environ["HVDLITE_WORKER"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)


def on_state_reset():
    model.optimizer.learning_rate = LEARNING_RATE * hvd.size()
    model.fit(dataset, steps_per_epoch=1, verbose=0)  # with the ranks that join


state = hvd.elastic.KerasState(model, batch=0, epoch=0, losses=[])
state.register_reset_callbacks([on_state_reset])
callbacks = [
    Accident(),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
]


@hvd.elastic.run
def train(state):
    worlds.append(hvd.size())
    while state.epoch < EPOCHS or worlds[-1] < RANKS:
        steps = STEPS - state.batch
        history = model.fit(
            dataset, steps_per_epoch=steps, epochs=1, callbacks=callbacks, verbose=0
        ).history
        state.losses.append(history["loss"][0])


train(state)
weights = hvd.allgather(np.concatenate([one.ravel() for one in model.get_weights()])[None])
if hvd.rank() == 0:
    assert state.losses[-1] < 0.3 * state.losses[0], state.losses
    assert (np.asarray(weights) == np.asarray(weights)[0]).all(), weights
    rate = float(model.optimizer.learning_rate.numpy())
    print(f"trained on {hvd.size()} ranks, rate {rate:.2f}")
