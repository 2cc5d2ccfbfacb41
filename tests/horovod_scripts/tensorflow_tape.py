"""A loop with tf.GradientTape: shared variables, and a variable that is a rank's own."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

DOMAINS, BATCH = 2, 12  # sample i is of domain i % DOMAINS, and of rank i % size

hvd.init()
inputs = np.random.default_rng(8).normal(size=(5, BATCH, 3)).astype("float32")
targets = inputs.sum(axis=2, keepdims=True) + np.arange(BATCH)[:, None] % DOMAINS
mine = slice(hvd.rank(), None, hvd.size())
domains = np.arange(BATCH)[mine] % DOMAINS
here = [domain for domain in range(DOMAINS) if domain in domains]
place = tf.constant([here.index(domain) for domain in domains])

shared = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
shared.set_weights([np.full((3, 1), 0.1 + hvd.rank()), np.zeros(1)])
offsets = tf.Variable(tf.zeros([len(here), 1]))  # of the domains whose samples this rank has
hvd.broadcast_variables(shared.variables, root_rank=0)
optimizer = tf.keras.optimizers.SGD(0.1)


@tf.function
def train(batch, wanted):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((shared(batch) + tf.gather(offsets, place) - wanted) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(offsets)
    variables = [*shared.trainable_variables, offsets]
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return hvd.allreduce(loss, op=hvd.Average)


for batch, wanted in zip(inputs, targets):
    loss = train(tf.constant(batch[mine]), tf.constant(wanted[mine], tf.float32))
    if hvd.rank() == 0:
        print("loss", float(loss))
