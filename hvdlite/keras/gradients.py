"""How the gradients of one optimizer, of Keras 3 or Keras 2, are reduced over all ranks.

`make_distributed` makes a subclass of the optimizer's class that overrides the method that receives
the gradients, and turns the optimizer into an instance of that subclass. The optimizer stays the
same object with the same variables. Its `__class__`, which Keras reads when it saves, is still the
wrapped class, so files contain a plain optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from hvdlite.errors import ArgumentError
from hvdlite.ops import next_object
from hvdlite.optimizers import become, subclass_in_place
from hvdlite.process_sets import ProcessSet, member_id, registered_id


@dataclass
class GradientReduction:
    """The settings and the state of the reduction of one optimizer's gradients."""

    # The wire name of a gradient is the prefix and the index of its variable. Wire names must not
    # depend on other models of a rank, or on how often it traces a function. An optimizer without a
    # name gets its number when it first reduces, because ranks may make optimizers that they never
    # use.

    framework: Any  # `on_tensorflow`, `on_torch` or `keras2`
    options: dict[str, Any]  # of its `allreduce_gradients`
    process_set: ProcessSet
    prefix: str | None
    accumulator: Accumulator | None  # None if each batch is an update
    scales_local: bool
    local: list[Any] = field(default_factory=list)  # variables whose gradients are not reduced
    first_index: int = 0  # of the first variable whose gradient is reduced
    share: Any = None  # the weight of this rank's batch among the ranks', if not 1 (`distribute`)
    seen: dict[Any, int] = field(default_factory=dict)  # Keras 2: indices of variables by `ref()`

    def wire_name(self, index: int) -> str:
        if self.prefix is None:
            number = next_object("keras.DistributedOptimizer", registered_id(self.process_set))
            self.prefix = f"keras.{number}"
        return f"{self.prefix}.{index}"

    def is_local(self, variable: Any) -> bool:
        return any(variable is one for one in self.local)

    def weighted(self, gradients: list[Any]) -> list[Any]:
        if self.share is None:
            return gradients
        scale = self.framework.scale_gradient
        return [one if one is None else scale(one, self.share) for one in gradients]

    def reduce(
        self, gradients: Sequence[Any], indices: Sequence[int], variables: Sequence[Any]
    ) -> list[Any]:
        """Reduce the gradients of these variables over all ranks; None stays None."""
        results = list(gradients)
        if not self.process_set.included():
            return results
        shared = [i for i, variable in enumerate(variables) if not self.is_local(variable)]
        if shared:
            self.first_index = indices[shared[0]]
        # Gradients of local variables are not reduced, but divided by the number of ranks.
        factor = 1.0 / (self.process_set.size() or 1) if self.scales_local else 1.0
        for i in set(range(len(results))).difference(shared):
            if results[i] is not None:
                results[i] = self.framework.scale_gradient(results[i], factor)
        reduced = self.framework.allreduce_gradients(
            [gradients[i] for i in shared],
            [self.wire_name(indices[i]) for i in shared],
            process_set=self.process_set,
            **self.options,
        )
        for i, gradient in zip(shared, reduced, strict=True):
            results[i] = gradient
        return results


class Accumulator:
    """Holds the sums of the gradients of some variables, and the number of batches in them."""

    # Its variables do not belong to the optimizer, so they are never saved with it. In an elastic
    # job `KerasState` saves and restores them on each rank separately.

    def __init__(self, passes: int, average: bool) -> None:
        self.passes = passes
        self._scale = 1.0 / passes if average else 1.0
        self._sums: list[Any] = []
        self._count: Any = None  # `build` makes this variable.
        self._first_count = 0  # The variable begins with this.
        self._have_gradients: set[int] = set()

    @property
    def built(self) -> bool:
        return self._count is not None

    @property
    def variables(self) -> list[Any]:
        """The sums and the count, which are this rank's own; none before `build`."""
        return [*self._sums, self._count] if self.built else []

    @property
    def count(self) -> int:
        return int(self._count) if self.built else self._first_count

    def build(self, variables: Sequence[Any]) -> None:
        """Make empty sums of the optimizer's variables; a second call does nothing."""
        if self.built:
            return
        self._sums = [
            keras.Variable(
                initializer="zeros",
                shape=variable.shape,
                dtype=keras.backend.standardize_dtype(variable.dtype),
                trainable=False,
                name=f"hvdlite_sum_{index}",
            )
            for index, variable in enumerate(variables)
        ]
        self._count = keras.Variable(
            initializer=keras.initializers.Constant(self._first_count),
            shape=(),
            dtype="int32",
            trainable=False,
            name="hvdlite_passes",
        )

    def clear(self, count: int = 0) -> None:
        """Empty the sums outside of traced functions; `count` batches are in other ranks' sums."""
        self._first_count = count
        for total in self._sums:
            total.assign(keras.ops.zeros_like(total))
        if self.built:
            self._count.assign(count)

    def add(
        self, gradients: Sequence[Any], indices: Sequence[int], then: Callable[[list[Any]], None]
    ) -> None:
        """Add the gradients of one batch; after the last batch call `then` with the sums."""
        for gradient, index in zip(gradients, indices, strict=True):
            if gradient is not None:
                self._have_gradients.add(index)
                total = self._sums[index]
                dense = keras.ops.convert_to_tensor(gradient)
                total.assign_add(keras.ops.cast(dense, total.dtype))
        self._count.assign_add(1)

        # In a traced function `then` is traced once. It gets None for a variable that never had a
        # gradient. If it fails, the next batch tries again.
        def update() -> None:
            then([self._sum(index) for index in indices])
            for index in indices:
                self._sums[index].assign(keras.ops.zeros_like(self._sums[index]))
            self._count.assign(0)

        keras.ops.cond(keras.ops.greater_equal(self._count, self.passes), update, lambda: None)

    def _sum(self, index: int) -> Any:
        if index not in self._have_gradients:
            return None
        return keras.ops.multiply(self._sums[index], self._scale)


class Distributed:
    """Base of the subclasses: marks a distributed optimizer, and keeps the wrapped class."""

    _wrapped_class: Any
    _reduction: GradientReduction | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._wrapped_class

    def register_local_var(self, variable: Any) -> None:
        """Make a variable local to this rank: its gradient is not reduced.

        Every rank registers the same variables before the first step.

        Example:
            >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
            >>> optimizer.register_local_var(head.kernel)
        """
        self._require_reduction().local.append(variable)

    def _require_reduction(self) -> GradientReduction:
        if self._reduction is None:
            raise ArgumentError(
                f"this {type(self).__name__} was made from the class of a DistributedOptimizer, "
                "and reduces nothing; wrap it in hvd.DistributedOptimizer"
            )
        return self._reduction


def make_distributed(optimizer: Any, mixin: Any, reduction: GradientReduction) -> None:
    subclass_in_place(optimizer, mixin)
    vars(optimizer)["_reduction"] = reduction  # Keras would track an attribute.


def make_plain(optimizer: Any) -> GradientReduction:
    """Make a distributed optimizer a plain one again; return its `GradientReduction`."""
    reduction: GradientReduction = vars(optimizer).pop("_reduction")
    become(optimizer, optimizer._wrapped_class)
    vars(optimizer).pop("apply", None)  # A backend's `keep_apply` may have set it.
    return reduction


def is_distributed(optimizer: Any) -> bool:
    return isinstance(optimizer, Distributed) and optimizer._reduction is not None


def distributed_part(optimizer: Any) -> Any:
    """Return the distributed optimizer: this one, one that it contains, or None."""
    return next((part for part in with_inner(optimizer) if is_distributed(part)), None)


def with_inner(optimizer: Any) -> list[Any]:
    contained = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    return [optimizer, *(part for one in contained if one is not None for part in with_inner(one))]


def first_wire_name(optimizer: Any) -> tuple[str, int] | None:
    """Return a step's first wire name and its set's number; None if this rank does not reduce."""
    part = distributed_part(optimizer)
    if part is None or not part._reduction.process_set.included():
        return None
    reduction: GradientReduction = part._reduction
    return reduction.wire_name(reduction.first_index), registered_id(reduction.process_set)


def wire_name_over(optimizer: Any, process_set: ProcessSet) -> str | None:
    """Return a step's first wire name; None unless the gradients are reduced over these ranks."""
    first = first_wire_name(optimizer)
    return None if first is None or first[1] != member_id(process_set) else first[0]
