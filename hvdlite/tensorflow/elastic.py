"""Elastic training with TensorFlow: `hvd.elastic.run` and `TensorFlowState`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import elastic
from hvdlite.elastic import history
from hvdlite.elastic.state import VariableState
from hvdlite.errors import ArgumentError, UnsupportedError
from hvdlite.tensorflow.functions import broadcast_variables
from hvdlite.tensorflow.library import collective_errors

__all__ = ["TensorFlowState", "history", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function elastic; see `hvdlite.elastic.run`.

    The first argument of `func` is a state. The result takes and returns the same.

    Example:
        >>> @hvd.elastic.run
        ... def train(state):
        ...     for state.step in range(state.step, 1000):
        ...         train_one_step()
        ...         state.commit()
    """
    return elastic.run(collective_errors()(func))


class TensorFlowState(VariableState):
    """Variables and plain objects of an elastic job.

    Args:
        variables: the same ones in the same order on all ranks.
        session: only None is accepted: states work eagerly.
        kwargs: further attributes; they travel pickled.

    Raises:
        UnsupportedError: a session, or it is made in a function.
        ArgumentError: no variables; or a value cannot be pickled.

    Example:
        >>> state = hvd.elastic.TensorFlowState([*model.weights, *optimizer.variables], step=0)
    """

    def __init__(
        self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        if session is not None or not tf.executing_eagerly():
            raise UnsupportedError("TensorFlowState works eagerly, without a session")
        if variables is None:
            raise ArgumentError(
                "TensorFlow 2 has no global variables; give TensorFlowState those of the training: "
                "[*model.weights, *optimizer.variables]"
            )
        self.variables = list(variables)
        super().__init__(lambda one: np.asarray(one.numpy()), **kwargs)

    def _variables(self) -> list[Any]:
        return self.variables

    def _layout(self) -> dict[str, str]:
        return {
            f"variable {i}": f"{variable.dtype} {list(variable.shape)}"
            for i, variable in enumerate(self.variables)
        }

    def _sync_tensors(self) -> None:
        broadcast_variables(self.variables, root_rank=0)


def __getattr__(name: str) -> Any:
    """Import the state of Keras models at its first use: TensorFlow does not need Keras."""
    if name == "TensorFlowKerasState":
        return importlib.import_module("hvdlite.keras.elastic").TensorFlowKerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
