"""Elastic training with Keras: `hvd.elastic.run`, `KerasState`, and callbacks that keep it.

`fit` fixes the number of steps of an epoch before it calls callbacks. A function that is called
again in the middle of an epoch therefore gives `fit` the steps that are left, one epoch at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from hvdlite import elastic
from hvdlite.elastic import history
from hvdlite.elastic.state import State, VariableState
from hvdlite.errors import ArgumentError
from hvdlite.keras.arrays import broadcast_variables
from hvdlite.keras.backend import backend_adapter, keras_2, optimizer_variables
from hvdlite.keras.fit import Callback, Logs
from hvdlite.keras.gradients import Accumulator, distributed_part
from hvdlite.objects import broadcast_object

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "history",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function elastic; see `hvdlite.elastic.run`.

    The first argument of `func` is a state. The result takes and returns the same.

    Example:
        >>> @hvd.elastic.run
        ... def train(state):
        ...     model.fit(data, callbacks=[hvd.elastic.CommitStateCallback(state)])
    """

    @functools.wraps(func)
    def translated(state: State, *args: Any, **kwargs: Any) -> Any:
        adapter = keras_2(getattr(state, "model", None)) or backend_adapter()
        with adapter.collective_errors():
            return func(state, *args, **kwargs)

    return elastic.run(translated)


class KerasState(VariableState):
    """A model, its optimizer and plain objects of an elastic job.

    Args:
        model: a built model of Keras 3 or of Keras 2.
        optimizer: its optimizer, if it is not the one of `compile`. It is built here, so that
            a rank that joins has all variables that the other ranks have.
        kwargs: further attributes; they travel pickled.

    Raises:
        ArgumentError: the model is not built, or a value cannot be pickled.

    Example:
        >>> state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ArgumentError(
                f"{type(self).__name__} saves a model's weights, and this model has none yet; "
                "build it first: give it an Input, or call model.build(input_shape)"
            )
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        super().__init__(lambda one: np.asarray(keras.ops.convert_to_numpy(one)), **kwargs)

    def restore(self) -> None:
        """Go back to the last `save`: weights, states of random seeds, optimizer and attributes."""
        if self._accumulator is not None:
            self._accumulator.clear()  # Its variables may be newer than the last `save`.
        super().restore()

    def _layout(self) -> dict[str, str]:
        passes = 1 if self._accumulator is None else self._accumulator.passes
        variables = {
            f"{part} {i}": f"{keras.backend.standardize_dtype(one.dtype)} {list(one.shape)}"
            for part, variables in self._parts().items()
            for i, one in enumerate(variables)
        }
        return {**variables, "backward_passes_per_step": str(passes)}

    def _sync_tensors(self) -> None:
        # Each rank keeps its own states of random seeds and the gradients that it has accumulated.
        for variables in self._parts().values():
            broadcast_variables(variables, root_rank=0)
        if self._accumulator is not None:
            count = broadcast_object(self._accumulator.count, root_rank=0)
            if count != self._accumulator.count:  # This rank joins.
                self._accumulator.clear(count)

    def _parts(self) -> dict[str, list[Any]]:
        return {
            "weight": list(self.model.weights),
            "optimizer variable": optimizer_variables(self.optimizer, self.model),
        }

    def _variables(self) -> list[Any]:
        sums = [] if self._accumulator is None else self._accumulator.variables
        return [*self.model.variables, *optimizer_variables(self.optimizer, self.model), *sums]

    @property
    def _accumulator(self) -> Accumulator | None:
        part = distributed_part(self.optimizer)
        return None if part is None else part._reduction.accumulator


class TensorFlowKerasState(KerasState):
    """`KerasState` under the name that Horovod has for it in `horovod.tensorflow.elastic`.

    Arguments as for `KerasState`; `backend` has no effect.

    Example:
        >>> state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(model, optimizer, **kwargs)


class CommitStateCallback(Callback):
    """Commits the state every so many batches, and at the end of each epoch.

    It commits before the next batch (or epoch) begins, when all other callbacks have seen the end
    of the last one. So the order of the callbacks does not matter.

    Args:
        state: what is committed.
        batches_per_commit: how many batches there are from one commit to the next. A commit
            copies model and optimizer; what is not committed is lost only in a failure that
            the remaining ranks cannot redo.

    Raises:
        ArgumentError: `batches_per_commit` is not a positive number.

    Example:
        >>> model.fit(data, callbacks=[hvd.elastic.CommitStateCallback(state, 10)])
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ArgumentError(
                f"batches_per_commit={batches_per_commit}: there is at least one batch between "
                "two commits"
            )
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._batches = 0  # since the last commit

    def commit(self) -> None:
        """Commit the state; a subclass may do more."""
        self.state.commit()

    def on_train_begin(self, logs: Logs = None) -> None:
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._batches += 1

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._batches = self.batches_per_commit  # A commit is due.

    def _commit_if_due(self, number: Any = None, logs: Logs = None) -> None:
        if self._batches >= self.batches_per_commit:
            self._batches = 0
            self.commit()

    on_epoch_begin = on_train_batch_begin = on_train_end = _commit_if_due


class UpdateBatchStateCallback(Callback):
    """Keeps in `state.batch` how many batches of the epoch are done; 0 at the end of the epoch.

    `state` has that attribute already.
    `fit` has fixed the number of steps before callbacks are called, so this callback cannot shorten
    the epoch in which a function is called again. Give `fit` what is left:
    `steps_per_epoch=steps - state.batch`.

    Example:
        >>> state = hvd.elastic.KerasState(model, batch=0)
        >>> model.fit(data, callbacks=[hvd.elastic.UpdateBatchStateCallback(state)])
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state: Any = _with_attribute(state, "batch", self)
        self._before = 0  # batches of the epoch before `fit`

    def on_train_begin(self, logs: Logs = None) -> None:
        self._before = self.state.batch  # from an earlier call of the function

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.batch = self._before = 0


class UpdateEpochStateCallback(Callback):
    """Keeps in `state.epoch` how many epochs are done, in all calls of `fit` together.

    `state` has that attribute already.

    Example:
        >>> state = hvd.elastic.KerasState(model, epoch=0)
        >>> model.fit(
        ...     data,
        ...     epochs=10 - state.epoch,
        ...     callbacks=[hvd.elastic.UpdateEpochStateCallback(state)],
        ... )
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state: Any = _with_attribute(state, "epoch", self)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.epoch += 1


def _with_attribute(state: State, name: str, callback: Callback) -> State:
    if not hasattr(state, name):
        raise ArgumentError(
            f"{type(callback).__name__} keeps its count in state.{name}; make the state with "
            f"{name}=0"
        )
    return state
