"""Callbacks that change the learning rate from batch to batch: a number or a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hvdlite import basics
from hvdlite.errors import ArgumentError
from hvdlite.keras.backend import keras_2
from hvdlite.keras.fit import Callback, Logs
from hvdlite.optimizers import subclass_in_place

_Schedule: Any = keras.optimizers.schedules.LearningRateSchedule


class LearningRateScheduleCallback(Callback):
    """Multiplies the learning rate during some epochs.

    If the optimizer has a `LearningRateSchedule`, that is multiplied instead of `initial_lr`.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a number, or a function that maps the epoch (with a fraction, unless
            `staircase`) to a number.
        start_epoch: the first epoch in which this callback acts.
        end_epoch: the first epoch in which it no longer acts.
        staircase: set the rate once per epoch, rather than before each batch.
        momentum_correction: scale the velocities of SGD along with the rate.
        steps_per_epoch: batches per epoch; needed without `staircase` if Keras does not
            know their number.

    Example:
        >>> rate = 0.01 * hvd.size()
        >>> decay = hvd.callbacks.LearningRateScheduleCallback(rate, lambda epoch: 0.9**epoch)
    """

    def __init__(
        self,
        initial_lr: float | None,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        if not callable(multiplier):
            constant = float(multiplier)
            staircase, multiplier = True, lambda epoch: constant
        self.staircase = staircase
        self.multiplier = multiplier
        self.current_epoch = 0
        self._optimizer: Any = None
        self._factor: Any = None  # It multiplies the optimizer's schedule; None: it has a number.

    def set_model(self, model: Any) -> None:
        """Prepare the optimizer's learning rate, before `fit` traces the optimizer."""
        super().set_model(model)
        if model is None or model.optimizer is None:
            return
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        self._optimizer, self._factor = optimizer, None
        older = keras_2(optimizer)
        decides = getattr(optimizer, "_learning_rate", None)
        if isinstance(decides, _Schedule):  # It is multiplied itself; `initial_lr` has no effect.
            if not isinstance(decides, _Scaled):
                decides._factor = keras.Variable(
                    1.0, trainable=False, name="hvdlite_learning_rate_factor"
                )
                subclass_in_place(decides, _Scaled)
                model.train_function = None  # It may have been traced without the factor.
            self._factor = decides._factor
        elif older is not None:
            older.check_rate(optimizer)
        elif not isinstance(decides, keras.Variable):
            raise ArgumentError(
                f"the learning rate of this {type(optimizer).__name__} is neither a number "
                "nor a LearningRateSchedule, and cannot be changed by a callback"
            )
        if self._factor is None and self.initial_lr is None:
            raise ArgumentError("give initial_lr, the learning rate that is multiplied")

    def on_train_begin(self, logs: Logs = None) -> None:
        if self.staircase or self.steps_per_epoch is not None:
            return
        self.steps_per_epoch = self.params.get("steps")
        if self.steps_per_epoch is None:
            raise ArgumentError(
                f"{type(self).__name__} needs steps_per_epoch: this data does not tell how many "
                "batches it has"
            )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        begun = self.current_epoch >= self.start_epoch
        over = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self._optimizer is None or not begun or over or (self.staircase and batch > 0):
            return
        fraction = 0.0 if self.staircase else batch / (self.steps_per_epoch or 1)
        self._multiply(self.multiplier(self.current_epoch + fraction))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None and self._optimizer is not None:
            logs["learning_rate"] = self._rate()

    def _multiply(self, multiplier: float) -> None:
        """Set the rate to `multiplier` times the initial rate, or the schedule's rate."""
        before = self._rate()
        if self._factor is not None:
            self._factor.assign(multiplier)
        elif self.initial_lr is not None:
            self._optimizer.learning_rate = self.initial_lr * multiplier
        after = self._rate()
        if self.momentum_correction and before > 0 and after != before:
            # Velocities of SGD hold gradients times the old rate (Goyal et al. 2017, section 2.3).
            for velocity in self._velocities():
                velocity.assign(velocity * (after / before))

    def _velocities(self) -> list[Any]:
        if not self.model.built:
            return []  # The first batch makes them.
        older = keras_2(self._optimizer)
        if older is not None:
            return list(older.velocities(self._optimizer, self.model.trainable_variables))
        return [one for one in getattr(self._optimizer, "momentums", ()) if one is not None]

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from that of one rank to that of all, over the first epochs.

    The rate grows linearly from `initial_lr / size` to `initial_lr`, as in Goyal et al. 2017,
    "Accurate, Large Minibatch SGD", section 2.2.

    Args:
        initial_lr: the learning rate after the warm-up, that of all ranks.
        warmup_epochs: the number of epochs that the warm-up takes.
        momentum_correction: scale the velocities of SGD along with the rate.
        steps_per_epoch: batches per epoch, if Keras does not know their number.
        verbose: 1 prints a line when the warm-up is over.

    Example:
        >>> rate = 0.01 * hvd.size()
        >>> warmup = hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=3)
    """

    def __init__(
        self,
        initial_lr: float | None,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # It is one batch ahead, so that the last batch of the last epoch has the whole rate.
            done = (epoch + 1 / (self.steps_per_epoch or 1)) / warmup_epochs
            return (1 + done * (basics.size() - 1)) / basics.size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and self._optimizer is not None and epoch + 1 == self.end_epoch:
            print(f"epoch {epoch + 1}: warmed up; the learning rate is {self._rate():g}")


class _Scaled(_Schedule):  # type: ignore[misc]
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
