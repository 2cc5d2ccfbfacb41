"""`DistributedOptimizer`: a Keras optimizer that applies the gradients of all ranks.

`fit` of Keras 3 reaches an optimizer by its public `apply`, on every backend: that is overridden
here. What to override in an optimizer of Keras 2 (`tf_keras`), the adapter for TensorFlow knows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras

from hvdlite import ops
from hvdlite.compression import Compressor, NoneCompressor
from hvdlite.errors import ArgumentError
from hvdlite.keras.accumulation import Accumulator
from hvdlite.keras.adapters import keras_2, seam
from hvdlite.keras.distribution import (
    Distributed,
    Distribution,
    distribute,
    give_up,
    is_distributed,
    with_inner,
)
from hvdlite.local_variables import variables_of
from hvdlite.process_sets import ProcessSet, global_process_set, registered_id


class _Applies(Distributed, keras.optimizers.Optimizer):  # type: ignore[misc]
    """What `DistributedOptimizer` adds to the class of an optimizer of Keras 3."""

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
        distribution = self._require_distribution()
        if distribution.local and isinstance(self, keras.optimizers.LossScaleOptimizer):
            raise ArgumentError(
                "local variables do not go with loss scaling, which skips a step where a gradient "
                "is infinite: on the rank whose local gradient is; use bfloat16, or no local layers"
            )
        if distribution.passes == 1:
            super().apply(distribution.reduce(gradients, indices, variables), given)
            return
        if distribution.accumulator is None:
            distribution.accumulator = Accumulator(
                self._trainable_variables, distribution.passes, distribution.averages_passes
            )
        apply_plain = super().apply
        distribution.accumulator.add(
            gradients,
            indices,
            then=lambda sums: apply_plain(distribution.reduce(sums, indices, variables), given),
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
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras optimizer apply the gradients of all ranks.

    Every gradient is reduced exactly once per step, before clipping and loss scaling look at it, in
    `fit` and in loops of your own. Models are saved with the plain optimizer and its state: they
    load with and without hvdlite.

    Args:
        optimizer: any optimizer of Keras 3 or of `tf_keras`, built or not; it is changed in place.
            What `compile()` makes of it under "mixed_float16" is distributed in its place.
        name: the prefix of the gradients' names; without one optimizers are numbered as they are
            used.
        device_dense: ignored, as is device_sparse; scripts written for Horovod may pass them.
        device_sparse: ignored.
        compression: what happens to gradients on the way, see `Compression`.
        sparse_as_dense: makes sparse gradients (of embeddings, on TensorFlow) dense; without it
            they stay sparse, and all ranks' rows are gathered where that moves less.
        gradient_predivide_factor: divides by this factor before the sum and by size / factor after
            it, for ranges that overflow otherwise.
        op: `Average`, `Sum` or `Adasum` (of the gradients, each for itself).
        backward_passes_per_step: how many batches accumulate on this rank before gradients are
            sent and variables updated; `optimizer.iterations` counts updates.
        average_aggregated_gradients: divides what has accumulated by that number.
        num_groups: ignored, as is groups: the core sends those together that are ready together.
        groups: ignored.
        process_set: over whose members gradients are reduced; other ranks apply their own.
        scale_local_gradients: divides the gradients of local variables (see `register_local_var`)
            by the number of ranks, as averaging does with those of the others.

    Returns:
        The optimizer, which has become an instance of a subclass of its class of the same name.

    Raises:
        NotInitializedError: `hvd.init()` comes first.
        ArgumentError: an argument cannot be used; the message says what to do.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
        >>> model.compile(optimizer=optimizer, loss="mse")
    """
    registered_id(process_set)  # Without init() this raises here, rather than in the first batch.
    older = keras_2(optimizer)
    framework = older or seam()
    _check(optimizer, op, gradient_predivide_factor)
    distribution = Distribution(
        prefix=name,
        op=op,
        compression=compression,
        prescale=1.0 / gradient_predivide_factor,
        postscale=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        passes=ops.check_passes(backward_passes_per_step),
        averages_passes=average_aggregated_gradients,
        allreduce=framework.allreduce_gradients,
        scale=framework.scale_gradient,
        scales_local=scale_local_gradients,
        process_set=process_set,
    )
    if older is not None:
        older.distribute_optimizer(optimizer, distribution)
    else:
        _let_loss_scaling_adopt()
        _distribute(optimizer, distribution)
    return optimizer


def _distribute(optimizer: Any, distribution: Distribution) -> None:
    distribute(optimizer, _Applies, distribution)
    seam().keep_apply(optimizer)


def PartialDistributedOptimizer(
    optimizer: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Make a Keras optimizer apply the gradients of all ranks, but for some layers.

    Those layers are this rank's own: experts, or the tables of this rank's part of the data.

    Args:
        optimizer: as for `DistributedOptimizer`.
        args: as for `DistributedOptimizer`.
        local_layers: a layer or several whose weights stay local; built already.
        options: as for `DistributedOptimizer`.

    Raises:
        ArgumentError: as `DistributedOptimizer`, or a layer has no weights yet.

    Example:
        >>> optimizer = hvd.PartialDistributedOptimizer(
        ...     keras.optimizers.Adam(1e-3), local_layers=[model.get_layer("expert")])
    """
    distributed = DistributedOptimizer(optimizer, *args, **options)
    for variable in variables_of(local_layers):
        distributed.register_local_var(variable)
    return distributed


def _check(optimizer: Any, op: int, predivide_factor: float) -> None:
    accepted = (keras_2(optimizer) or keras.optimizers).Optimizer
    if not isinstance(optimizer, accepted):
        raise ArgumentError(
            "DistributedOptimizer takes an optimizer, such as keras.optimizers.Adam() or one of "
            f"tf_keras, not {optimizer!r}"
        )
    parts = with_inner(optimizer)
    if any(is_distributed(part) for part in parts):
        raise ArgumentError("this optimizer is a DistributedOptimizer already")
    ops.check_gradient_op(op, predivide_factor)
    for part in parts:
        steps = getattr(part, "gradient_accumulation_steps", None)
        if steps:
            raise ArgumentError(
                f"gradient_accumulation_steps={steps} would send gradients in every batch; leave "
                f"it out of {type(part).__name__}(), and use hvd.DistributedOptimizer(..., "
                f"backward_passes_per_step={steps}, average_aggregated_gradients=True)"
            )


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
            _distribute(self, give_up(inner))

    loss_scaling.__init__ = construct_and_adopt
