"""`DistributedGradientTape`: a tf.GradientTape whose gradients are those of all ranks.

Every step makes a new tape, so a gradient's wire name is a prefix and its position among the
sources. The prefix is the tape's `name`. Without a name, the prefix in a function is the function's
name and a count of its earlier calls of `gradient`, so that two tapes of one step (a GAN's) may be
in flight together. Eagerly each call waits for its own gradients.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite import ops
from hvdlite.errors import ArgumentError
from hvdlite.optimizers import Groups, local_layer_variables
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.replicas import warn_of_no_check
from hvdlite.tensorflow.compression import Compression
from hvdlite.tensorflow.gradients.source_gradients import SourceGradients, source_gradients
from hvdlite.tensorflow.graph.tracing import traced_as_it_is


class _Distributed:
    """Put before the class of a tape; shares all state with the tape that it wraps."""

    _hvdlite: SourceGradients  # Each tape has a class of its own.

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


def DistributedGradientTape(
    gradtape: Any = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
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
        device_dense: accepted for scripts written for Horovod; without effect.
        device_sparse: likewise.
        compression: how gradients are compressed while they travel, see `Compression`.
        sparse_as_dense: makes tf.IndexedSlices dense; without it they stay tf.IndexedSlices, except
            in XLA, and travel as rows.
        op: `Average`, `Sum` or `Adasum` (of each gradient separately).
        gradient_predivide_factor: divides by this factor before the sum and by size / factor after
            it, for sums that would overflow otherwise.
        num_groups: divides the gradients into that many groups that travel together; 0: each alone.
        groups: as `num_groups`, or a list of lists of sources: each list is one group.
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
    settings = source_gradients(
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups if groups is None else groups,
        process_set,
        scale_local_gradients,
        weight,
        name,
    )
    if gradtape is None:
        gradtape = tf.GradientTape()
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
        gradtape: as for `DistributedGradientTape`.
        args: as for `DistributedGradientTape`.
        local_layers: a Keras layer or several, built already, whose weights are local to each rank.
        options: as for `DistributedGradientTape`.

    Example:
        >>> expert = model.get_layer("expert")
        >>> tape = hvd.PartialDistributedGradientTape(tape, local_layers=[expert])
    """
    tape = DistributedGradientTape(gradtape, *args, **options)
    for variable in local_layer_variables(local_layers):
        tape.register_local_source(variable)
    return tape
