"""`DistributedOptimizer`: a Keras optimizer that applies the gradients of all ranks.

`fit` of Keras 3 calls the public `apply` of an optimizer, on every backend; this module overrides
`apply`. For optimizers of Keras 2 (`tf_keras`), `keras2` overrides other methods.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from hvdlite import ops
from hvdlite.errors import ArgumentError
from hvdlite.keras.backend import backend_adapter, keras_2
from hvdlite.keras.gradients import (
    Accumulator,
    Distributed,
    GradientReduction,
    is_distributed,
    make_distributed,
    make_plain,
    with_inner,
)
from hvdlite.ops import Compressor, NoneCompressor
from hvdlite.optimizers import check_gradient_op, check_passes, local_layer_variables
from hvdlite.process_sets import ProcessSet, global_process_set, registered_id


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

    Every gradient is reduced exactly once per step, before clipping and loss scaling, in
    `fit` and in custom loops. Models are saved with the plain optimizer and its state: they
    load with and without hvdlite.

    Args:
        optimizer: any optimizer of Keras 3 or of `tf_keras`, built or not; it is changed in place.
            Under "mixed_float16" `compile()` puts a LossScaleOptimizer around it, which is then
            the distributed one.
        name: the prefix of the gradients' names; optimizers without a name are numbered in the
            order of their first use.
        device_dense, device_sparse: accepted for scripts written for Horovod; without effect.
        compression: how gradients are compressed while they travel, see `Compression`.
        sparse_as_dense: makes sparse gradients (of embeddings, on TensorFlow) dense; without it
            they stay sparse, and the rows of all ranks are gathered.
        gradient_predivide_factor: divides by this factor before the sum and by size / factor after
            it, for sums that would overflow otherwise.
        op: `Average`, `Sum` or `Adasum` (of each gradient separately).
        backward_passes_per_step: the number of batches that accumulate on this rank before
            gradients are reduced and variables updated; `optimizer.iterations` counts updates.
        average_aggregated_gradients: divides the accumulated gradients by that number.
        num_groups, groups: ignored; the core fuses gradients that are ready together.
        process_set: gradients are reduced over its members; other ranks apply their own.
        scale_local_gradients: divides the gradients of local variables (see `register_local_var`)
            by the number of ranks, as averaging does with those of the others.

    Returns:
        The optimizer, which has become an instance of a subclass of its class of the same name.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        ArgumentError: an argument cannot be used; the message says what to do.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
        >>> model.compile(optimizer=optimizer, loss="mse")
    """
    registered_id(process_set)  # Without init() this raises, rather than the first batch.
    older = keras_2(optimizer)
    _check(optimizer, op, gradient_predivide_factor)
    passes = check_passes(backward_passes_per_step)
    options = {
        "op": op,
        "compression": compression,
        "prescale_factor": 1.0 / gradient_predivide_factor,
        "postscale_factor": gradient_predivide_factor,
        "sparse_as_dense": sparse_as_dense,
    }
    accumulator = Accumulator(passes, average_aggregated_gradients) if passes > 1 else None
    framework = older or backend_adapter()
    reduction = GradientReduction(
        framework, options, process_set, name, accumulator, scale_local_gradients
    )
    if older is not None:
        older.distribute_optimizer(optimizer, reduction)
    else:
        _let_loss_scaling_adopt()
        _make_distributed(optimizer, reduction)
    return optimizer


def PartialDistributedOptimizer(
    optimizer: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Make a Keras optimizer apply the gradients of all ranks, except for some local layers.

    Each rank trains its own local layers: experts, or the tables of this rank's part of the data.
    Otherwise as `DistributedOptimizer`.

    Args:
        args, options: those of `DistributedOptimizer`.
        local_layers: a layer or several whose weights stay local; built already.

    Returns:
        The optimizer.

    Example:
        >>> optimizer = hvd.PartialDistributedOptimizer(
        ...     keras.optimizers.Adam(1e-3), local_layers=[model.get_layer("expert")])
    """
    distributed = DistributedOptimizer(optimizer, *args, **options)
    for variable in local_layer_variables(local_layers):
        distributed.register_local_var(variable)
    return distributed


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] | Compressor = NoneCompressor,
    legacy_opts: bool = False,
    *,
    safe_mode: bool = True,
    **options: Any,
) -> Any:
    """Load a model that Keras saved, with an optimizer that applies the gradients of all ranks.

    The optimizer keeps its state. Either every rank loads the file, or rank 0 alone loads it and
    `BroadcastGlobalVariablesCallback` sends its values to the others.

    Args:
        filepath: a file that `model.save` wrote, with a `DistributedOptimizer` or without.
        custom_optimizers: your own optimizer classes that the file may name.
        custom_objects: other classes and functions that the file may name, by that name.
        compression: how gradients are compressed while they travel, see `Compression`.
        legacy_opts: accepted for scripts written for Horovod; without effect.
        safe_mode: as for `keras.models.load_model`.
        options: further arguments of `DistributedOptimizer`.

    Returns:
        The model; it is compiled if the saved model was.

    Raises:
        NotInitializedError: `hvd.init()` was not called.

    Example:
        >>> model = hvd.load_model("checkpoint.keras")
        >>> model.fit(inputs, labels)
    """
    objects: dict[str, Any] = {each.__name__: each for each in custom_optimizers or ()}
    objects.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects, safe_mode=safe_mode)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not is_distributed(optimizer):
        DistributedOptimizer(optimizer, compression=compression, **options)
    return model


def _check(optimizer: Any, op: int, predivide_factor: float) -> None:
    older = keras_2(optimizer)
    (older or backend_adapter()).refuse_strategy()
    if not isinstance(optimizer, (older or keras.optimizers).Optimizer):
        raise ArgumentError(
            "DistributedOptimizer takes an optimizer, such as keras.optimizers.Adam() or one of "
            f"tf_keras, not {optimizer!r}"
        )
    parts = with_inner(optimizer)
    if any(is_distributed(part) for part in parts):
        raise ArgumentError("this optimizer is a DistributedOptimizer already")
    check_gradient_op(op, predivide_factor)
    for part in parts:
        steps = getattr(part, "gradient_accumulation_steps", None)
        if steps:
            raise ArgumentError(
                f"gradient_accumulation_steps={steps} would send gradients in every batch; leave "
                f"it out of {type(part).__name__}(), and use hvd.DistributedOptimizer(..., "
                f"backward_passes_per_step={steps}, average_aggregated_gradients=True)"
            )


class _Applies(Distributed, keras.optimizers.Optimizer):  # type: ignore[misc]
    """The methods that `DistributedOptimizer` adds to the class of an optimizer of Keras 3."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        gradients = list(grads)
        given = None if trainable_variables is None else list(trainable_variables)
        if given is not None and not self.built:
            self.build(given)
        # Without variables the gradients are those of what the optimizer was built with.
        variables = self._trainable_variables if given is None else given
        indices = self._indices_of(variables)
        if indices is None or len(indices) != len(gradients):
            super().apply(gradients, given)  # This raises Keras's own error.
            return
        reduction = self._require_reduction()
        gradients = reduction.weighted(gradients)
        if reduction.local and isinstance(self, keras.optimizers.LossScaleOptimizer):
            raise ArgumentError(
                "local variables do not work with loss scaling: an infinite local gradient would "
                "skip the step on its own rank only; use bfloat16, or no local layers"
            )
        accumulator = reduction.accumulator
        if accumulator is None:
            super().apply(reduction.reduce(gradients, indices, variables), given)
            return
        accumulator.build(self._trainable_variables)
        apply_plain = super().apply
        accumulator.add(
            gradients,
            indices,
            then=lambda sums: apply_plain(reduction.reduce(sums, indices, variables), given),
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


def _make_distributed(optimizer: Any, reduction: GradientReduction) -> None:
    make_distributed(optimizer, _Applies, reduction)
    backend_adapter().keep_apply(optimizer)


@functools.cache
def _let_loss_scaling_adopt() -> None:
    """Make a LossScaleOptimizer around a distributed optimizer the distributed one itself."""
    # `compile()` makes one under "mixed_float16". A LossScaleOptimizer skips the step of its inner
    # optimizer if a gradient is infinite. If it judged the gradients of its own rank, the other
    # ranks would wait for a rank that skips. When it is the one that reduces, it judges the reduced
    # gradients, and all ranks decide alike.
    loss_scaling = keras.optimizers.LossScaleOptimizer
    construct = loss_scaling.__init__

    @functools.wraps(construct)
    def construct_and_adopt(self: Any, *args: Any, **options: Any) -> None:
        construct(self, *args, **options)
        inner = self.inner_optimizer
        if is_distributed(inner):
            _make_distributed(self, make_plain(inner))

    loss_scaling.__init__ = construct_and_adopt
