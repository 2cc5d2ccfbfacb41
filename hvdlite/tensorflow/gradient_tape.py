"""`DistributedGradientTape`: a tf.GradientTape whose gradients are those of all ranks.

A tape is made anew in every step, so its gradients are named by their positions among the sources.
What stands before the position: the tape's `name`; else, in a function, the function and how many
gradients it took from such tapes before. Two tapes of one step (a GAN's) may thus be in flight
together in a function. Eagerly each waits for its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvdlite import ops
from hvdlite.errors import ArgumentError
from hvdlite.local_layers import variables_of
from hvdlite.process_sets import ProcessSet, global_process_set, registered_id
from hvdlite.tensorflow.compression import Compression
from hvdlite.tensorflow.gradient_lists import reduce_gradients
from hvdlite.tensorflow.names import graph_name, set_number
from hvdlite.tensorflow.requests import Reduction
from hvdlite.tensorflow.tracing import traced_as_it_is

Groups = int | Sequence[Sequence[Any]]


class _Settings(NamedTuple):
    reduction: Reduction
    compression: Any
    sparse_as_dense: bool
    groups: Groups
    name: str | None
    local: list[Any]  # sources whose gradients are not reduced
    scales_local: bool
    process_set: ProcessSet


class _Distributed:
    """What is put before the class of a tape; shares all state with the tape that it wraps."""

    _hvdlite: _Settings  # of the class that was made for one tape

    @traced_as_it_is
    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients as tf.GradientTape does, and reduce them over all ranks.

        Every rank calls it with the same sources in the same order.
        """
        gradients = self._plain().gradient(target, sources, *args, **kwargs)
        flat, flat_sources = tf.nest.flatten(gradients), tf.nest.flatten(sources)
        local = [self._is_local(source) for source in flat_sources]
        members = self._hvdlite.process_set.size() or 1
        factor = 1.0 / members if self._hvdlite.scales_local else 1.0
        reduced = self._reduce(
            [None if own else one for own, one in zip(local, flat, strict=True)], flat_sources
        )
        for i, own in enumerate(local):
            if own and flat[i] is not None:
                reduced[i] = tf.math.scalar_mul(factor, flat[i])
        return tf.nest.pack_sequence_as(gradients, reduced)

    def register_local_source(self, source: Any) -> None:
        """Keep a source this rank's own: its gradient is not reduced. All ranks register the same.

        Example:
            >>> tape = hvd.DistributedGradientTape(tape)
            >>> tape.register_local_source(table)
        """
        self._hvdlite.local.append(source)

    def _is_local(self, source: Any) -> bool:
        return any(source is one for one in self._hvdlite.local)

    def _reduce(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        settings = self._hvdlite
        prefix = settings.name
        if prefix is None:
            prefix = "gradients"
            takes_part = (
                settings.process_set is global_process_set or settings.process_set.included()
            )
            if takes_part and not tf.executing_eagerly():
                prefix = graph_name(prefix, set_number(settings.process_set))
        return reduce_gradients(
            gradients,
            [f"{prefix}.{i}" for i in range(len(gradients))],
            settings.reduction,
            settings.compression,
            settings.sparse_as_dense,
            _positions(settings.groups, sources),
            settings.process_set,
        )

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Compute this rank's Jacobian: it is not reduced."""
        return self._plain().jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Compute this rank's Jacobians by sample: they are not reduced."""
        return self._plain().batch_jacobian(*args, **kwargs)

    def _plain(self) -> Any:
        """View the same tape as what it was, whose methods call each other and not these."""
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

    In a function every gradient is on its way as soon as it is there, while others are computed.

    Args:
        gradtape: a tf.GradientTape, before or after its `with` block; a new one without.
        device_dense: accepted for scripts written for Horovod; without effect.
        device_sparse: likewise.
        compression: what happens to gradients on the way, see `Compression`.
        sparse_as_dense: makes tf.IndexedSlices dense; without it their rows are gathered.
        op: `Average`, `Sum` or `Adasum` (of the gradients, each for itself).
        gradient_predivide_factor: divides by this factor before the sum and by size / factor after
            it, for ranges that overflow otherwise.
        num_groups: cuts the gradients into that many groups that travel together; 0: alone each.
        groups: as `num_groups`, or a list of lists of sources: each list is one group.
        process_set: over whose members gradients are reduced; other ranks keep their own.
        scale_local_gradients: divides the gradients of local sources (see `register_local_source`)
            by the number of ranks, as averaging does with those of the others.
        weight: makes the average one over samples: this rank's number of them, say, as a number or
            a scalar tensor.
        name: tells tapes apart that run at the same time in several threads, or eagerly.

    Returns:
        A tape of the same class with the state of `gradtape`, which itself stays as it is.

    Raises:
        ArgumentError: the arguments do not go together.

    Example:
        >>> with tf.GradientTape() as tape:
        ...     loss = loss_of(model(images), labels)
        >>> tape = hvd.DistributedGradientTape(tape)
        >>> gradients = tape.gradient(loss, model.trainable_variables)
    """
    reduction = _reduction(op, gradient_predivide_factor, weight)
    if process_set is not global_process_set:
        registered_id(process_set)
    if gradtape is None:
        gradtape = tf.GradientTape()
    if isinstance(gradtape, _Distributed):
        raise ArgumentError("this tape is a DistributedGradientTape already")
    groups = _check_groups(num_groups if groups is None else groups)
    settings = _Settings(
        reduction,
        compression,
        sparse_as_dense,
        groups,
        name,
        [],
        scale_local_gradients,
        process_set,
    )
    kind: Any = type(gradtape)
    members = {"__module__": kind.__module__, "_hvdlite": settings}
    distributed: Any = type(kind.__name__, (_Distributed, kind), members)
    tape = distributed.__new__(distributed)
    tape.__dict__ = gradtape.__dict__
    return tape


def _reduction(op: int, predivide_factor: float, weight: Any) -> Reduction:
    ops.check_gradient_op(op, predivide_factor)
    if weight is not None and op != ops.Average:
        raise ArgumentError("weight goes with op=hvd.Average")
    return Reduction(op, 1.0 / predivide_factor, predivide_factor, weight)


def PartialDistributedGradientTape(
    gradtape: Any = None, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Make a tape's `gradient` return the gradients of all ranks, but for some layers.

    Args:
        gradtape: as for `DistributedGradientTape`.
        args: as for `DistributedGradientTape`.
        local_layers: a Keras layer or several, built already, whose weights are this rank's own.
        options: as for `DistributedGradientTape`.

    Example:
        >>> expert = model.get_layer("expert")
        >>> tape = hvd.PartialDistributedGradientTape(tape, local_layers=[expert])
    """
    tape = DistributedGradientTape(gradtape, *args, **options)
    for variable in variables_of(local_layers):
        tape.register_local_source(variable)
    return tape


def _check_groups(groups: Groups) -> Groups:
    if isinstance(groups, int):
        if groups < 0:
            raise ArgumentError("the number of groups is zero (each gradient alone) or more")
        return groups
    lists = [list(group) for group in groups]
    members = [id(source) for group in lists for source in group]
    if len(members) != len(set(members)):
        raise ArgumentError("a source is in two groups, or twice in one")
    return lists


def _positions(groups: Groups, sources: Sequence[Any]) -> list[list[int]]:
    """Return the positions of the sources of each group."""
    if isinstance(groups, int):
        count = min(groups, len(sources))
        bounds = [len(sources) * i // count for i in range(count + 1)] if count else []
        return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
    place = {id(source): position for position, source in enumerate(sources)}
    return [[place[id(one)] for one in group if id(one) in place] for group in groups]
