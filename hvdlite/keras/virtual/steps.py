"""`virtual_steps`: the loop over steps of virtual ranks, with a function that gives gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.keras.adapters import backend_adapter
from hvdlite.keras.virtual.batches import VirtualBatches
from hvdlite.numpy.collectives import grouped_allreduce
from hvdlite.virtual.agreement import agree, check_carried, refuse_unfinished
from hvdlite.virtual.blocks import blocks_of_world
from hvdlite.virtual.generators import generators, seed_of
from hvdlite.virtual.tree_sums import TreeSums

# A key says what an array is, "gradient", "weight" or its "bytes", and its index among these.
_Key = tuple[str, int]

_NAME = "keras.virtual_steps"


@dataclass
class VirtualStep:
    """One step of all virtual ranks.

    Attributes:
        number: the number of the step in its epoch.
        loss: the mean of the losses, once `gradients` has returned; None if there are none.

    Example:
        >>> step = next(hvd.virtual_steps(batches, 0, model))
        >>> step.number
        0
    """

    number: int
    _loop: _Loop
    loss: float | None = None
    _done: bool = False

    def gradients(self, compute: Callable[..., tuple[Any, Sequence[Any]]]) -> list[Any]:
        """Return the mean gradients over all virtual ranks; call it once in each step.

        It calls the function for the batch of each virtual rank of this rank, in turn.

        Args:
            compute: a function without collectives. It takes a batch, as one argument for each
                array of `hvd.VirtualBatches`, and returns the loss (or None) and the gradients of
                model.trainable_variables in their order. It may be a `tf.function`. A gradient may
                be None, and counts as zeros.

        Returns:
            Tensors; None for a variable for which all virtual ranks gave None.

        Raises:
            ArgumentError: the function returns something else.
            HvdliteError: a rank has called `hvd.join()`, the function has called a collective, or
                this is the second call in a step.

        Example:
            >>> for step in hvd.virtual_steps(batches, epoch, model):
            ...     gradients = step.gradients(loss_and_gradients)
            ...     optimizer.apply(gradients, model.trainable_variables)
            ...     print(step.loss)
        """
        if self._done:
            raise HvdliteError("gradients() is called once in each step of virtual_steps()")
        self.loss, means = self._loop.run(self.number, compute)
        self._done = True
        return means


def virtual_steps(
    batches: VirtualBatches, epoch: int, model: Any, threads: int = 1, done: int = 0
) -> Iterator[VirtualStep]:
    """Yield the steps of an epoch, in which any number of ranks carries the virtual ranks.

    A step of the world has one batch for each virtual rank. `VirtualStep.gradients` computes those
    of this rank's block of virtual ranks in turn. Before each batch the random generators (Python,
    NumPy, PyTorch, those of the model's layers) are seeded for the step and the virtual rank, and
    the weights that are not trained get the values with which the step began. After the step those
    of floating point are means over all virtual ranks, and others are those of virtual rank 0. So
    variables have the same bits with any number of ranks; see docs/modes/virtual_ranks.md.

    Apply the gradients with a plain optimizer, not with a `DistributedOptimizer`.

    Args:
        batches: all samples, with the number of virtual ranks and the seed.
        epoch: the number of the epoch.
        model: a built model of Keras 3.
        threads: the number of threads in each rank, on which the bits depend. On PyTorch this
            function sets it. On TensorFlow, where that is too late, it compares.
        done: the number of steps, of all epochs, after which the training goes on. Steps that are
            done are not yielded. Save this number with the model; without gradient accumulation and
            loss scaling it is `int(optimizer.iterations)`.

    Raises:
        ArgumentError: an argument cannot be used, there are more ranks than virtual ranks, or the
            training would not have the same bits, with the reason.
        MismatchError: ranks give different arguments.
        HvdliteError: the gradients of a step were not computed.

    Example:
        >>> for epoch in range(10):
        ...     for step in hvd.virtual_steps(batches, epoch, model):
        ...         gradients = step.gradients(loss_and_gradients)
        ...         optimizer.apply(gradients, model.trainable_variables)
    """
    if not isinstance(batches, VirtualBatches):
        raise ArgumentError(
            f"virtual_steps() takes hvd.VirtualBatches(...), not a {type(batches).__name__}"
        )
    for name, value, least in (("threads", threads, 1), ("epoch", epoch, 0), ("done", done, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ArgumentError(
                f"virtual_steps({name}={value!r}): give a whole number from {least} on"
            )
    if basics.in_elastic_job():
        raise ArgumentError(
            "virtual_steps() of hvdlite.keras in an elastic job: a step that a change of the ranks "
            "cuts off is not done again; use a job of fixed size, and resume with another number "
            "of ranks"
        )
    _check_model(model)
    adapter = backend_adapter()
    adapter.prepare_virtual_ranks(model, threads)
    loop = _Loop(batches, epoch, model, threads, adapter)
    return loop.steps(min(max(done - epoch * batches.steps, 0), batches.steps))


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model) or not model.built or not model.trainable_variables:
        raise ArgumentError(
            "virtual_steps() takes a built model of Keras 3 that has trainable variables; give it "
            "a keras.Input, or call model.build(input_shape)"
        )
    for variable in model.trainable_variables:
        if np.dtype(str(variable.dtype).replace("bfloat16", "float16")).itemsize < 4:
            raise ArgumentError(
                f"virtual_steps(): sums of gradients of {variable.dtype} ({variable.path}) would "
                'depend on the number of ranks; keep variables in float32, as "mixed_bfloat16" does'
            )


_under_way: set[_Loop] = set()


def loop_under_way() -> bool:
    """Return whether a loop over `virtual_steps` runs, in which gradients are means already."""
    return bool(_under_way)


class _Sums(TreeSums[_Key]):
    """Sums of NumPy arrays."""

    def _add_to(self, targets: list[Any], summands: list[Any] | float) -> None:
        for i, target in enumerate(targets):
            np.add(target, summands[i] if isinstance(summands, list) else summands, out=target)


@dataclass
class _Computed:
    """What a rank's block of virtual ranks has left in one step."""

    sums: _Sums
    losses: _Sums
    changed: Any  # It counts, by weight that is not trained, the virtual ranks that changed it.
    of_first: list[Any] | None = None  # These weights, on the rank that has virtual rank 0.


class _Loop:
    """The steps of one epoch on this rank."""

    def __init__(
        self, batches: VirtualBatches, epoch: int, model: Any, threads: int, adapter: Any
    ) -> None:
        self._batches, self._epoch, self._model = batches, epoch, model
        self._threads, self._adapter = threads, adapter
        self._block = blocks_of_world(batches.virtual_size).own
        weights = {id(one) for one in model.weights}
        # What a model has besides weights are the states of random layers, and metrics.
        self._seeds = [
            one
            for one in model.variables
            if id(one) not in weights and one.path.endswith("seed_generator_state")
        ]

    def steps(self, first: int) -> Iterator[VirtualStep]:
        """Agree with the other ranks, and yield the steps from the first one on."""
        batches = self._batches
        sizes = [batches.virtual_size, batches.seed, batches.batch_size, batches.steps]
        # NumPy orders the samples.
        machine = {**self._adapter.describe_machine(self._threads), "numpy": np.__version__}
        agree(_NAME, [*sizes, self._epoch, first], machine)
        _under_way.add(self)
        try:
            for number in range(first, batches.steps):
                self._seed(number, "before")
                step = VirtualStep(number, self)
                yield step
                if not step._done:
                    refuse_unfinished(number)
        finally:
            _under_way.discard(self)

    def run(self, step: int, compute: Callable[..., Any]) -> tuple[float | None, list[Any]]:
        """Compute this rank's block; set the weights that are not trained; return the means."""
        before = [_array(one) for one in self._model.non_trainable_weights]
        try:
            result = self._reduce(self._compute(step, compute, before), before)
        except BaseException:
            self._restore(before)  # A script may compute the step again.
            raise
        self._seed(step, "after")
        return result

    def _restore(self, before: list[Any]) -> None:
        for weight, value in zip(self._model.non_trainable_weights, before, strict=True):
            weight.assign(value)

    def _compute(self, step: int, compute: Callable[..., Any], before: list[Any]) -> _Computed:
        found = _Computed(_Sums(), _Sums(), np.zeros(len(before)))
        for virtual_rank in range(self._block.first, self._block.first + self._block.size):
            if virtual_rank > self._block.first:
                self._restore(before)
            self._seed(step, virtual_rank)
            batch = self._batches.batch(self._epoch, step, virtual_rank)
            self._adapter.check_machine(self._threads)
            sent = _sent_tensors()
            loss, gradients = self._checked(compute(*batch))
            if _sent_tensors() != sent:
                raise HvdliteError(
                    "the function for gradients() has called a collective, as a "
                    "DistributedGradientTape does: ranks call the function as often as they have "
                    "virtual ranks, and gradients() makes the means itself; use a plain tape"
                )
            arrays = {("gradient", i): one for i, one in enumerate(gradients) if one is not None}
            after = [_array(one) for one in self._model.non_trainable_weights]
            found.changed += [
                one.tobytes() != was.tobytes() for one, was in zip(after, before, strict=True)
            ]
            if virtual_rank == 0:
                found.of_first = after
            arrays |= {
                ("weight", i): _wide(one) for i, one in enumerate(after) if _is_averaged(one)
            }
            found.sums.add(arrays)
            found.losses.add({} if loss is None else {("loss", 0): np.array([loss, 1.0])})
        return found

    def _reduce(self, found: _Computed, before: list[Any]) -> tuple[float | None, list[Any]]:
        sums, losses, changed = found.sums.take(), found.losses.take(), found.changed
        size, variables = self._batches.virtual_size, self._model.trainable_variables
        given = [float(("gradient", i) in sums) for i in range(len(variables))]
        loss = losses.get(("loss", 0), np.zeros(2))
        told = np.array([float(self._block.size), *loss, *given, *changed])
        (told,) = grouped_allreduce([told], name=_NAME, op=ops.Sum)
        check_carried(told[0], size)
        given, changed = told[3 : 3 + len(variables)] > 0, told[3 + len(variables) :] > 0
        wanted: dict[_Key, Any] = {}
        for i, variable in enumerate(variables):
            if given[i]:
                key = "gradient", i
                wanted[key] = sums[key] if key in sums else np.zeros(variable.shape, variable.dtype)
        wanted |= {key: one for key, one in sums.items() if key[0] == "weight" and changed[key[1]]}
        # Others than means are a sum with zeros, as only one rank has what virtual rank 0 left.
        values = found.of_first or [np.zeros_like(one) for one in before]
        for i, one in enumerate(changed):
            if one and ("weight", i) not in wanted:
                wanted["bytes", i] = np.frombuffer(values[i].tobytes(), np.uint8)
        totals = (
            grouped_allreduce([*wanted.values()], name=f"{_NAME}.sums", op=ops.Sum)
            if wanted
            else []
        )
        tensors: list[Any] = [None] * len(variables)
        for (kind, i), total in zip(wanted, totals, strict=True):
            if kind == "gradient":
                tensors[i] = keras.ops.convert_to_tensor(total / size)
            elif kind == "weight":
                self._model.non_trainable_weights[i].assign((total / size).astype(before[i].dtype))
            else:
                value = total.view(before[i].dtype).reshape(before[i].shape)
                self._model.non_trainable_weights[i].assign(value)
        return float(told[1]) / size if told[2] == size else None, tensors

    def _checked(self, result: Any) -> tuple[float | None, list[Any]]:
        """Return the loss and the gradients, as arrays, of what the user's function returned."""
        variables = self._model.trainable_variables
        try:
            loss, gradients = result
            gradients = [*gradients]
        except (TypeError, ValueError):
            gradients = []
        if len(gradients) != len(variables):
            raise ArgumentError(
                "the function for gradients() returns two values: the loss, and a list of the "
                f"gradients of model.trainable_variables, of which there are {len(variables)}"
            )
        arrays = [None if one is None else _array(one) for one in gradients]
        for variable, array in zip(variables, arrays, strict=True):
            if array is not None and (array.shape, array.dtype.name) != (
                tuple(variable.shape), variable.dtype,
            ):  # fmt: skip
                raise ArgumentError(
                    f"the function for gradients() gives a gradient of {array.dtype.name} "
                    f"{array.shape} for {variable.path}, which is of {variable.dtype} "
                    f"{tuple(variable.shape)}; give them in the order of model.trainable_variables"
                )
        return None if loss is None else float(_array(loss)), arrays

    def _seed(self, step: int, part: int | str) -> None:
        """Seed all generators of this process, and those of the model's layers."""
        parts = self._batches.seed, self._epoch, step, part
        number = seed_of(*parts)
        for generator in generators().values():
            generator.seed(number)
        self._adapter.seed_backend(number)
        for i, state in enumerate(self._seeds):
            state.assign(np.array([seed_of(*parts, i) % 2**31, 0], state.dtype))


def _sent_tensors() -> int:
    return int(basics.engine().counters()["tensors"])


def _array(value: Any) -> Any:
    """Copy a tensor or a variable into a new array."""
    return np.array(keras.ops.convert_to_numpy(value), order="C")


def _is_averaged(array: Any) -> bool:
    return bool(keras.backend.is_float_dtype(array.dtype.name))


def _wide(array: Any) -> Any:
    """Return an array in a dtype in which sums on one rank and between ranks are rounded alike."""
    return array.astype(np.float32) if array.dtype.itemsize < 4 else array.copy()
