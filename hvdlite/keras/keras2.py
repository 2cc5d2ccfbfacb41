"""The adapter of hvdlite.keras for objects of Keras 2, the package `tf_keras`.

`hvdlite.keras.backend` imports it when the first object of that package turns up, never before.

Keras 2 has two families of optimizers. In both, one method receives the gradients before they are
clipped. `LossScaleOptimizer` calls that method of its inner optimizer before it looks for
infinities, so that all ranks decide alike whether to skip the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
import tf_keras

from hvdlite.errors import ArgumentError
from hvdlite.keras.gradients import Distributed, Distribution, distribute
from hvdlite.keras.on_tensorflow import (
    allreduce_gradients,
    collective_errors,
    refuse_strategy,
    scale_gradient,
)
from hvdlite.tensorflow.tracing import traced_as_it_is

__all__ = [
    "Optimizer",
    "allreduce_gradients",
    "collective_errors",
    "refuse_strategy",
    "scale_gradient",
]

_Legacy: Any = tf_keras.optimizers.legacy.Optimizer
_LossScaling: Any = tf_keras.mixed_precision.LossScaleOptimizer
_Schedule: Any = tf_keras.optimizers.schedules.LearningRateSchedule

# Objects of these classes can be distributed.
Optimizer: Any = (tf_keras.optimizers.Optimizer, _Legacy)


class _Positions:
    """Numbers variables in the order in which they are first seen."""

    def __init__(self) -> None:
        self._index_of: dict[Any, int] = {}
        self.variables: list[Any] = []

    def of(self, variables: Iterable[Any]) -> list[int]:
        """Return the indices of variables; a new variable gets the next index."""
        indices = []
        for variable in variables:
            key = variable.ref()
            if key not in self._index_of:
                self._index_of[key] = len(self.variables)
                self.variables.append(variable)
            indices.append(self._index_of[key])
        return indices


class _Reduces(Distributed):
    """The code that both families share."""

    _positions: _Positions

    @traced_as_it_is
    def _reduce(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        distribution = self._require_distribution()
        accumulator = distribution.accumulator
        if accumulator is not None and not accumulator.built:
            raise ArgumentError(
                f"backward_passes_per_step={accumulator.passes} does not work with the loss "
                "scaling of tf_keras; leave it out, or use Keras 3"
            )
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        indices = self._positions.of(variables)
        gradients = [gradient for gradient, _ in pairs]
        reduced = distribution.reduce(gradients, indices, variables)
        return list(zip(reduced, variables, strict=True))

    @traced_as_it_is
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **options: Any
    ) -> Any:
        """Reduce the gradients over all ranks, then update the variables with them."""
        # Options that skip Keras' own aggregation of gradients also skip the reduction over ranks.
        distribution = self._require_distribution()
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        known = len(self._positions.variables)
        indices = self._positions.of(variables)  # Variables without a gradient have one, too.
        apply_plain = super().apply_gradients  # type: ignore[misc]
        accumulator = distribution.accumulator
        if accumulator is None:
            return apply_plain(pairs, *args, **options)
        if accumulator.built and len(self._positions.variables) > known:
            raise ArgumentError(
                "with backward_passes_per_step an optimizer of tf_keras accumulates gradients for "
                "the variables of its first step only; use another optimizer for the others"
            )
        accumulator.build(self._positions.variables)

        def apply_sums(sums: list[Any]) -> None:
            apply_plain(list(zip(sums, variables, strict=True)), *args, **options)

        accumulator.add([gradient for gradient, _ in pairs], indices, then=apply_sums)
        return self.iterations  # type: ignore[attr-defined]


class _New(_Reduces):
    """The optimizers of `tf_keras.optimizers`."""

    def aggregate_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        """Reduce over all ranks."""
        return self._reduce(grads_and_vars)


class _Old(_Reduces):
    """The optimizers of `tf_keras.optimizers.legacy`."""

    def _aggregate_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        return self._reduce(grads_and_vars)


def distribute_optimizer(optimizer: Any, distribution: Distribution) -> None:
    """Make an optimizer of Keras 2 distributed; a `LossScaleOptimizer` around it still scales."""
    accumulator = distribution.accumulator
    if accumulator is not None and keras.backend.backend() != "tensorflow":
        raise ArgumentError(
            f"backward_passes_per_step={accumulator.passes} with an optimizer of tf_keras needs "
            "KERAS_BACKEND=tensorflow"
        )
    if isinstance(optimizer, _LossScaling):
        optimizer = optimizer.inner_optimizer
    vars(optimizer)["_positions"] = _Positions()
    distribute(optimizer, _Old if isinstance(optimizer, _Legacy) else _New, distribution)


def optimizer_variables(optimizer: Any, trainable: Sequence[Any]) -> list[Any]:
    """List the variables of an optimizer; build it first, for these variables of its model."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, _Legacy):
        inner._create_all_weights(trainable)
    else:
        inner.build(trainable)
    return list(inner.variables())


def check_rate(optimizer: Any) -> None:
    """Raise an ArgumentError if the learning rate is a schedule, which a callback cannot set."""
    rate = optimizer.learning_rate if isinstance(optimizer, _Legacy) else optimizer._learning_rate
    if isinstance(rate, _Schedule):
        raise ArgumentError(
            f"the learning rate of this {type(optimizer).__name__} is a {type(rate).__name__} of "
            "tf_keras, which callbacks cannot multiply; give the optimizer a number"
        )


def velocities(optimizer: Any, trainable: Sequence[Any]) -> list[tf.Variable]:
    """List the variables that hold gradients times the learning rate: the momentum of SGD."""
    if isinstance(optimizer, tf_keras.optimizers.legacy.SGD):
        # There is no momentum, or no step was made.
        if "momentum" not in optimizer.get_slot_names():
            return []
        return [optimizer.get_slot(variable, "momentum") for variable in trainable]
    if isinstance(optimizer, tf_keras.optimizers.SGD):
        return list(getattr(optimizer, "momentums", ()))
    return []
