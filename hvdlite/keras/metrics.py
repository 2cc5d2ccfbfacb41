"""`MetricAverageCallback`: the metrics of all ranks, each weighted by its number of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import keras

from hvdlite.keras.arrays import allreduce_buffers, exchange
from hvdlite.keras.fit import Callback, Logs, agree_on_end_of_epoch, begin_fit, numbers_in
from hvdlite.ops import next_name
from hvdlite.process_sets import ProcessSet, global_process_set, member_id


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

    def _implements_test_batch_hooks(self) -> bool:
        return True


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
        logs[key] = _average([one[key] for one in everyone if key in one])


def _average(parts: list[list[float]]) -> float:
    values = [value for value, _ in parts]
    total = math.fsum(weight for _, weight in parts)
    if len(set(values)) == 1 or total == 0:
        return values[0]
    return math.fsum(value * weight for value, weight in parts) / total
