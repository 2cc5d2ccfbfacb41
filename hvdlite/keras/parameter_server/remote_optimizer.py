"""`RemoteOptimizer`: a Keras optimizer whose `apply` pushes gradients, and pulls values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdlite.errors import ArgumentError
from hvdlite.keras.backend import backend_adapter
from hvdlite.parameter_server.client import Client, RemoteCollection, Rows
from hvdlite.parameter_server.clocks import check_pace
from hvdlite.parameter_server.tensors import ITEM_BYTES, TensorSpec


class RemoteOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Leaves the updates of a worker's variables to parameter servers; `group.optimizer` makes it.

    Attributes:
        clock: the number of steps that this worker has done; one that joins later begins where the
            last of the others is.

    Example:
        >>> model.compile(optimizer=group.optimizer(staleness=3), loss="mse", jit_compile=False)
    """

    def __init__(
        self,
        client: Client,
        staleness: int | None = None,
        push_every: int = 1,
        pull_every: int = 1,
        clipvalue: float | None = None,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
    ) -> None:
        """Make an optimizer, which registers its variables when it is built.

        Args:
            client: the connections to the servers; borrowed.
            staleness: how many steps this worker may be ahead of the slowest one when it pulls.
            push_every: in every how many steps the sum of the gradients is pushed.
            pull_every: in every how many steps values are pulled.
            clipvalue: the largest value of this worker's gradients, as in Keras' optimizers.
            clipnorm: the largest norm of the gradient of a variable.
            global_clipnorm: the largest norm of all gradients together.

        Raises:
            ArgumentError: a number cannot be used.
            ValueError: more than one of the three bounds is given.
        """
        check_pace(staleness, push_every, pull_every)
        super().__init__(
            learning_rate=0.0,
            name="remote",
            clipvalue=clipvalue,
            clipnorm=clipnorm,
            global_clipnorm=global_clipnorm,
        )
        self.clock = 0
        self._client = client
        self._staleness = staleness
        self._push_every = push_every
        self._pull_every = pull_every
        self._steps = 0
        self._values: list[Any] = []  # Pulls fill these arrays, one for each variable.
        self._sums: dict[int, Any] = {}  # Each variable's sum is not pushed yet.
        self._collection: RemoteCollection | None = None
        backend_adapter().keep_apply(self)

    @property
    def learning_rate(self) -> Any:
        """The rate is that of the servers' optimizer, which a worker cannot see."""
        return self._get_current_learning_rate()

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        raise ArgumentError(
            f"a worker cannot set the learning rate ({rate!r}): it belongs to the optimizer of the "
            "servers; give that one a schedule in group.serve(), and leave out the callback"
        )

    def build(self, variables: Sequence[Any]) -> None:
        """Register the variables with the servers, and pull their values.

        Args:
            variables: the trained variables of the model.

        Raises:
            MismatchError: another worker, or the checkpoint, has another model.
            RankFailedError: a server died.
        """
        if self.built:
            return
        super().build(variables)
        with backend_adapter().outside_of_graphs():
            specs = [_spec(i, one) for i, one in enumerate(self._trainable_variables)]
            self._values = [_array(variable) for variable in self._trainable_variables]
            memory = [_bytes(value) for value in self._values]
            self._collection = self._client.register(specs, memory)
            self.clock = self._collection.clock
            self._collection.step(self.clock, None, memory, None)
            for variable, value in zip(self._trainable_variables, self._values, strict=True):
                variable.assign(value.copy())

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Push the gradients of this worker, and pull the variables.

        Args:
            grads: the gradients, or None for variables that have none.
            trainable_variables: their variables, or None for those that the optimizer was built
                with.
        """
        gradients = list(grads)
        if trainable_variables is not None and not self.built:
            self.build(list(trainable_variables))
        given = self._trainable_variables if trainable_variables is None else trainable_variables
        pairs = zip(gradients, list(given), strict=True)
        indices, some = [], []
        for gradient, variable in pairs:
            if gradient is not None:
                indices.append(self._get_variable_index(variable))
                some.append(gradient)

        def exchange(*arrays: Any) -> list[Any]:
            return self._exchange(dict(zip(indices, arrays, strict=True)))

        some = self._clip_gradients(some)
        values = backend_adapter().call_with_arrays(exchange, some, self._trainable_variables)
        for variable, value in zip(self._trainable_variables, values, strict=True):
            variable.assign(value)
        self.iterations.assign_add(1)

    def _exchange(self, gradients: dict[int, Any]) -> list[Any]:
        """Push and pull what is due, and return copies of all values."""
        assert self._collection is not None
        self._steps += 1
        for index, gradient in gradients.items():
            held = self._sums.get(index)
            self._sums[index] = gradient if held is None else held + gradient
        self.clock += 1
        push: dict[int, memoryview | Rows] | None = None
        if self._steps % self._push_every == 0:
            push = {index: _bytes(one) for index, one in self._sums.items()}
        memory = None
        if self._steps % self._pull_every == 0:
            memory = [_bytes(value) for value in self._values]
        self._collection.step(self.clock, push, memory, self._staleness)
        if push is not None:
            self._sums = {}
        return [value.copy() for value in self._values]

    def get_config(self) -> dict[str, Any]:
        """Return what a saved model has of this optimizer: no state, which is on the servers."""
        return {"name": self.name}


def _spec(index: int, variable: Any) -> TensorSpec:
    """Describe a variable; its path would depend on what else its process has built."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if dtype not in ITEM_BYTES:
        raise ArgumentError(
            f"variable {variable.path!r} is {dtype}, and servers hold {', '.join(ITEM_BYTES)}"
        )
    shape = tuple(int(one) for one in variable.shape)
    return TensorSpec(f"{index}.{variable.name}", dtype, shape)


def _array(variable: Any) -> Any:
    return np.array(keras.ops.convert_to_numpy(variable), order="C")


def _bytes(array: Any) -> memoryview:
    """Look at the bytes of an array, which may have a dtype that a memoryview does not know."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
