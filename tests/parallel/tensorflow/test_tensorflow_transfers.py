"""Sends between two ranks on TensorFlow tensors: values, gradients, and misuse.

Each scenario runs eagerly and in a tf.function.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from parallel.scenarios import make_tests, on_hosts
from parallel.tensorflow.tensorflow_worlds import ENVIRONMENT, hvd, run_scenarios, same, tf

pytestmark = pytest.mark.long

PRELOAD = ("tensorflow",)
Form = Callable[[Callable[..., Any]], Callable[..., Any]]
DTYPES = ["uint8", "int64", "bool", "float16", "float32", "complex64"]


def raises(kind: Any, text: str) -> pytest.RaisesExc[Exception]:
    return pytest.raises(kind, match=text)


def scenario_every_pair_and_dtype(form: Form) -> None:
    for (source, to), dtype in itertools.product(
        itertools.permutations(range(hvd.size()), 2), DTYPES
    ):
        expected = tf.cast(tf.range(12), dtype)
        if hvd.rank() == source:
            sent = form(lambda x, to=to, dtype=dtype: hvd.send(x, to, name=f"pair.{dtype}"))
            assert float(sent(expected)) == 0
        elif hvd.rank() == to:
            receive = form(lambda x, p=source, dtype=dtype: hvd.recv(x, p, name=f"pair.{dtype}"))
            result = receive(tf.zeros([3, 4], dtype))
            assert result.dtype == expected.dtype
            assert bool(tf.reduce_all(tf.reshape(result, [-1]) == expected))


def scenario_a_function_sends_although_it_drops_the_result(form: Form) -> None:
    def pass_on(x: Any) -> Any:
        if hvd.rank() == 0:
            hvd.send(x + 1, to=1, tag=3)
            return x
        return hvd.recv(x, source=0, tag=3)

    run = form(pass_on)
    for step in range(5):
        if hvd.rank() < 2:
            assert same(run(tf.fill([1000], float(step))), step + hvd.rank())


def scenario_several_transfers_of_one_function(form: Form) -> None:
    def first(x: Any) -> Any:
        for part in range(4):
            hvd.send(x * part, to=1)
        return x

    def second(x: Any) -> Any:
        return tf.stack([hvd.recv(x, source=0) for _ in range(4)])

    if hvd.rank() < 2:
        result = form([first, second][hvd.rank()])(tf.fill([10], 2.0))
        if hvd.rank() == 1:
            assert same(result[:, 0], tf.constant([0.0, 2.0, 4.0, 6.0], tf.float64))


def scenario_two_stages_have_the_gradients_of_one_process(form: Form) -> None:
    x = tf.constant([[1.0, 2.0], [3.0, -1.0]])
    one, two = tf.constant([[0.5, -1.0], [2.0, 0.25]]), tf.constant([[1.0], [-2.0]])
    with tf.GradientTape() as tape:
        tape.watch([one, two])
        loss = tf.reduce_sum(tf.square(tf.tanh(x @ one) @ two))
    expected = tape.gradient(loss, [one, two])

    def first(weight: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weight)
            sent = hvd.send(tf.tanh(x @ weight), to=1, tag=7)
        return tape.gradient(sent, weight)

    def second(weight: Any) -> Any:
        place = tf.zeros([2, 2])
        with tf.GradientTape() as tape:
            tape.watch([weight, place])
            loss = tf.reduce_sum(tf.square(hvd.recv(place, source=0, tag=7) @ weight))
        gradient, _ = tape.gradient(loss, [weight, place])
        return gradient

    if hvd.rank() < 2:
        stage = form([first, second][hvd.rank()])
        for _ in range(3):
            gradient = stage([one, two][hvd.rank()])
            assert same(gradient, tf.cast(expected[hvd.rank()], tf.float64), 1e-5)


def scenario_mismatch_is_an_error_on_both_and_the_world_goes_on(form: Form) -> None:
    if hvd.rank() == 0:
        send = form(lambda x: hvd.send(x, to=1, name="odd"))
        with raises(tf.errors.FailedPreconditionError, "about the number of elements: rank "):
            send(tf.zeros([3]))
        send(tf.zeros([4]))
    elif hvd.rank() == 1:
        receive = form(lambda x: hvd.recv(x, source=0, name="odd"))
        with raises(tf.errors.FailedPreconditionError, "about the number of elements: rank "):
            receive(tf.zeros([4]))
        receive(tf.zeros([4]))


def scenario_misuse_says_what_to_do(form: Form) -> None:
    with raises(tf.errors.InvalidArgumentError, "a rank does not send to itself; copy the tensor"):
        form(lambda x: hvd.send(x, hvd.rank(), name="own"))(tf.zeros([2]))
    with raises(hvd.ArgumentError, "send '.*' cannot be compiled by XLA; use jit_compile=False"):
        tf.function(lambda x: hvd.send(x, 1), jit_compile=True)(tf.zeros([2]))


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_transfers = make_tests(body, on_hosts([0, 0], [0, 1, 1]), env=ENVIRONMENT)
