"""TensorFlow 1: a graph, a MonitoredTrainingSession with hooks, checkpoints on rank 0."""

import tempfile

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

BATCH, STEPS = 12, 6

tf.compat.v1.disable_eager_execution()
hvd.init()
data = np.random.default_rng(4).normal(size=(STEPS, BATCH, 3))
inputs = tf.compat.v1.placeholder(tf.float64, [None, 3])
targets = tf.reduce_sum(inputs**2, axis=1, keepdims=True)
start = tf.compat.v1.random_normal_initializer(seed=3 + hvd.rank())
if hvd.rank() == 0:
    start = tf.compat.v1.constant_initializer(0.3)
weight = tf.compat.v1.get_variable("weight", [3, 1], tf.float64, start)
bias = tf.compat.v1.get_variable("bias", [1], tf.float64, start)
loss = tf.reduce_mean((tf.matmul(inputs, weight) + bias - targets) ** 2)

step = tf.compat.v1.train.get_or_create_global_step()
optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.AdamOptimizer(0.1))
train = optimizer.minimize(loss, global_step=step)
average = hvd.allreduce(loss, name="loss")
hooks = [
    hvd.BroadcastGlobalVariablesHook(0),
    tf.compat.v1.train.StopAtStepHook(last_step=STEPS),
]

with (
    tempfile.TemporaryDirectory() as folder,
    tf.compat.v1.train.MonitoredTrainingSession(
        checkpoint_dir=folder if hvd.rank() == 0 else None, hooks=hooks
    ) as session,
):
    for batch in data:
        mine = {inputs: batch[hvd.rank() :: hvd.size()]}
        value, _ = session.run([average, train], mine)
        if hvd.rank() == 0:
            print("loss", value)
