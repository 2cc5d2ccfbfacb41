"""tf.GradientTape loops: shared variables, and variables that are a rank's own."""

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


def register_local_source():
    """Keep each domain's offset on the rank that has its samples."""
    shared = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    shared.set_weights([np.full((3, 1), 0.1 + hvd.rank()), np.zeros(1)])
    offsets = tf.Variable(tf.zeros([len(here), 1]))
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

    return train


def local_layers():
    """Keep a layer of each domain on the rank that has its samples."""
    first = tf.keras.layers.Dense(4, "tanh", kernel_initializer="ones")
    experts = [tf.keras.layers.Dense(1, kernel_initializer="ones") for _ in here]
    first.build((None, 3))
    for expert in experts:
        expert.build((None, 4))
    optimizer = tf.keras.optimizers.SGD(0.1)

    @tf.function
    def train(batch, wanted):
        with tf.GradientTape() as tape:
            hidden = first(batch)
            outputs = tf.stack([expert(hidden) for expert in experts])  # [experts, samples, 1]
            chosen = tf.gather(tf.transpose(outputs, [1, 0, 2]), place, batch_dims=1)
            loss = tf.reduce_mean((chosen - wanted) ** 2)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=experts)
        variables = [v for layer in (first, *experts) for v in layer.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return hvd.allreduce(loss, op=hvd.Average)

    return train


for make in (register_local_source, local_layers):
    train = make()
    for batch, wanted in zip(inputs, targets):
        loss = train(tf.constant(batch[mine]), tf.constant(wanted[mine], tf.float32))
        if hvd.rank() == 0:
            print("loss", float(loss))
