"""What a parameter server of Keras holds: variables, and an optimizer of Keras for each of them.

Every tensor has an optimizer of its own, so that one whose gradient is missing stays as it is, and
so that all of an optimizer's variables belong to one tensor of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from hvdlite.errors import ArgumentError
from hvdlite.parameter_server.storage import Gradient, Slot
from hvdlite.parameter_server.tensors import TensorSpec

MakeOptimizer = Callable[[], Any]


class KerasStorage:
    """The tensors of one server, see `hvdlite.parameter_server.storage`."""

    # The server calls one method at a time.

    def __init__(self, make_optimizer: MakeOptimizer, tensors: Sequence[TensorSpec]) -> None:
        """Make a variable of zeros, and a checked optimizer, for each tensor of this server."""
        self._specs = list(tensors)
        self._variables: list[Any] = []
        self._optimizers: list[Any] = []
        for spec in tensors:
            zeros: Any = np.zeros(spec.shape, "float32")
            with keras.device("cpu"):
                variable = keras.Variable(zeros, dtype=spec.dtype, name="parameter")
                optimizer = make_optimizer()
                _check(optimizer)
                optimizer.build([variable])
            self._variables.append(variable)
            self._optimizers.append(optimizer)

    def read(self, tensor: int, into: memoryview) -> None:
        """Copy the values of a tensor."""
        into[:] = _bytes(_array(self._variables[tensor]))

    def write(self, tensor: int, values: memoryview) -> None:
        """Set the values of a tensor."""
        self._variables[tensor].assign(self._as_array(tensor, values, self._specs[tensor].shape))

    def apply(self, gradients: Sequence[Gradient]) -> None:
        """Apply the gradients of one push, each with its own optimizer, or change nothing."""
        dense = [self._dense(one) for one in gradients]
        with keras.device("cpu"):
            for one, gradient in zip(gradients, dense, strict=True):
                tensor = keras.ops.convert_to_tensor(gradient)
                self._optimizers[one.tensor].apply([tensor], [self._variables[one.tensor]])

    def slots(self) -> Iterator[Slot]:
        """Copy the values, and the variables of the optimizers, one by one."""
        for index, variable in enumerate(self._variables):
            yield _slot(index, "", variable)
            for name, state in self._states(index).items():
                yield _slot(index, name, state)

    def restore(self, slot: Slot) -> None:
        """Set what `slots` has copied; raise if the optimizer does not have such a state."""
        states = self._states(slot.tensor)
        variable = states.get(slot.name) if slot.name else self._variables[slot.tensor]
        if variable is None or tuple(variable.shape) != slot.shape:
            raise ArgumentError(
                f"the checkpoint has a state {slot.name!r} of shape {list(slot.shape)} for tensor "
                f"{self._specs[slot.tensor].name!r}, and the optimizer has none: use the optimizer "
                "that wrote it, or delete the file"
            )
        variable.assign(np.frombuffer(slot.data, dtype=np.dtype(slot.dtype)).reshape(slot.shape))

    def _states(self, tensor: int) -> dict[str, Any]:
        """Name the optimizer's variables by their order and their own names."""
        variables = self._optimizers[tensor].variables
        return {f"{i}.{one.path.rpartition('/')[2]}": one for i, one in enumerate(variables)}

    def _as_array(self, tensor: int, values: memoryview, shape: Sequence[int]) -> Any:
        dtype = np.dtype(self._specs[tensor].dtype)
        return np.frombuffer(values, dtype).reshape(tuple(shape))

    def _dense(self, gradient: Gradient) -> Any:
        """Return a gradient as an array of the shape of its tensor."""
        spec = self._specs[gradient.tensor]
        if gradient.rows is None:
            return self._as_array(gradient.tensor, gradient.values, spec.shape)
        rows = np.frombuffer(gradient.rows, np.int64)
        if rows.size and not (rows.min() >= 0 and rows.max() < spec.rows):
            raise ArgumentError(f"rows of {spec.name!r} must be from 0 to {spec.rows - 1}")
        values = self._as_array(gradient.tensor, gradient.values, (len(rows), *spec.shape[1:]))
        dense = np.zeros(spec.shape, values.dtype)
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
    if optimizer.global_clipnorm:
        raise ArgumentError(
            f"{type(optimizer).__name__} looks at all tensors together, as global_clipnorm does, "
            "and a server updates each by itself: clip on the workers, by "
            "group.optimizer(global_clipnorm=...)"
        )


def _slot(index: int, name: str, variable: Any) -> Slot:
    shape = tuple(int(one) for one in variable.shape)
    data = memoryview(_array(variable).tobytes())
    return Slot(index, name, str(variable.dtype), shape, data)


def _array(variable: Any) -> Any:
    return keras.ops.convert_to_numpy(variable)


def _bytes(array: Any) -> memoryview:
    """Look at the bytes of an array, which may have a dtype that a memoryview does not know."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
