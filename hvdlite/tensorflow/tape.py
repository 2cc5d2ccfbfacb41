"""`DistributedGradientTape`: a tf.GradientTape whose gradients are those of all ranks.

Every step makes a new tape, so a gradient's wire name is a prefix and its position among the
sources. The prefix is the tape's `name`. Without a name, the prefix in a function is the function's
name and a count of its earlier calls of `gradient`, so that two tapes of one step (a GAN's) may be
in flight together. Eagerly each call waits for its own gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvdlite import ops
from hvdlite.errors import ArgumentError
from hvdlite.optimizers import (
    check_finite,
    check_gradient_op,
    check_weight,
    finite_level,
    local_layer_variables,
)
from hvdlite.process_sets import ProcessSet, global_process_set, registered_id
from hvdlite.replicas import warn_of_no_check
from hvdlite.tensorflow import requests
from hvdlite.tensorflow.ops import Compression
from hvdlite.tensorflow.sparse import reduce_sparse_gradient
from hvdlite.tensorflow.tracing import (
    Reduction,
    WireName,
    graph_name,
    in_xla_context,
    set_number,
    traced_as_it_is,
)


def DistributedGradientTape(
    gradtape: Any = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    weight: Any = None,
    name: str | None = None,
) -> Any:
    """Make a tape's `gradient` return the gradients of all ranks.

    In a function the reduction of each gradient starts as soon as it is ready, while others are
    computed.

    Args:
        gradtape: a tf.GradientTape, before or after its `with` block; a new one without.
        device_dense, device_sparse: accepted for scripts written for Horovod; without effect.
        compression: how gradients are compressed while they travel, see `Compression`.
        sparse_as_dense: makes tf.IndexedSlices dense; without it they stay tf.IndexedSlices, except
            in XLA, and travel as rows.
        op: `Average`, `Sum` or `Adasum` (of each gradient separately).
        gradient_predivide_factor: divides by this factor before the sum and by size / factor after
            it, for sums that would overflow otherwise.
        num_groups, groups: ignored; the core fuses gradients that are ready together.
        process_set: gradients are reduced over its members; other ranks keep their own.
        scale_local_gradients: divides the gradients of local sources (see `register_local_source`)
            by the number of ranks, as averaging does with those of the others.
        weight: makes the average a weighted one; this rank's number of samples, for example: a
            number or a scalar tensor.
        name: tells tapes apart that run at the same time in several threads, or eagerly.

    Returns:
        A tape of the same class with the state of `gradtape`, which itself does not change.

    Raises:
        ArgumentError: the arguments do not fit together.

    Example:
        >>> with tf.GradientTape() as tape:
        ...     loss = loss_of(model(images), labels)
        >>> tape = hvd.DistributedGradientTape(tape)
        >>> gradients = tape.gradient(loss, model.trainable_variables)
    """
    warn_of_no_check()
    check_gradient_op(op, gradient_predivide_factor)
    check_weight(weight, op)
    if process_set is not global_process_set:
        registered_id(process_set)
    options = {
        "reduction": Reduction(
            op, 1.0 / gradient_predivide_factor, gradient_predivide_factor, weight
        ),
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
    }
    settings = _SourceGradients(options, process_set, name, scale_local_gradients)
    gradtape = tf.GradientTape() if gradtape is None else gradtape
    if isinstance(gradtape, _Distributed):
        raise ArgumentError("this tape is a DistributedGradientTape already")
    kind: Any = type(gradtape)
    members = {"__module__": kind.__module__, "_hvdlite": settings}
    distributed: Any = type(kind.__name__, (_Distributed, kind), members)
    tape = distributed.__new__(distributed)
    tape.__dict__ = gradtape.__dict__
    return tape


def PartialDistributedGradientTape(
    gradtape: Any = None, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Make a tape's `gradient` return the gradients of all ranks, except for some local layers.

    Args:
        gradtape, args, options: as for `DistributedGradientTape`.
        local_layers: a Keras layer or several, built already, whose weights are local to each rank.

    Example:
        >>> expert = model.get_layer("expert")
        >>> tape = hvd.PartialDistributedGradientTape(tape, local_layers=[expert])
    """
    tape = DistributedGradientTape(gradtape, *args, **options)
    for variable in local_layer_variables(local_layers):
        tape.register_local_source(variable)
    return tape


class _Distributed:
    """Put before the class of a tape; shares all state with the tape that it wraps."""

    _hvdlite: _SourceGradients  # Each tape has a class of its own.

    @traced_as_it_is
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **options: Any,
    ) -> Any:
        """Compute the gradients as tf.GradientTape does, and reduce them over all ranks.

        Every rank calls it with the same sources in the same order. `use_generic_names` is accepted
        for scripts written for Horovod: wire names are never those of variables.
        """
        gradients = self._plain().gradient(target, sources, output_gradients, **options)
        flat, flat_sources = tf.nest.flatten(gradients), tf.nest.flatten(sources)
        return tf.nest.pack_sequence_as(gradients, self._hvdlite.reduce(flat, flat_sources))

    def register_local_source(self, source: Any) -> None:
        """Make a source local: its gradient is not reduced. All ranks register the same sources.

        Example:
            >>> tape = hvd.DistributedGradientTape(tape)
            >>> tape.register_local_source(table)
        """
        self._hvdlite.local.append(source)

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Compute this rank's Jacobian: it is not reduced."""
        return self._plain().jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Compute this rank's Jacobians by sample: they are not reduced."""
        return self._plain().batch_jacobian(*args, **kwargs)

    def _plain(self) -> Any:
        """Return the same tape with its original class, whose methods do not call these."""
        kind: Any = type(self).__mro__[2]
        plain = kind.__new__(kind)
        plain.__dict__ = self.__dict__
        return plain


@dataclass(frozen=True)
class _SourceGradients:
    """How a tape's gradients are reduced; those of `local` sources are not."""

    options: dict[str, Any]  # of `reduce_gradients`
    process_set: ProcessSet
    name: str | None
    scales_local: bool
    local: list[Any] = field(default_factory=list)

    def reduce(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """Reduce the gradients of sources that are not local; every rank has the same sources."""
        own = [any(source is one for one in self.local) for source in sources]
        members = self.process_set.size() or 1
        factor = 1.0 / members if self.scales_local else 1.0
        reduced = reduce_gradients(
            [None if skip else one for skip, one in zip(own, gradients, strict=True)],
            self._names(len(gradients)),
            process_set=self.process_set,
            **self.options,
        )
        for i, skipped in enumerate(own):
            if skipped and gradients[i] is not None:
                reduced[i] = tf.math.scalar_mul(factor, gradients[i])
        return reduced

    def _names(self, count: int) -> list[str]:
        prefix = self.name
        if prefix is None:
            prefix = "gradients"
            takes_part = self.process_set is global_process_set or self.process_set.included()
            if takes_part and not tf.executing_eagerly():
                prefix = graph_name(prefix, set_number(self.process_set))
        return [f"{prefix}.{i}" for i in range(count)]


def reduce_gradients(
    gradients: Sequence[Any],
    names: Sequence[str],
    reduction: Reduction,
    compression: Any,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce tensors, tf.IndexedSlices or None, which stays None, over a process set's members."""
    # In a function each gradient is an operation of its own, which starts as soon as the gradient
    # is ready. Eagerly an operation blocks, and under XLA it cannot overlap, so all gradients
    # travel in one request. It has the name of the first gradient, even if that is None on this
    # rank: ranks with different gradients then get a mismatch error.
    if process_set is not global_process_set and not process_set.included():
        return list(gradients)
    number = set_number(process_set)
    results: list[Any] = _once_finite(gradients, names) if finite_level() else list(gradients)
    dense = []
    for i, gradient in enumerate(results):
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        if is_sparse and not (sparse_as_dense or in_xla_context()):
            wire = WireName(names[i], process_set=number)
            results[i] = reduce_sparse_gradient(gradient, wire, reduction, compression)
        elif gradient is not None:
            results[i] = tf.convert_to_tensor(gradient) if is_sparse else gradient
            dense.append(i)
    together = dense and (tf.executing_eagerly() or in_xla_context())
    for positions in [dense] if together else [[i] for i in dense]:
        name = names[0] if together else names[positions[0]]
        wire = WireName(name, process_set=number, tensors=[names[i] for i in positions])
        reduced = requests.allreduce([results[i] for i in positions], wire, reduction, compression)
        for i, tensor in zip(positions, reduced, strict=True):
            results[i] = tensor
    return results


def _once_finite(gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Return the gradients, which wait for the check of HVDLITE_CHECK_FINITE."""
    if in_xla_context():
        raise ArgumentError("HVDLITE_CHECK_FINITE does not work in XLA; use jit_compile=False")
    given = {name: one for name, one in zip(names, gradients, strict=True) if one is not None}
    values = [getattr(one, "values", one) for one in given.values()]
    check = tf.numpy_function(
        lambda *finite: check_finite(names[0], zip(given, finite, strict=True)),
        [tf.reduce_all(tf.math.is_finite(one)) for one in values],
        [],
    )
    with tf.control_dependencies([check]):
        return [
            tf.IndexedSlices(tf.identity(one.values), one.indices, one.dense_shape)
            if isinstance(one, tf.IndexedSlices)
            else (None if one is None else tf.identity(one))
            for one in gradients
        ]
