"""What is different for objects of Keras 2, the package `tf_keras`.

`backend` imports this module when the first object of that package turns up, never before.

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
from hvdlite.keras.gradients import Distributed, GradientReduction, make_distributed
from hvdlite.keras.on_tensorflow import allreduce_gradients as allreduce_gradients
from hvdlite.keras.on_tensorflow import collective_errors as collective_errors
from hvdlite.keras.on_tensorflow import refuse_strategy as refuse_strategy
from hvdlite.keras.on_tensorflow import scale_gradient as scale_gradient
from hvdlite.tensorflow.tracing import traced_as_it_is

_Legacy: Any = tf_keras.optimizers.legacy.Optimizer
_Schedule: Any = tf_keras.optimizers.schedules.LearningRateSchedule

# Objects of these classes can be distributed.
Optimizer: Any = (tf_keras.optimizers.Optimizer, _Legacy)


class _Reduces(Distributed):
    """The methods that `DistributedOptimizer` adds to the class of an optimizer of Keras 2."""

    @traced_as_it_is
    def aggregate_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]]
    ) -> list[tuple[Any, Any]]:
        reduction = self._require_reduction()
        accumulator = reduction.accumulator
        if accumulator is not None and not accumulator.built:
            raise ArgumentError(
                f"backward_passes_per_step={accumulator.passes} does not work with the loss "
                "scaling of tf_keras; leave it out, or use Keras 3"
            )
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        gradients = [gradient for gradient, _ in pairs]
        reduced = reduction.reduce(gradients, _indices(reduction, variables), variables)
        return list(zip(reduced, variables, strict=True))

    _aggregate_gradients = aggregate_gradients  # its name in `tf_keras.optimizers.legacy`

    @traced_as_it_is
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **options: Any
    ) -> Any:
        # Options that skip Keras' own aggregation of gradients also skip the reduction over ranks.
        reduction = self._require_reduction()
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        known = len(reduction.seen)
        indices = _indices(reduction, variables)  # Variables without a gradient have one, too.
        apply_plain = super().apply_gradients  # type: ignore[misc]
        accumulator = reduction.accumulator
        if accumulator is None:
            return apply_plain(pairs, *args, **options)
        if accumulator.built and len(reduction.seen) > known:
            raise ArgumentError(
                "with backward_passes_per_step an optimizer of tf_keras accumulates gradients for "
                "the variables of its first step only; use another optimizer for the others"
            )
        accumulator.build([key.deref() for key in reduction.seen])

        def apply_sums(sums: list[Any]) -> None:
            apply_plain(list(zip(sums, variables, strict=True)), *args, **options)

        accumulator.add([gradient for gradient, _ in pairs], indices, then=apply_sums)
        return self.iterations  # type: ignore[attr-defined]


def _indices(reduction: GradientReduction, variables: Iterable[Any]) -> list[int]:
    """Number variables in the order in which they are first seen."""
    return [reduction.seen.setdefault(one.ref(), len(reduction.seen)) for one in variables]


def distribute_optimizer(optimizer: Any, reduction: GradientReduction) -> None:
    """Make an optimizer of Keras 2 distributed; a `LossScaleOptimizer` around it still scales."""
    accumulator = reduction.accumulator
    if accumulator is not None and keras.backend.backend() != "tensorflow":
        raise ArgumentError(
            f"backward_passes_per_step={accumulator.passes} with an optimizer of tf_keras needs "
            "KERAS_BACKEND=tensorflow"
        )
    make_distributed(getattr(optimizer, "inner_optimizer", optimizer), _Reduces, reduction)


def optimizer_variables(optimizer: Any, trainable: Sequence[Any]) -> list[Any]:
    """List the variables of an optimizer; build it first, for these variables of its model."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, _Legacy):
        inner._create_all_weights(trainable)
    else:
        inner.build(trainable)
    return list(inner.variables())


def check_rate(optimizer: Any) -> None:
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
