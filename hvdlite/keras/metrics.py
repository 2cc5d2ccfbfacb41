"""The metrics of all ranks together, each rank weighted by its number of samples."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras

from hvdlite.keras.arrays import exchange
from hvdlite.ops import next_name
from hvdlite.process_sets import ProcessSet, member_id


class MetricAverage:
    """Averages logs over the ranks, weighted by the number of samples of each rank's metrics."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._weights: dict[str, float] = {}

    def forget(self) -> None:
        """Drop the sample counts."""
        self._weights = {}

    def count(self, model: Any, prefix: str = "") -> None:
        """Keep the sample counts of the model's metrics, before it resets them."""
        for name, metric in _named_metrics(model):
            if hasattr(metric, "total") and hasattr(metric, "count"):
                count = float(keras.ops.convert_to_numpy(metric.count))
                # The logs have this prefix, "val_", after validation.
                self._weights[prefix + name] = count

    def average(self, logs: dict[str, Any], name: str) -> None:
        """Average numbers, in place; all members call it, and get metrics that only others have."""
        mine = {
            key: [float(value), self._weight_of(key)]
            for key, value in logs.items()
            if isinstance(value, int | float) or getattr(value, "shape", None) == ()
        }
        everyone = exchange(mine, name, self._process_set)
        for key in sorted({key for one in everyone for key in one}):
            logs[key] = _average([one[key] for one in everyone if key in one])

    def _weight_of(self, key: str) -> float:
        loss = "val_loss" if key.startswith("val_") else "loss"
        return self._weights.get(key, self._weights.get(loss, 1.0))


class AveragedEvaluate:
    """Makes one call of `evaluate` return the metrics of all ranks together."""

    # Callbacks see a copy of the metrics that `evaluate` returns, so they cannot change these. But
    # after its last batch `evaluate` calls the model's `get_metrics_result()`, as each batch does.
    # Until `evaluate` ends, this class replaces that method on this one model; outside of a batch
    # the replacement returns averages.

    def __init__(self, model: Any, process_set: ProcessSet) -> None:
        self._model = model
        self._process_set = process_set
        self._in_batch = False
        self._own: Callable[[], dict[str, Any]] = model.get_metrics_result
        model.get_metrics_result = self._result

    def enter_batch(self) -> None:
        """Note that a batch begins."""
        self._in_batch = True

    def leave_batch(self) -> None:
        """Note that the batch has ended."""
        self._in_batch = False

    def end(self) -> None:
        """Give the model its own method back."""
        if self._model.__dict__.get("get_metrics_result") == self._result:
            del self._model.get_metrics_result

    def _result(self) -> dict[str, Any]:
        logs = self._own()
        if not self._in_batch:
            logs = dict(logs)
            average = MetricAverage(self._process_set)
            average.count(self._model)
            average.average(logs, next_name("keras.evaluate", member_id(self._process_set)))
        return logs


def _named_metrics(model: Any) -> Iterator[tuple[str, Any]]:
    """List the metrics of a model with their names in the logs."""
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
            vars(metric)["result"] = functools.partial(_itself, metric)
        return dict(compiled.result())
    finally:
        for metric in metrics:
            vars(metric).pop("result", None)


def _itself(metric: Any) -> Any:
    return metric


def _average(parts: list[list[float]]) -> float:
    values = [value for value, _ in parts]
    total = math.fsum(weight for _, weight in parts)
    if len(set(values)) == 1 or total == 0:
        return values[0]
    return math.fsum(value * weight for value, weight in parts) / total
