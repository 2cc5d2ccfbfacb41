"""Callbacks for `model.fit` on several ranks.

Example:
    >>> model.fit(inputs, labels, callbacks=[
    ...     hvd.callbacks.MetricAverageCallback(),
    ...     hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    ... ])
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras

from hvdlite import basics, stop
from hvdlite.errors import ArgumentError
from hvdlite.keras import fit
from hvdlite.keras.arrays import allreduce_buffers, broadcast_variables
from hvdlite.keras.backend import optimizer_variables
from hvdlite.keras.fit import (
    Callback,
    HasBatchHooks,
    Logs,
    ReductionCheck,
    agree_on_end_of_epoch,
    begin_fit,
    check_of,
    warn_of_own_models,
)
from hvdlite.keras.learning_rate import LearningRate
from hvdlite.keras.local_sgd import LocalSGDCallback
from hvdlite.keras.metrics import AveragedEvaluate, MetricAverage
from hvdlite.process_sets import ProcessSet, check_root, global_process_set
from hvdlite.rendezvous.environment import EXIT_STOPPED

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LocalSGDCallback",
    "MetricAverageCallback",
    "StopCallback",
]


class _ChecksReductions(Callback):
    """Raises if `fit` updated the variables without a reduction of the gradients."""

    # It checks the first step of each epoch only, because the check waits for the GPU. Before the
    # very first step it warns if ranks begin with different weights, or if the optimizer is not
    # distributed. With HVDLITE_CHECK_REPLICAS it raises when ranks do not have the same weights any
    # more.

    process_set: ProcessSet
    _check: ReductionCheck | None = None

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Read the counts before the first step."""
        warn_of_own_models(self.model, self.params, self.process_set, batch)
        check = check_of(self)
        if check is not None:
            check.begin_batch(self.model, self.process_set)
        if batch == 0:
            self._check = ReductionCheck(self.model.optimizer)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Compare the counts after the first step."""
        if self._check is not None:
            self._check.check(steps=batch + 1)
            self._check = None
        check = check_of(self)
        if check is not None:
            check.end_batch(self.process_set)


class BroadcastGlobalVariablesCallback(_ChecksReductions):
    """Makes all ranks begin with one rank's weights and optimizer state.

    It broadcasts before the first batch if every rank's model is built by then, and otherwise after
    it. Each rank keeps its own states of random seeds. The callback also compares the numbers of
    batches and epochs, if they are known beforehand, and raises on every rank if they differ.

    Example:
        >>> model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    """

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        local_variables: Any = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Choose the rank.

        Args:
            root_rank: the rank whose values all receive.
            device: ignored; scripts written for Horovod may pass it.
            local_variables: variables of the model that each rank keeps as they are.
            process_set: its members get the same values; by default all ranks.
        """
        super().__init__()
        self.local_variables = [] if local_variables is None else list(local_variables)
        self.process_set = process_set
        self.root_rank = root_rank
        self.broadcast_done = False

    def on_train_begin(self, logs: Logs = None) -> None:
        """Broadcast if every rank's model is built already."""
        check_root(self.root_rank, self.process_set)
        self.broadcast_done = False
        everyone = begin_fit(self, built=bool(self.model.built))
        if all(one["built"] for one in everyone):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcast after the first batch, which has built the model."""
        super().on_train_batch_end(batch, logs)
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        shared = [one for one in self.model.weights if not self._is_local(one)]
        variables = [*shared, *optimizer_variables(self.model)]
        broadcast_variables(variables, self.root_rank, self.process_set)
        self.broadcast_done = True

    def _is_local(self, variable: Any) -> bool:
        return any(variable is one for one in self.local_variables)


class MetricAverageCallback(_ChecksReductions):
    """Replaces each epoch's metrics by those of all ranks together.

    Put it first: callbacks after it (and the history) see the averages. It also raises an error in
    `fit` if a rank's epoch has fewer batches than another's. Each rank is weighted by its number of
    samples, also for metrics that are not means over samples (an AUC, for example). As a callback
    of `evaluate`, it makes `evaluate` return the averages; then every rank must call `evaluate`.

    Example:
        >>> model.fit(data, callbacks=[hvd.callbacks.MetricAverageCallback(), early_stopping])
        >>> model.evaluate(test_data, callbacks=[hvd.callbacks.MetricAverageCallback()])
    """

    def __init__(
        self,
        device: str = "",
        process_set: ProcessSet = global_process_set,
        average_buffers: bool = False,
    ) -> None:
        """Choose the ranks whose metrics are averaged.

        Args:
            device: ignored; scripts written for Horovod may pass it.
            process_set: the metrics of its members are averaged; by default all ranks.
            average_buffers: also call `hvd.allreduce_buffers(model)` when the batches of an epoch
                are done, before validation: batch normalization then has the same moving
                statistics on every rank, in validation and in saved models.
        """
        super().__init__()
        self.process_set = process_set
        self.average_buffers = average_buffers
        self._metrics = MetricAverage(process_set)
        self._prefix = ""  # The counted metrics have this prefix.
        self._batches = 0
        self._fits = False
        self._evaluate: AveragedEvaluate | None = None

    def set_model(self, model: Any) -> None:
        """Prepare for a call of `fit` or `evaluate`, which may follow one that raised."""
        super().set_model(model)
        self._fits = False
        self._end_evaluate()

    def on_train_begin(self, logs: Logs = None) -> None:
        """Compare the numbers of batches and epochs; raise if they differ."""
        self._fits = True
        begin_fit(self, epochs=True)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Forget the epoch before."""
        self._metrics.forget()
        self._prefix = ""
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Count the batches."""
        super().on_train_batch_end(batch, logs)
        self._batches = batch + 1

    def on_test_begin(self, logs: Logs = None) -> None:
        """Keep the counts of training: validation starts over with the same metrics."""
        if self._fits:
            self._end_of_batches()
            self._prefix = "val_"
        else:
            self._evaluate = AveragedEvaluate(self.model, self.process_set)

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Give the batch its own rank's metrics."""
        if self._evaluate is not None:
            self._evaluate.enter_batch()

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Average the metrics that are read from here on."""
        if self._evaluate is not None:
            self._evaluate.leave_batch()

    def on_test_end(self, logs: Logs = None) -> None:
        """Keep the counts of validation."""
        if self._fits:
            self._metrics.count(self.model, self._prefix)
        self._end_evaluate()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Average the logs, in place; raise if another rank's epoch has not ended."""
        if not self._prefix:
            self._end_of_batches()
        if logs is not None:
            self._metrics.average(logs, f"#keras.end_of_epoch.{epoch}")

    def _end_of_batches(self) -> None:
        """Compare, count and average after the last batch of training, before any validation."""
        agree_on_end_of_epoch(self.model.optimizer, self._batches)
        self._metrics.count(self.model)
        if self.average_buffers:
            allreduce_buffers(self.model, self.process_set)

    def _end_evaluate(self) -> None:
        if self._evaluate is not None:
            self._evaluate.end()
            self._evaluate = None

    def _implements_test_batch_hooks(self) -> bool:
        return True


class LearningRateScheduleCallback(Callback):
    """Multiplies the learning rate during some epochs.

    If the optimizer has a `LearningRateSchedule`, that is multiplied instead of `initial_lr`.

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
        """Choose the epochs and the multiplier.

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
        """
        super().__init__()
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.staircase = staircase
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            constant = float(multiplier)
            self.multiplier = lambda epoch: constant
            self.staircase = True
        self.current_epoch = 0
        self._rate: LearningRate | None = None

    def set_model(self, model: Any) -> None:
        """Prepare the optimizer's learning rate, before `fit` traces the optimizer."""
        super().set_model(model)
        if model is not None and model.optimizer is not None:
            self._rate = LearningRate(model, self.initial_lr)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Read the number of batches per epoch."""
        if self.staircase or self.steps_per_epoch is not None:
            return
        self.steps_per_epoch = self.params.get("steps")
        if self.steps_per_epoch is None:
            raise ArgumentError(
                f"{type(self).__name__} needs steps_per_epoch: this data does not tell how many "
                "batches it has"
            )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Remember the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the rate of this batch."""
        begun = self.current_epoch >= self.start_epoch
        over = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self._rate is None or not begun or over or (self.staircase and batch > 0):
            return
        fraction = 0.0 if self.staircase else batch / (self.steps_per_epoch or 1)
        multiplier = self.multiplier(self.current_epoch + fraction)
        self._rate.multiply(multiplier, self.momentum_correction)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Log the rate."""
        if logs is not None and self._rate is not None:
            logs["learning_rate"] = self._rate.value()


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from that of one rank to that of all, over the first epochs.

    The rate grows linearly from `initial_lr / size` to `initial_lr`, as in Goyal et al. 2017,
    "Accurate, Large Minibatch SGD", section 2.2.

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
        """Choose the length of the warm-up.

        Args:
            initial_lr: the learning rate after the warm-up, that of all ranks.
            warmup_epochs: the number of epochs that the warm-up takes.
            momentum_correction: scale the velocities of SGD along with the rate.
            steps_per_epoch: batches per epoch, if Keras does not know their number.
            verbose: 1 prints a line when the warm-up is over.
        """

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
        """Log the rate, and say when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and self._rate is not None and epoch + 1 == self.end_epoch:
            print(f"epoch {epoch + 1}: warmed up; the learning rate is {self._rate.value():g}")


class BestModelCheckpoint(HasBatchHooks, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the model when it is the best so far, on rank 0 only.

    After `MetricAverageCallback` in the list of callbacks, it judges the metrics of all ranks.

    Example:
        >>> best = hvd.callbacks.BestModelCheckpoint("best.keras", monitor="val_accuracy")
    """

    def __init__(
        self,
        filepath: Any,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        **options: Any,
    ) -> None:
        """Choose the file, and the metric that decides.

        Args:
            filepath: as for `keras.callbacks.ModelCheckpoint`, like all other arguments.
            monitor: the metric.
            verbose: 1 prints a line for each file.
            mode: "min", "max" or "auto".
            save_freq: "epoch", or a number of batches.
            options: further arguments of `keras.callbacks.ModelCheckpoint`.
        """
        options.setdefault("save_best_only", True)
        super().__init__(
            filepath, monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq, **options
        )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Save after this many batches, on rank 0."""
        if basics.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Save after an epoch, on rank 0."""
        if basics.rank() == 0:
            super().on_epoch_end(epoch, logs)


class StopCallback(fit.Callback):
    """Saves, and ends every rank after the same batch, when a rank was asked to stop.

    A rank is asked to stop by a signal; see `hvd.stop_on`. The callback watches for SIGTERM and
    SIGUSR1 unless the script has called `hvd.stop_on` itself. Put it last: what comes before it has
    seen the batch.

    Example:
        >>> def save():
        ...     if hvd.rank() == 0:
        ...         model.save("last.keras")
        >>> model.fit(data, callbacks=[hvd.callbacks.StopCallback(save)])
    """

    def __init__(self, save: Callable[[], object], every: int = 1) -> None:
        """Choose what to do before the end.

        Args:
            save: a function without arguments; every rank calls it after the same batch.
            every: ask after so many batches; see `hvd.stop_requested`.
        """
        super().__init__()
        self.save = save
        self.every = every
        self._epoch = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Watch for signals."""
        if not stop.watched():
            stop.stop_on()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Remember the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Save, and exit with `hvd.EXIT_STOPPED`, if a rank was asked to stop."""
        reason = stop.stop_requested(self.every)
        if reason is None:
            return
        if basics.rank() == 0:
            where = f"batch {batch} of epoch {self._epoch}"
            print(f"hvdlite: stopping after {where} ({reason})", file=sys.stderr)
        self.save()
        raise SystemExit(EXIT_STOPPED)
