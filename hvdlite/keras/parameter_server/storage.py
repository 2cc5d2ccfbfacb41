"""What a parameter server of Keras holds: variables, and an optimizer of Keras for each of them.

Every part has an optimizer of its own, so that a part whose gradient is missing stays as it is, and
so that all of an optimizer's variables belong to one part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from hvdlite.errors import ArgumentError
from hvdlite.parameter_server.division import Tensor, check_rows, check_tensors
from hvdlite.parameter_server.placement import Part
from hvdlite.parameter_server.storage import Gradient, Slot

MakeOptimizer = Callable[[], Any]


class KerasStorage:
    """One server's parts of a collection, see `hvdlite.parameter_server.storage`."""

    # The server calls one method at a time.

    def __init__(self, make_optimizer: MakeOptimizer, parts: Sequence[Part]) -> None:
        """Make a variable of zeros, and a checked optimizer, for each part of this server."""
        self._parts = list(parts)
        self._variables: list[Any] = []
        self._optimizers: list[Any] = []
        for part in parts:
            zeros: Any = np.zeros(part.shape, "float32")
            with keras.device("cpu"):
                variable = keras.Variable(zeros, dtype=part.spec.dtype, name="parameter")
                optimizer = make_optimizer()
                _check(optimizer)
                optimizer.build([variable])
            self._variables.append(variable)
            self._optimizers.append(optimizer)
        if len(parts) > 1 or any(part.servers > 1 for part in parts):
            _check_division(make_optimizer, self._parts, type(self._optimizers[0]).__name__)

    def read(self, part: int, into: memoryview) -> None:
        """Copy the values of a part."""
        into[:] = _bytes(_array(self._variables[part]))

    def write(self, part: int, values: memoryview) -> None:
        """Set the values of a part."""
        self._variables[part].assign(self._as_array(part, values, self._parts[part].shape))

    def apply(self, gradients: Sequence[Gradient]) -> None:
        """Apply one push, each gradient with its part's optimizer, or raise and change nothing."""
        dense = [self._dense(one) for one in gradients]
        with keras.device("cpu"):
            for one, gradient in zip(gradients, dense, strict=True):
                tensor = keras.ops.convert_to_tensor(gradient)
                self._optimizers[one.part].apply([tensor], [self._variables[one.part]])

    def slots(self) -> Iterator[Slot]:
        """Copy the values, and the variables of the optimizers, one by one."""
        for index, part in enumerate(self._parts):
            yield _slot(index, "", self._variables[index], part)
            for name, variable in self._states(index).items():
                yield _slot(index, name, variable, part)

    def restore(
        self, part: int, name: str, dtype: str, shape: Sequence[int], data: bytearray
    ) -> None:
        """Set what `slots` has copied; raise if the optimizer does not have such a state."""
        variable = self._states(part).get(name) if name else self._variables[part]
        if variable is None or tuple(variable.shape) != tuple(shape):
            raise ArgumentError(
                f"the checkpoint has a state {name!r} of shape {list(shape)} for tensor "
                f"{self._parts[part].spec.name!r}, and the optimizer has none: use the optimizer "
                "that wrote it, or delete the file"
            )
        variable.assign(np.frombuffer(data, dtype=np.dtype(dtype)).reshape(tuple(shape)))

    def _states(self, part: int) -> dict[str, Any]:
        """Name the optimizer's variables by their order and their own names."""
        variables = self._optimizers[part].variables
        return {f"{i}.{one.path.rpartition('/')[2]}": one for i, one in enumerate(variables)}

    def _own_rows(self, part: int, rows: memoryview) -> Any:
        of = self._parts[part]
        own = np.frombuffer(rows, np.int64) - of.first
        if own.size and not (own.min() >= 0 and own.max() < of.rows):
            raise ArgumentError(
                f"rows of {of.spec.name!r} must be from {of.first} to {of.first + of.rows - 1}"
            )
        return own

    def _as_array(self, part: int, values: memoryview, shape: Sequence[int]) -> Any:
        dtype = np.dtype(self._parts[part].spec.dtype)
        return np.frombuffer(values, dtype).reshape(tuple(shape))

    def _dense(self, gradient: Gradient) -> Any:
        """Return a gradient as an array of the shape of its part."""
        part = self._parts[gradient.part]
        if gradient.rows is None:
            return self._as_array(gradient.part, gradient.values, part.shape)
        rows = self._own_rows(gradient.part, gradient.rows)
        values = self._as_array(gradient.part, gradient.values, (len(rows), *part.shape[1:]))
        dense = np.zeros(part.shape, values.dtype)
        dense[rows] = values
        return dense


def _check(optimizer: Any) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or not isinstance(
        optimizer, keras.optimizers.Optimizer
    ):
        raise ArgumentError(
            "group.serve() takes a function that returns a new optimizer of Keras without loss "
            f"scaling, such as lambda: keras.optimizers.SGD(0.1 / group.workers), not {optimizer!r}"
        )


def _check_division(make_optimizer: MakeOptimizer, parts: Sequence[Part], name: str) -> None:
    """Refuse an optimizer to which other rows, or other tensors, matter; `name` is its class."""

    def update(tensors: Sequence[Tensor]) -> list[list[float]]:
        with keras.device("cpu"):
            variables = [keras.Variable(np.asarray(one.values, "float32")) for one in tensors]
            optimizer = make_optimizer()
            optimizer.build(variables)
            for gradients in zip(*(one.gradients for one in tensors), strict=True):
                arrays = [np.asarray(one, "float32") for one in gradients]
                optimizer.apply([keras.ops.convert_to_tensor(one) for one in arrays], variables)
            rows: list[list[float]] = [row for one in variables for row in _array(one).tolist()]
        return rows

    clip = "clip on the workers, by group.optimizer(global_clipnorm=...)"
    check_tensors(
        update, name, f"as global_clipnorm does, and a server updates each by itself: {clip}"
    )
    check_rows(parts, update, name)


def _slot(index: int, name: str, variable: Any, part: Part) -> Slot:
    shape = tuple(int(one) for one in variable.shape)
    by_rows = shape == part.shape and bool(shape)
    data = memoryview(_array(variable).tobytes())
    return Slot(index, name, str(variable.dtype), shape, by_rows, data)


def _array(variable: Any) -> Any:
    return keras.ops.convert_to_numpy(variable)


def _bytes(array: Any) -> memoryview:
    """Look at the bytes of an array, which may have a dtype that a memoryview does not know."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
