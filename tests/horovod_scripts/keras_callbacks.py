"""`fit` with the callbacks that Horovod's scripts for Keras have."""

import horovod.tensorflow.keras as hvd
import keras
import numpy as np

BATCH, EPOCHS, WARMUP, RATE = 12, 5, 2, 0.2

hvd.init()
keras.utils.set_random_seed(6)
inputs = np.random.default_rng(1).normal(size=(48, 5)).astype("float32")
labels = (inputs.sum(axis=1) > 0).astype("float32")[:, None]
checks = np.random.default_rng(2).normal(size=(24, 5)).astype("float32")
answers = (checks.sum(axis=1) > 0).astype("float32")[:, None]
mine = slice(hvd.rank(), None, hvd.size())

keras.utils.set_random_seed(20 + hvd.rank())
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
if hvd.rank() == 0:
    values = np.random.default_rng(3)
    model.set_weights([values.normal(size=one.shape) * 0.4 for one in model.weights])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=0.9))
model.compile(
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    optimizer=optimizer,
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
)


def rates_of_two_ranks(epoch):
    """What the warm-up of two ranks does, for one process that shall do the same."""
    done = (epoch + BATCH / len(inputs)) / WARMUP
    return (1 + done) / 2


if hvd.size() == 1:
    warmup = hvd.callbacks.LearningRateScheduleCallback(
        RATE, rates_of_two_ranks, end_epoch=WARMUP, staircase=False
    )
else:
    warmup = hvd.callbacks.LearningRateWarmupCallback(RATE, warmup_epochs=WARMUP, verbose=0)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    warmup,
    hvd.callbacks.LearningRateScheduleCallback(RATE, multiplier=0.1, start_epoch=4),
]
history = model.fit(
    inputs[mine],
    labels[mine],
    batch_size=BATCH // hvd.size(),
    epochs=EPOCHS,
    shuffle=False,
    validation_data=(checks[mine], answers[mine]),
    callbacks=callbacks,
    verbose=0,
).history
score = hvd.allreduce(np.array(model.evaluate(checks[mine], answers[mine], verbose=0)))
if hvd.rank() == 0:
    for row in zip(history["loss"], history["val_loss"], history["accuracy"]):
        print("loss", *row)
    print("loss", *score)
