"""HVDLITE_CHECK_FINITE names the rank whose own gradients have a NaN first, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from harness import RankResult, run_world
from parallel.keras.keras_worlds import environment
from parallel.scenarios import Later

PRELOAD = ("keras", "tensorflow")

keras: Any = Later("keras")
np: Any = Later("numpy")
tf: Any = Later("tensorflow")
torch: Any = Later("torch")

BAD = 3  # the step in which rank 1 has a NaN
FOUND = rf"rank 1: '[\w.]+' has a NaN or an infinity in step {BAD}"


def torch_step() -> Callable[[float], object]:
    import hvdlite.torch as hvd

    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())

    def step(value: float) -> None:
        optimizer.zero_grad()
        model(torch.full((1, 2), value)).sum().backward()
        optimizer.step()

    return step


def keras_step() -> Callable[[float], object]:
    import hvdlite.keras as hvd

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    return lambda value: model.train_on_batch(np.full((1, 2), value), np.zeros((1, 1)))


def tape_step(jit_compile: bool) -> Callable[[float], object]:
    import hvdlite.tensorflow as hvd

    variable = tf.Variable([1.0, 2.0])

    def step(value: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * value)
        (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [variable])
        variable.assign_sub(0.1 * gradient)

    run = tf.function(step, jit_compile=jit_compile)
    return lambda value: run(tf.constant(value))


STEPS: dict[str, tuple[str, Callable[[], Callable[[float], object]]]] = {
    "torch": ("torch", torch_step),
    "keras on tensorflow": ("tensorflow", keras_step),
    "tape in a graph": ("tensorflow", lambda: tape_step(jit_compile=False)),
    "tape in XLA": ("tensorflow", lambda: tape_step(jit_compile=True)),
}


def train(adapter: str) -> tuple[str, list[Any]]:
    """Train six steps; return what ended them, and the events of NaN on this rank."""
    from hvdlite import basics

    basics.init()
    engine, error = basics.engine(), ""
    try:
        step = STEPS[adapter][1]()
        for number in range(1, 7):
            step(float("nan") if number == BAD and basics.rank() == 1 else 1.0)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    found = [event for event in engine.live()["events"] if event[1] == "nonfinite"]
    basics.shutdown()
    return error, found


def run(adapter: str, level: int) -> list[RankResult]:
    env = {**environment(STEPS[adapter][0]), "HVDLITE_CHECK_FINITE": str(level)}
    return run_world(2, train, adapter, env=env)


@pytest.mark.parametrize("adapter", list(STEPS)[:-1])
def test_rank_with_the_nan_ends_the_job(adapter: str) -> None:
    other, guilty = (result.value for result in run(adapter, 1))
    assert re.search(FOUND, guilty[0]), guilty
    assert guilty[0].startswith("HvdliteError" if adapter == "torch" else "UnknownError")
    assert [(rank, bool(re.fullmatch(FOUND, text))) for _, _, rank, _, text in guilty[1]] == [
        (1, True)
    ]
    assert other[0] and "NaN" not in other[0] and not other[1], other


def test_2_warns_once_and_goes_on() -> None:
    other, guilty = run("torch", 2)
    assert guilty.value[0] == other.value[0] == ""
    assert re.findall(r"(?m)^hvdlite \[1\] warning: (.*)$", guilty.stderr) == [
        event[4] for event in guilty.value[1][:1]
    ]
    assert re.fullmatch(FOUND, guilty.value[1][0][4])
    assert "NaN" not in other.stderr and not other.value[1], "it only received the NaN"


def test_xla_is_refused() -> None:
    for result in run("tape in XLA", 1):
        assert "use jit_compile=False" in result.value[0]
