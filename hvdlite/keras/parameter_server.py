"""Asynchronous training with parameter servers in Keras: `hvd.parameter_server.connect()`.

Start the script by `hvdlite-run -np 8 --servers 2 python train.py`: the first two processes serve,
and the other six train. Nobody calls `hvd.init()`. Servers have optimizers of Keras, on either
backend, and a worker compiles its model with `group.optimizer()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from os import PathLike
from typing import Any

import keras
import numpy as np

from hvdlite.errors import ArgumentError
from hvdlite.keras.backend import backend_adapter
from hvdlite.parameter_server import group as neutral
from hvdlite.parameter_server.client import Client, Rows
from hvdlite.parameter_server.collection import Report, ServerReport, WorkerReport, check_pace
from hvdlite.parameter_server.tensors import ITEM_BYTES, Gradient, Slot, TensorSpec
from hvdlite.rendezvous.environment import detect

__all__ = ["Group", "RemoteOptimizer", "Report", "ServerReport", "WorkerReport", "connect"]


class Group(neutral.Group):
    """The servers and workers of a job, as one of them sees them; `connect` makes it."""

    def serve(
        self,
        make_optimizer: Callable[[], Any],
        save: str | PathLike[str] | None = None,
        save_every: float = 60.0,
        load: str | PathLike[str] | None = None,
    ) -> None:
        """Serve until all workers have ended, or SIGTERM asks this process to end.

        Args:
            make_optimizer: returns a new optimizer of Keras; it is called for each tensor that
                this server holds. Divide the rate by `group.workers`: every worker's push is one
                step.
            save: the path of checkpoints, of which each server writes its own file: `ps.ckpt` is
                `ps.ckpt.0-of-2` and `ps.ckpt.1-of-2`. If there is one at the start, the servers go
                on from it; their number must be the same.
            save_every: seconds between two checkpoints; the last one is written at the end.
            load: the path of another checkpoint to begin with.

        Raises:
            ArgumentError: an argument cannot be used, or this process is a worker, or has served
                already.

        Example:
            group.serve(lambda: keras.optimizers.SGD(0.1 / group.workers), save="ps.ckpt")
        """
        self.serve_storage(partial(KerasStorage, make_optimizer), save, save_every, load)

    def optimizer(
        self,
        staleness: int | None = None,
        push_every: int = 1,
        pull_every: int = 1,
        clipvalue: float | None = None,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
    ) -> RemoteOptimizer:
        """Make the optimizer of a worker's model, which leaves the updates to the servers.

        The first worker's values become those of all, unless the servers have a checkpoint. The
        state of other layers, such as the moments of BatchNormalization, is each worker's own.

        Args:
            staleness: how many steps this worker may be ahead of the slowest one when it pulls;
                0 keeps workers in step, None waits for nobody.
            push_every: in every how many steps the sum of the gradients is pushed.
            pull_every: in every how many steps values are pulled.
            clipvalue: the largest value of this worker's gradients, as in Keras' optimizers.
            clipnorm: the largest norm of the gradient of a variable.
            global_clipnorm: the largest norm of all gradients together.

        Returns:
            The optimizer, for `compile()` with jit_compile=False, or for a loop of your own.

        Raises:
            ArgumentError: an argument cannot be used, or this process is a server.
            ValueError: more than one of the three bounds is given.

        Example:
            model.compile(optimizer=group.optimizer(), loss="mse", jit_compile=False)
        """
        bounds = {"clipvalue": clipvalue, "clipnorm": clipnorm, "global_clipnorm": global_clipnorm}
        return RemoteOptimizer(self.client, staleness, push_every, pull_every, **bounds)


def connect() -> Group:
    """Connect this process to its job: a worker to all servers.

    Returns:
        The group; close it, or use it in a `with` statement, when the training is over.

    Raises:
        BootstrapError: the job has no servers, or they cannot be reached in time.

    Example:
        with hvd.parameter_server.connect() as group:
            ...
    """
    return Group(detect(with_servers=True))


class RemoteOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Leaves the updates of a worker's variables to parameter servers; `group.optimizer` makes it.

    The arguments after `client` are those of `Group.optimizer`; `bounds` has the last three.

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
        **bounds: float | None,
    ) -> None:
        check_pace(staleness, push_every, pull_every)
        super().__init__(learning_rate=0.0, name="remote", **bounds)
        self.clock = 0
        self._client = client
        self._staleness = staleness
        self._push_every = push_every
        self._pull_every = pull_every
        self._steps = 0
        self._values: list[Any] = []  # Pulls fill these arrays, one for each variable.
        self._sums: dict[int, Any] = {}  # Each variable's sum is not pushed yet.
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
            self.clock = self._client.register(specs, memory)
            self._client.step(self.clock, None, memory, None)
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
        pairs = [pair for pair in zip(gradients, given, strict=True) if pair[0] is not None]
        indices = [self._get_variable_index(variable) for _, variable in pairs]

        def exchange(*arrays: Any) -> list[Any]:
            return self._exchange(dict(zip(indices, arrays, strict=True)))

        clipped = self._clip_gradients([gradient for gradient, _ in pairs])
        values = backend_adapter().call_with_arrays(exchange, clipped, self._trainable_variables)
        for variable, value in zip(self._trainable_variables, values, strict=True):
            variable.assign(value)
        self.iterations.assign_add(1)

    def _exchange(self, gradients: dict[int, Any]) -> list[Any]:
        """Push and pull what is due, and return copies of all values."""
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
        self._client.step(self.clock, push, memory, self._staleness)
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


class KerasStorage:
    """The tensors of a server, as variables of Keras; a `hvdlite.parameter_server.tensors.Storage`.

    Every tensor has an optimizer of its own, so that one whose gradient is missing stays as it is,
    and so that all of an optimizer's variables belong to one tensor of a checkpoint.
    """

    def __init__(self, make_optimizer: Callable[[], Any], tensors: Sequence[TensorSpec]) -> None:
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
        into[:] = _bytes(keras.ops.convert_to_numpy(self._variables[tensor]))

    def write(self, tensor: int, values: memoryview) -> None:
        self._variables[tensor].assign(self._as_array(tensor, values, self._specs[tensor].shape))

    def apply(self, gradients: Sequence[Gradient]) -> None:
        dense = [self._dense(one) for one in gradients]
        with keras.device("cpu"):
            for one, gradient in zip(gradients, dense, strict=True):
                tensor = keras.ops.convert_to_tensor(gradient)
                self._optimizers[one.tensor].apply([tensor], [self._variables[one.tensor]])

    def slots(self) -> Iterator[Slot]:
        for index, variable in enumerate(self._variables):
            yield _slot(index, "", variable)
            for name, state in self._states(index).items():
                yield _slot(index, name, state)

    def restore(self, slot: Slot) -> None:
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
        variables = self._optimizers[tensor].variables
        return {f"{i}.{one.path.rpartition('/')[2]}": one for i, one in enumerate(variables)}

    def _as_array(self, tensor: int, values: memoryview, shape: Sequence[int]) -> Any:
        dtype = np.dtype(self._specs[tensor].dtype)
        return np.frombuffer(values, dtype).reshape(tuple(shape))

    def _dense(self, gradient: Gradient) -> Any:
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
    data = memoryview(keras.ops.convert_to_numpy(variable).tobytes())
    return Slot(index, name, str(variable.dtype), shape, data)
