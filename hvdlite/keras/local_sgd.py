"""`LocalSGDCallback`: ranks train on their own, and average their variables from time to time."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdlite.errors import ArgumentError
from hvdlite.keras.arrays import broadcast_variables
from hvdlite.keras.fit import Callback, Logs, begin_fit
from hvdlite.keras.gradients import wire_name_over
from hvdlite.numpy import mean_of_arrays
from hvdlite.ops import next_name
from hvdlite.process_sets import ProcessSet, global_process_set, member_id


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
