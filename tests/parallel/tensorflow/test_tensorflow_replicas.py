"""`check_replicas` of TensorFlow, and the replica check that does not reach into a tape."""

from __future__ import annotations

import warnings

import pytest

from parallel.scenarios import make_tests
from parallel.tensorflow.tensorflow_worlds import ENVIRONMENT, hvd, run_scenarios, tf

pytestmark = pytest.mark.long

PRELOAD = ("tensorflow",)


def scenario_a_flipped_bit_is_named() -> None:
    variables = [
        tf.Variable(tf.cast(tf.range(5 + i), kind), name=f"{kind.name}.{i}")
        for i, kind in enumerate([tf.float32, tf.bfloat16, tf.int64])
    ]
    hvd.check_replicas(variables)
    if hvd.rank() == 1:
        bits = tf.bitcast(variables[1], tf.uint16)
        variables[1].assign(tf.bitcast(bits ^ tf.constant([0] * 5 + [64], tf.uint16), tf.bfloat16))
    with pytest.raises(hvd.DivergenceError, match="check_replicas: 1 of 3 tensors") as caught:
        hvd.check_replicas(variables)
    assert caught.value.tensors == (variables[1].name,)
    assert caught.value.ranks == ((1,) if hvd.size() > 2 else ())


def scenario_functions_are_refused() -> None:
    variable = tf.Variable([1.0])
    with pytest.raises(hvd.ArgumentError, match="outside of tf.function"):
        tf.function(lambda: hvd.check_replicas([variable]))()


def scenario_a_tape_warns_once_that_it_is_not_compared() -> None:
    weight = tf.Variable([1.0, 2.0])

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight**2)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, [weight])
        weight.assign_sub(0.1 * gradients[0])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step()
        hvd.DistributedGradientTape(tf.GradientTape())
    said = [str(one.message) for one in caught if "CHECK_REPLICAS=2 does not" in str(one.message)]
    assert len(said) == (hvd.rank() == 0), said


def body() -> dict[str, str]:
    return run_scenarios(globals())


ENV = {**ENVIRONMENT, "HVDLITE_CHECK_REPLICAS": "2"}
test_replicas = make_tests(body, {"3": {"n": 3, "env": ENV}})
