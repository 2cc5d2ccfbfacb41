"""Changes the learning rate of an optimizer from batch to batch: a number or a schedule."""

from __future__ import annotations

from typing import Any

import keras

from hvdlite.errors import ArgumentError
from hvdlite.keras.backend import keras_2
from hvdlite.optimizers import subclass_in_place

Schedule: Any = keras.optimizers.schedules.LearningRateSchedule


class _Scaled(Schedule):  # type: ignore[misc]
    """Put before the class of a schedule, to multiply the rate that it returns."""

    # As with optimizers, the schedule's `__class__` stays the class that files name.

    _wrapped_class: Any
    _factor: Any

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._wrapped_class

    def __call__(self, step: Any) -> Any:
        rate = super().__call__(step)
        return keras.ops.multiply(rate, keras.ops.cast(self._factor, rate.dtype))


class LearningRate:
    """The learning rate of a model's optimizer, multiplied."""

    def __init__(self, model: Any, initial_rate: float | None) -> None:
        """Find the number or the schedule that decides the rate; raise if neither does."""
        optimizer = model.optimizer
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self._initial_rate = initial_rate
        self._model = model
        self._older = keras_2(self._optimizer)
        decides = getattr(self._optimizer, "_learning_rate", None)
        # A schedule is multiplied itself; `initial_rate` then does not count.
        self._factor: Any = None
        if isinstance(decides, Schedule):
            self._factor = self._factor_of(decides, model)
        elif self._older is not None:
            self._older.check_rate(self._optimizer)
        elif not isinstance(decides, keras.Variable):
            raise ArgumentError(
                f"the learning rate of this {type(self._optimizer).__name__} is neither a number "
                "nor a LearningRateSchedule, and cannot be changed by a callback"
            )
        if self._factor is None and initial_rate is None:
            raise ArgumentError("give initial_lr, the learning rate that is multiplied")

    @staticmethod
    def _factor_of(schedule: Any, model: Any) -> Any:
        if not isinstance(schedule, _Scaled):
            factor = keras.Variable(1.0, trainable=False, name="hvdlite_learning_rate_factor")
            schedule._factor = factor
            subclass_in_place(schedule, _Scaled)
            model.train_function = None  # It may have been traced without the factor.
        return schedule._factor

    def multiply(self, multiplier: float, correct_momentum: bool) -> None:
        """Set the rate to `multiplier` times the initial rate, or the schedule's rate."""
        before = self.value()
        if self._factor is not None:
            self._factor.assign(multiplier)
        elif self._initial_rate is not None:
            self._optimizer.learning_rate = self._initial_rate * multiplier
        after = self.value()
        if correct_momentum and before > 0 and after != before:
            # Velocities of SGD hold gradients times the old rate (Goyal et al. 2017, section 2.3).
            for velocity in self._velocities():
                velocity.assign(velocity * (after / before))

    def _velocities(self) -> list[Any]:
        if not self._model.built:
            return []  # The first batch makes them.
        if self._older is not None:
            return list(self._older.velocities(self._optimizer, self._model.trainable_variables))
        return [one for one in getattr(self._optimizer, "momentums", ()) if one is not None]

    def value(self) -> float:
        """Return the rate that the next batch gets."""
        return float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))
