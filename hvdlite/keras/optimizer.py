"""`DistributedOptimizer`: a Keras optimizer that applies the gradients of all ranks.

`fit` reaches an optimizer by its public `apply`, on every backend; a subclass that is made for the
optimizer's class overrides it, and the optimizer itself becomes an instance of that subclass. It
stays the same object with the same variables, and to all who ask for its `__class__` (Keras does
when it saves) it is what it was: files hold a plain optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from hvdlite import basics, ops
from hvdlite.compression import Compressor, NoneCompressor
from hvdlite.errors import ArgumentError
from hvdlite.keras.accumulation import Accumulator
from hvdlite.keras.backend import seam
from hvdlite.numbering import next_number


@dataclass
class Distribution:
    """How one optimizer's gradients are reduced.

    Wire names are the prefix and the index of the variable: what ranks have in common that built
    other models besides, or trace a function more often. Without a name of its own an optimizer is
    numbered when it reduces for the first time, since ranks may make some that they never use.
    """

    prefix: str | None
    op: int
    compression: type[Compressor] | Compressor
    prescale: float
    postscale: float
    sparse_as_dense: bool
    passes: int
    averages_passes: bool
    allreduce: Callable[..., list[Any]]
    accumulator: Accumulator | None = None

    def wire_name(self, index: int) -> str:
        """Name the gradient of the variable of this index."""
        if self.prefix is None:
            self.prefix = f"keras.{next_number('keras.DistributedOptimizer')}"
        return f"{self.prefix}.{index}"

    def reduce(self, gradients: Sequence[Any], indices: Sequence[int]) -> list[Any]:
        """Reduce the gradients of the variables of these indices over all ranks."""
        return self.allreduce(
            gradients,
            [self.wire_name(index) for index in indices],
            op=self.op,
            compression=self.compression,
            prescale_factor=self.prescale,
            postscale_factor=self.postscale,
            sparse_as_dense=self.sparse_as_dense,
        )


class Distributed(keras.optimizers.Optimizer):  # type: ignore[misc]
    """What `DistributedOptimizer` adds to the class of the optimizer that it is given."""

    _wrapped_class: Any
    _distribution: Distribution | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class that was wrapped: what a saved file names."""
        return self._wrapped_class

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduce the gradients over all ranks, then update the variables with them.

        Args:
            grads: the gradients of this rank.
            trainable_variables: their variables, or None for those that the optimizer was built
                with.
        """
        gradients = list(grads)
        given = None if trainable_variables is None else list(trainable_variables)
        if given is not None and not self.built:
            self.build(given)
        variables = self._trainable_variables if given is None else given
        indices = self._indices_of(variables)
        if indices is None or len(indices) != len(gradients):
            super().apply(gradients, given)  # which says what is wrong
            return
        distribution = self._distribution
        if distribution is None:
            raise ArgumentError(
                f"this {type(self).__name__} was made from the class of a DistributedOptimizer, "
                "and reduces nothing; wrap it in hvd.DistributedOptimizer"
            )
        if distribution.passes == 1:
            super().apply(distribution.reduce(gradients, indices), given)
            return
        if distribution.accumulator is None:
            distribution.accumulator = Accumulator(
                self._trainable_variables, distribution.passes, distribution.averages_passes
            )
        apply_plain = super().apply
        distribution.accumulator.add(
            gradients,
            indices,
            then=lambda sums: apply_plain(distribution.reduce(sums, indices), given),
        )

    def __reduce__(self) -> Any:
        """Pickle a plain optimizer, as Keras pickles them: by its configuration."""
        make, arguments = super().__reduce__()
        return getattr(self._wrapped_class, make.__name__), arguments

    def _indices_of(self, variables: Sequence[Any]) -> list[int] | None:
        try:
            return [self._get_variable_index(variable) for variable in variables]
        except KeyError:
            return None


@functools.cache
def _distributed_class(wrapped_class: Any) -> type[Distributed]:
    return type(
        wrapped_class.__name__,
        (Distributed, wrapped_class),
        {
            "__doc__": wrapped_class.__doc__,
            "__module__": wrapped_class.__module__,
            "__qualname__": wrapped_class.__qualname__,
            "_wrapped_class": wrapped_class,
        },
    )


def _become(optimizer: Any, its_class: type) -> None:
    """Change the class of an object, also where `__class__` is the property above."""
    object.__dict__["__class__"].__set__(optimizer, its_class)


def _distribute(optimizer: Any, distribution: Distribution) -> None:
    wrapped_class: Any = type(optimizer)
    _become(optimizer, _distributed_class(wrapped_class))
    vars(optimizer)["_distribution"] = distribution  # Past Keras, which would track it.


def is_distributed(optimizer: Any) -> bool:
    """Say whether an optimizer applies the gradients of all ranks."""
    return isinstance(optimizer, Distributed) and optimizer._distribution is not None


def first_wire_name(optimizer: Any) -> str | None:
    """Return the name under which ranks meet first in every step; None if it is not distributed."""
    if not is_distributed(optimizer):
        return None
    distribution: Distribution = optimizer._distribution
    return distribution.wire_name(0)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = ops.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
) -> Any:
    """Make a Keras optimizer apply the gradients of all ranks.

    Every gradient is reduced exactly once per step, before clipping and loss scaling look at it, in
    `fit` and in loops of your own. Models are saved with the plain optimizer and its state: they
    load with and without hvdlite.

    Args:
        optimizer: any Keras 3 optimizer, built or not; it is changed in place. What `compile()`
            makes of it under "mixed_float16" is distributed in its place.
        name: the prefix of the gradients' names; without one optimizers are numbered as they are
            used.
        device_dense: ignored, as is device_sparse; scripts written for Horovod may pass them.
        device_sparse: ignored.
        compression: what happens to gradients on the way, see `Compression`.
        sparse_as_dense: makes sparse gradients (of embeddings, on TensorFlow) dense; without it
            all ranks' rows are gathered.
        gradient_predivide_factor: divides by this factor before the sum and by size / factor after
            it, for ranges that overflow otherwise.
        op: `Average` or `Sum`.
        backward_passes_per_step: how many batches accumulate on this rank before gradients are
            sent and variables updated; `optimizer.iterations` counts updates.
        average_aggregated_gradients: divides what has accumulated by that number.
        num_groups: ignored, as is groups: the core sends those together that are ready together.
        groups: ignored.

    Returns:
        The optimizer, which has become an instance of a subclass of its class of the same name.

    Raises:
        NotInitializedError: `hvd.init()` comes first.
        ArgumentError: an argument cannot be used; the message says what to do.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
        >>> model.compile(optimizer=optimizer, loss="mse")
    """
    basics.size()  # Without init() this raises here, rather than in the first batch.
    allreduce = seam().allreduce_gradients
    _check(optimizer, op, gradient_predivide_factor, backward_passes_per_step)
    _let_loss_scaling_adopt()
    _distribute(
        optimizer,
        Distribution(
            prefix=name,
            op=op,
            compression=compression,
            prescale=1.0 / gradient_predivide_factor,
            postscale=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
            passes=backward_passes_per_step,
            averages_passes=average_aggregated_gradients,
            allreduce=allreduce,
        ),
    )
    return optimizer


def _check(optimizer: Any, op: int, predivide_factor: float, passes: int) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ArgumentError(
            f"DistributedOptimizer takes an optimizer of Keras 3, such as keras.optimizers.Adam(), "
            f"not {optimizer!r}"
        )
    parts = _with_inner(optimizer)
    if any(is_distributed(part) for part in parts):
        raise ArgumentError("this optimizer is a DistributedOptimizer already")
    if op not in (ops.Average, ops.Sum):
        raise ArgumentError(
            f"op=hvd.{ops.op_name(op)} makes no gradient; use hvd.Average or hvd.Sum"
        )
    if predivide_factor != 1.0 and op != ops.Average:
        raise ArgumentError("gradient_predivide_factor goes with op=hvd.Average")
    if predivide_factor <= 0:
        raise ArgumentError("gradient_predivide_factor is a positive number")
    if not isinstance(passes, int) or passes < 1:
        raise ArgumentError("backward_passes_per_step is a whole number of at least 1")
    for part in parts:
        steps = getattr(part, "gradient_accumulation_steps", None)
        if steps:
            raise ArgumentError(
                f"gradient_accumulation_steps={steps} would send gradients in every batch; leave "
                f"it out of {type(part).__name__}(), and use hvd.DistributedOptimizer(..., "
                f"backward_passes_per_step={steps}, average_aggregated_gradients=True)"
            )


def _with_inner(optimizer: Any) -> list[Any]:
    """List an optimizer and those that it contains."""
    contained = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    return [optimizer, *(part for one in contained if one is not None for part in _with_inner(one))]


@functools.cache
def _let_loss_scaling_adopt() -> None:
    """Make a LossScaleOptimizer that is given a distributed optimizer the distributed one itself.

    `compile()` makes one under "mixed_float16". It skips the step of an optimizer if gradients are
    infinite: those of its own rank, and the others would wait for that rank. When it is the one
    that reduces, it judges the reduced gradients, and all ranks come to the same verdict.
    """
    loss_scaling = keras.optimizers.LossScaleOptimizer
    construct = loss_scaling.__init__

    @functools.wraps(construct)
    def construct_and_adopt(self: Any, *args: Any, **options: Any) -> None:
        construct(self, *args, **options)
        inner = self.inner_optimizer
        if is_distributed(inner):
            distribution = vars(inner).pop("_distribution")
            _become(inner, inner._wrapped_class)
            _distribute(self, distribution)

    loss_scaling.__init__ = construct_and_adopt
