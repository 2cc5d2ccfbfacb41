"""`hvd.callbacks`: callbacks for `model.fit` on several ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from hvdlite import basics, stop
from hvdlite.errors import ArgumentError
from hvdlite.keras.arrays import allreduce_buffers, broadcast_variables, exchange
from hvdlite.keras.backend import keras_2, optimizer_variables
from hvdlite.keras.fit import (
    Callback,
    HasBatchHooks,
    Logs,
    agree_on_end_of_epoch,
    begin_fit,
    numbers_in,
)
from hvdlite.keras.gradients import wire_name_over
from hvdlite.numpy import mean_of_arrays
from hvdlite.ops import next_name
from hvdlite.optimizers import subclass_in_place
from hvdlite.process_sets import ProcessSet, check_root, global_process_set, member_id
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


class BroadcastGlobalVariablesCallback(Callback):
    """Makes all ranks begin with one rank's weights and optimizer state.

    It broadcasts before the first batch if every rank's model is built by then, and otherwise after
    it. Each rank keeps its own states of random seeds. The callback also compares the numbers of
    batches and epochs, if they are known beforehand, and raises on every rank if they differ.

    Args:
        root_rank: the rank whose values all receive.
        device: ignored; scripts written for Horovod may pass it.
        local_variables: variables of the model that each rank keeps as they are.
        process_set: its members get the same values; by default all ranks.

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
        super().__init__()
        self.local_variables = [] if local_variables is None else list(local_variables)
        self.process_set = process_set
        self.root_rank = root_rank
        self.broadcast_done = False

    def on_train_begin(self, logs: Logs = None) -> None:
        check_root(self.root_rank, self.process_set)
        self.broadcast_done = False
        everyone = begin_fit(self, built=bool(self.model.built))
        if all(one["built"] for one in everyone):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self.broadcast_done:  # The first batch has built the model.
            self._broadcast()

    def _broadcast(self) -> None:
        shared = [
            one
            for one in self.model.weights
            if not any(one is local for local in self.local_variables)
        ]
        variables = [*shared, *optimizer_variables(self.model.optimizer, self.model)]
        broadcast_variables(variables, self.root_rank, self.process_set)
        self.broadcast_done = True


class BestModelCheckpoint(HasBatchHooks, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the model when it is the best so far, on rank 0 only.

    After `MetricAverageCallback` in the list of callbacks, it judges the metrics of all ranks.

    Args:
        filepath: as for `keras.callbacks.ModelCheckpoint`, like all other arguments.
        monitor: the metric.
        verbose: 1 prints a line for each file.
        mode: "min", "max" or "auto".
        save_freq: "epoch", or a number of batches.
        options: further arguments of `keras.callbacks.ModelCheckpoint`.

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
        options.setdefault("save_best_only", True)
        super().__init__(
            filepath, monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq, **options
        )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if basics.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if basics.rank() == 0:
            super().on_epoch_end(epoch, logs)


class StopCallback(Callback):
    """Saves, and ends every rank after the same batch, when a rank was asked to stop.

    A rank is asked to stop by a signal; see `hvd.stop_on`. The callback watches for SIGTERM and
    SIGUSR1 unless the script has called `hvd.stop_on` itself. Put it last: what comes before it has
    seen the batch.

    Args:
        save: a function without arguments; every rank calls it after the same batch.
        every: ask after so many batches; see `hvd.stop_requested`.

    Example:
        >>> def save():
        ...     if hvd.rank() == 0:
        ...         model.save("last.keras")
        >>> model.fit(data, callbacks=[hvd.callbacks.StopCallback(save)])
    """

    def __init__(self, save: Callable[[], object], every: int = 1) -> None:
        super().__init__()
        self.save = save
        self.every = every
        self._epoch = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        if not stop.watched():
            stop.stop_on()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        reason = stop.stop_requested(self.every)
        if reason is None:
            return
        if basics.rank() == 0:
            where = f"batch {batch} of epoch {self._epoch}"
            print(f"hvdlite: stopping after {where} ({reason})", file=sys.stderr)
        self.save()
        raise SystemExit(EXIT_STOPPED)


class MetricAverageCallback(Callback):
    """Replaces each epoch's metrics by those of all ranks together.

    Put it first: callbacks after it (and the history) see the averages. It also raises an error in
    `fit` if a rank's epoch has fewer batches than another's. Each rank is weighted by its number of
    samples, also for metrics that are not means over samples (an AUC, for example). As a callback
    of `evaluate`, it makes `evaluate` return the averages; then every rank must call `evaluate`.

    Args:
        device: ignored; scripts written for Horovod may pass it.
        process_set: the metrics of its members are averaged; by default all ranks.
        average_buffers: also call `hvd.allreduce_buffers(model)` when the batches of an epoch
            are done, before validation: batch normalization then has the same moving
            statistics on every rank, in validation and in saved models.

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
        super().__init__()
        self.process_set = process_set
        self.average_buffers = average_buffers
        self._weights: dict[str, float] = {}  # samples, by the names of metrics in the logs
        self._prefix = ""  # of these names: "val_" in validation
        self._batches = 0
        self._fits = False
        self._evaluate: _AveragedEvaluate | None = None

    def set_model(self, model: Any) -> None:
        """Prepare for a call of `fit` or `evaluate`, which may follow one that raised."""
        super().set_model(model)
        self._fits = False
        self._end_evaluate()

    def on_train_begin(self, logs: Logs = None) -> None:
        self._fits = True
        begin_fit(self, epochs=True)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._weights, self._prefix, self._batches = {}, "", 0

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._batches = batch + 1

    def on_test_begin(self, logs: Logs = None) -> None:
        """Keep the counts of training: validation starts over with the same metrics."""
        if self._fits:
            self._end_of_batches()
            self._prefix = "val_"
        else:
            self._evaluate = _AveragedEvaluate(self.model, self.process_set)

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self._evaluate is not None:
            self._evaluate.in_batch = True

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._evaluate is not None:
            self._evaluate.in_batch = False  # The metrics that are read from here on are averages.

    def on_test_end(self, logs: Logs = None) -> None:
        if self._fits:
            self._weights |= _samples_counted(self.model, self._prefix)
        self._end_evaluate()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Average the logs, in place; raise if another rank's epoch has not ended."""
        if not self._prefix:
            self._end_of_batches()
        if logs is not None:
            name = f"#keras.end_of_epoch.{epoch}"
            _average_logs(logs, self._weights, name, self.process_set)

    def _end_of_batches(self) -> None:
        """Compare, count and average after the last batch of training, before any validation."""
        agree_on_end_of_epoch(self.model.optimizer, self._batches)
        self._weights |= _samples_counted(self.model, "")
        if self.average_buffers:
            allreduce_buffers(self.model, self.process_set)

    def _end_evaluate(self) -> None:
        if self._evaluate is not None:
            self._evaluate.end()
            self._evaluate = None


class _AveragedEvaluate:
    """Makes one call of `evaluate` return the metrics of all ranks together."""

    # Callbacks see a copy of the metrics that `evaluate` returns, so they cannot change these. But
    # after its last batch `evaluate` calls the model's `get_metrics_result()`, as each batch does.
    # Until `evaluate` ends, this class replaces that method on this one model; outside of a batch
    # the replacement returns averages.

    def __init__(self, model: Any, process_set: ProcessSet) -> None:
        self._model = model
        self._process_set = process_set
        self.in_batch = False
        self._own: Callable[[], dict[str, Any]] = model.get_metrics_result
        model.get_metrics_result = self._result

    def end(self) -> None:
        if self._model.__dict__.get("get_metrics_result") == self._result:
            del self._model.get_metrics_result

    def _result(self) -> dict[str, Any]:
        logs = self._own()
        if not self.in_batch:
            logs = dict(logs)
            name = next_name("keras.evaluate", member_id(self._process_set))
            _average_logs(logs, _samples_counted(self._model, ""), name, self._process_set)
        return logs


def _named_metrics(model: Any) -> Iterator[tuple[str, Any]]:
    for metric in model.metrics:
        if type(metric).__name__ == "CompileMetrics" and metric.built:
            yield from _names_in(metric).items()
        else:
            yield metric.name, metric
            yield from ((inner.name, inner) for inner in getattr(metric, "metrics", ()))


def _names_in(compiled: Any) -> dict[str, Any]:
    """Return what `compile` was given, by its name in the logs, which Keras alone chooses."""
    metrics = list(compiled.metrics)
    try:
        # Several metrics may have one name. So each is made to answer with itself for a moment.
        for metric in metrics:
            vars(metric)["result"] = lambda metric=metric: metric
        return dict(compiled.result())
    finally:
        for metric in metrics:
            vars(metric).pop("result", None)


def _samples_counted(model: Any, prefix: str) -> dict[str, float]:
    """Return the sample counts of the model's metrics, by their names in the logs."""
    return {
        prefix + name: float(keras.ops.convert_to_numpy(metric.count))
        for name, metric in _named_metrics(model)
        if hasattr(metric, "total") and hasattr(metric, "count")
    }


def _average_logs(
    logs: dict[str, Any], weights: dict[str, float], name: str, process_set: ProcessSet
) -> None:
    """Average numbers, in place; all members call it, and get metrics that only others have."""

    def weight_of(key: str) -> float:
        loss = "val_loss" if key.startswith("val_") else "loss"
        return weights.get(key, weights.get(loss, 1.0))

    mine = {key: [value, weight_of(key)] for key, value in numbers_in(logs).items()}
    everyone = exchange(mine, name, process_set)
    for key in sorted({key for one in everyone for key in one}):
        logs[key] = _weighted_mean([one[key] for one in everyone if key in one])


def _weighted_mean(parts: list[list[float]]) -> float:
    values = [value for value, _ in parts]
    total = math.fsum(weight for _, weight in parts)
    if len(set(values)) == 1 or total == 0:
        return values[0]
    return math.fsum(value * weight for value, weight in parts) / total


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


class LocalSGDCallback(Callback):
    """Averages the trainable variables of all ranks after every so many batches.

    The model has a plain optimizer. Before the first batch all ranks get the variables of the first
    rank; the model must be built by then. Every rank has the same number of batches. The callback
    also averages before validation and after each epoch, so put it before callbacks that save.
    Local SGD: Stich, ICLR 2019; with outer_lr=0.7 and outer_momentum=0.9 it is DiLoCo (Douillard et
    al., 2023).

    Args:
        every: the number of batches between two averages; of executions if the model is
            compiled with steps_per_execution.
        outer_lr: the learning rate of the outer optimizer; 1 makes a plain average.
        outer_momentum: its Nesterov momentum.
        process_set: its members average; by default all ranks.

    Raises:
        ArgumentError: a number cannot be used.

    Example:
        >>> model.compile(optimizer="sgd", loss="mse")
        >>> model.fit(data, callbacks=[hvd.callbacks.LocalSGDCallback(every=16)])
    """

    def __init__(
        self,
        every: int = 16,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        if not (every >= 1 and outer_lr > 0.0 and 0.0 <= outer_momentum < 1.0):
            raise ArgumentError(
                f"LocalSGDCallback(every={every!r}, outer_lr={outer_lr!r}, outer_momentum="
                f"{outer_momentum!r}): every is 1 or more, outer_lr a positive number, and "
                "outer_momentum at least 0 and less than 1"
            )
        self.every = every
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.process_set = process_set
        self._batches = 0
        self._fits = False
        self._moved = False  # whether the ranks' variables may differ
        self._anchors: list[Any] = []
        self._momenta: list[Any] = []

    def on_train_begin(self, logs: Logs = None) -> None:
        if wire_name_over(self.model.optimizer, self.process_set) is not None:
            raise ArgumentError(
                "LocalSGDCallback takes a plain optimizer: a DistributedOptimizer averages the "
                "gradients of the same ranks in every batch; leave one of them out"
            )
        begin_fit(self, every=self.every, own_models=True)
        self._batches, self._fits, self._moved, self._anchors = 0, True, False, []

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Make all ranks begin with the same variables before the first batch, of a built model."""
        if self._anchors:
            return
        if not self.model.built:
            raise ArgumentError(
                "LocalSGDCallback needs a built model; give the model a keras.Input, or call "
                "model.build(input_shape) before fit()"
            )
        variables = self.model.trainable_variables
        broadcast_variables(variables, self.process_set.ranks[0], self.process_set)
        self._anchors = [_wide(variable) for variable in variables]
        self._momenta = [np.zeros_like(anchor) for anchor in self._anchors]

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._batches += 1
        self._moved = True
        if self._batches % self.every == 0:
            self._average()

    def on_test_begin(self, logs: Logs = None) -> None:
        if self._fits:
            self._average()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._average()

    def on_train_end(self, logs: Logs = None) -> None:
        self._fits, self._anchors, self._momenta = False, [], []

    def _average(self) -> None:
        if not self._moved:
            return
        self._moved = False
        variables = self.model.trainable_variables
        moves = [
            anchor - _wide(variable)
            for anchor, variable in zip(self._anchors, variables, strict=True)
        ]
        if moves:
            name = next_name("local_sgd", member_id(self.process_set))
            mean_of_arrays(moves, name, self.process_set)
        for i, (variable, mean) in enumerate(zip(variables, moves, strict=True)):
            factor = self.outer_momentum
            if factor:
                self._momenta[i] = factor * self._momenta[i] + mean
                mean = mean + factor * self._momenta[i]
            anchor = self._anchors[i] = np.asarray(self._anchors[i] - self.outer_lr * mean)
            variable.assign(anchor.astype(keras.backend.standardize_dtype(variable.dtype)))


def _wide(variable: Any) -> Any:
    """Copy a variable into an array, half precision as float32, in which changes add up."""
    array = np.array(keras.ops.convert_to_numpy(variable), order="C")
    return array if array.dtype == np.float64 else array.astype(np.float32)
