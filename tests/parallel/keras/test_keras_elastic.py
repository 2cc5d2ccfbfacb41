"""KerasState and its callbacks in fit, on both backends and with Keras 2."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest

import hvdlite.errors
from hvdlite.rendezvous.membership import Decision, install_membership, notify
from parallel.keras.keras_worlds import (
    data,
    dense_model,
    hvd,
    k2,
    keras,
    mine,
    on_backends,
    on_tensorflow,
    run_scenarios,
    same_bits,
    weights_of,
)
from parallel.scenarios import make_tests

pytestmark = pytest.mark.long

PRELOAD = ("keras", "tensorflow")
LOST = hvdlite.errors.HorovodInternalError("a rank died")
STEPS = 5
EPOCHS = 3


def compiled(package: Any, passes: int = 1) -> Any:
    model = dense_model(package=package)
    optimizer = package.optimizers.SGD(0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes)
    model.compile(optimizer=optimizer, loss="mse")
    return model


def packages() -> list[Any]:
    return [keras, k2] if on_tensorflow() else [keras]


def values(variables: Any) -> list[Any]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


def everything(state: Any) -> list[Any]:
    return values([*state.model.weights, *state._parts()["optimizer variable"]])


def fit(model: Any, **how: Any) -> None:
    inputs, targets = data(4 * hvd.size())
    repeated = (np.tile(mine(one), (STEPS, 1)) for one in (inputs, targets))
    model.fit(*repeated, batch_size=4, shuffle=False, verbose=0, **how)


def scenario_all_get_the_state_of_rank_0() -> None:
    for package in packages():
        model = compiled(package)
        if hvd.rank() == 0:
            # As in a job that trains, which the other ranks join: their optimizer is not built.
            state = hvd.elastic.KerasState(model, epoch=2)
            for variable in [*model.weights, *state._parts()["optimizer variable"]]:
                variable.assign(variable + 1)
        else:
            state = hvd.elastic.KerasState(model, epoch=0)
        state.sync()
        assert len(everything(state)) > 8
        assert same_bits(everything(state))
        assert state.epoch == 2
        before = everything(state)
        fit(model)
        after = everything(state)
        assert not np.array_equal(before[0], after[0])
        state.epoch = 3
        state.restore()
        assert all(map(np.array_equal, everything(state), before))
        assert state.epoch == 2
        fit(model)
        state.commit()
        assert all(map(np.array_equal, everything(state), after))
        assert same_bits(after)


class Boundary:
    """Lets everybody pass."""

    joiner = False

    def enter(self, restored: bool) -> Decision:
        return Decision(leave=False, sync=restored, changed=False)


class Disturbs:
    """After some of all batches, tells one rank of an update, or raises a failure on all."""

    def __init__(self, updates: dict[int, int], failure: int) -> None:
        self.batches = 0
        self._updates = updates
        self._failure = failure

    def callback(self, package: Any) -> Any:
        hook = "on_batch_end" if package is k2 else "on_train_batch_end"
        return package.callbacks.LambdaCallback(**{hook: self._disturb})

    def _disturb(self, batch: int, logs: Any) -> None:
        self.batches += 1
        if self.batches == self._failure:
            raise hvd.HorovodInternalError("a failure that cannot be redone")
        if self._updates.get(self.batches) == hvd.rank():
            notify(self.batches, removed=False)


def train(
    package: Any, commits_first: bool, disturbs: Disturbs, passes: int = 1
) -> tuple[Any, list[Any]]:
    model = compiled(package, passes)
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    calls: list[Any] = []

    @hvd.elastic.run
    def function(state: Any) -> None:
        calls.append((state.epoch, state.batch))
        while state.epoch < EPOCHS:
            callbacks = [
                hvd.elastic.CommitStateCallback(state, 2),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                disturbs.callback(package),
            ]
            if not commits_first:
                callbacks.append(callbacks.pop(0))
            fit(model, steps_per_epoch=STEPS - state.batch, callbacks=callbacks)

    function(state)
    assert (state.epoch, state.batch) == (EPOCHS, 0)
    return model, calls


def scenario_interrupted_fits_do_every_step_once() -> None:
    for package, passes in itertools.product(packages(), (1, 3)):
        undisturbed, calls = train(package, True, Disturbs({}, 0), passes)
        assert calls == [(0, 0)]
        install_membership(Boundary())
        # A fit of TensorFlow takes long, so that there either order is enough.
        orders = [(package is keras) == (passes == 1)] if on_tensorflow() else [True, False]
        for commits_first in orders:
            # Updates in the middle of an epoch, and in its last batch; then a failure one batch
            # after a commit, so that this batch is done again.
            disturbs = Disturbs({3: 0, 5: hvd.size() - 1}, failure=13)
            model, calls = train(package, commits_first, disturbs, passes)
            assert calls == [(0, 0), (0, 4), (1, 0), (2, 2)]
            assert disturbs.batches == EPOCHS * STEPS + 1
            assert int(model.optimizer.iterations) == EPOCHS * STEPS // passes
            assert all(map(np.array_equal, weights_of(model), weights_of(undisturbed)))
        install_membership(None)


def accumulating(package: Any, passes: int = 3) -> Any:
    """Make a model of one weight, and a state with its optimizer, whose steps are gradients."""
    model = package.Sequential(
        [package.layers.Input((1,)), package.layers.Dense(1, use_bias=False)]
    )
    model.layers[-1].kernel.assign([[0.0]])
    optimizer = hvd.DistributedOptimizer(
        package.optimizers.SGD(1.0), backward_passes_per_step=passes
    )
    return hvd.elastic.KerasState(model, optimizer)


def apply_ones(state: Any, times: int) -> None:
    for _ in range(times):
        variables = state.model.trainable_variables
        ones = [keras.ops.ones(variable.shape) for variable in variables]
        state.optimizer.apply_gradients(zip(ones, variables, strict=True))


def weight_of(state: Any) -> float:
    return float(values(state.model.trainable_variables)[0].item())


def scenario_ranks_that_join_update_together_with_the_others() -> None:
    for package, before in itertools.product(packages(), (0, 1)):
        state = accumulating(package)
        # A rank that joins may have sums of its own, which nobody waits for any more.
        apply_ones(state, 2 if hvd.rank() == 0 else before)
        state.sync()
        apply_ones(state, 1)  # of three ones on rank 0, and of a single one on rank 1
        assert weight_of(state) == -2
        apply_ones(state, 3)
        assert weight_of(state) == -5


def scenario_a_failed_update_leaves_no_sums() -> None:
    for package in packages():
        for saved in (0, 2):
            state = accumulating(package)
            apply_ones(state, saved)
            state.save()
            apply_ones(state, 2 - saved)
            framework = vars(state.optimizer)["_reduction"].framework
            with (
                mock.patch.object(framework, "allreduce_gradients", side_effect=LOST),
                pytest.raises(hvd.HorovodInternalError),
            ):
                apply_ones(state, 1)
            state.restore()
            state.sync()
            apply_ones(state, 2 - saved)
            assert weight_of(state) == 0
            apply_ones(state, 1)
            assert weight_of(state) == -3


def scenario_mistakes_are_named() -> None:
    with pytest.raises(hvd.ArgumentError, match=r"KerasState saves .* build it first"):
        hvd.elastic.KerasState(dense_model(built=False))
    state = hvd.elastic.KerasState(dense_model())
    with pytest.raises(hvd.ArgumentError, match=r"UpdateBatchStateCallback keeps .* batch=0"):
        hvd.elastic.UpdateBatchStateCallback(state)
    with pytest.raises(hvd.ArgumentError, match=r"UpdateEpochStateCallback keeps .* epoch=0"):
        hvd.elastic.UpdateEpochStateCallback(state)
    with pytest.raises(hvd.ArgumentError, match="batches_per_commit=0"):
        hvd.elastic.CommitStateCallback(state, 0)


def body() -> dict[str, str]:
    return run_scenarios(globals())


test_keras_elastic = make_tests(body, on_backends((2, "tensorflow"), (2, "torch")))
