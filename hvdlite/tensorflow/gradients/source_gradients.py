"""Reduces gradients by source, for a tape.

Sources may be local to this rank: their gradients are not reduced.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvdlite.optimizers import Groups, check_gradient_op, check_groups, check_weight
from hvdlite.process_sets import ProcessSet, global_process_set, registered_id
from hvdlite.tensorflow.collectives.requests import Reduction
from hvdlite.tensorflow.gradients.gradient_lists import reduce_gradients
from hvdlite.tensorflow.graph.names import graph_name, set_number


@dataclass(frozen=True)
class SourceGradients:
    """How the gradients of some sources are reduced; those of `local` sources are not."""

    reduction: Reduction
    compression: Any
    sparse_as_dense: bool
    groups: Groups
    name: str | None
    scales_local: bool
    process_set: ProcessSet
    local: list[Any] = field(default_factory=list)

    def reduce(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """Reduce the gradients of sources that are not local; every rank has the same sources."""
        own = [self._is_local(source) for source in sources]
        members = self.process_set.size() or 1
        factor = 1.0 / members if self.scales_local else 1.0
        reduced = reduce_gradients(
            [None if skip else one for skip, one in zip(own, gradients, strict=True)],
            self._names(len(gradients)),
            self.reduction,
            self.compression,
            self.sparse_as_dense,
            _positions(self.groups, sources),
            self.process_set,
        )
        for i, skipped in enumerate(own):
            if skipped and gradients[i] is not None:
                reduced[i] = tf.math.scalar_mul(factor, gradients[i])
        return reduced

    def _is_local(self, source: Any) -> bool:
        return any(source is one for one in self.local)

    def _names(self, count: int) -> list[str]:
        prefix = self.name
        if prefix is None:
            prefix = "gradients"
            takes_part = self.process_set is global_process_set or self.process_set.included()
            if takes_part and not tf.executing_eagerly():
                prefix = graph_name(prefix, set_number(self.process_set))
        return [f"{prefix}.{i}" for i in range(count)]


def source_gradients(
    compression: Any,
    sparse_as_dense: bool,
    op: int,
    predivide_factor: float,
    groups: Groups,
    process_set: ProcessSet,
    scales_local: bool,
    weight: Any,
    name: str | None,
) -> SourceGradients:
    """Check the user's arguments for the reduction of gradients, and whether they fit together."""
    check_gradient_op(op, predivide_factor)
    check_weight(weight, op)
    if process_set is not global_process_set:
        registered_id(process_set)
    return SourceGradients(
        reduction=Reduction(op, 1.0 / predivide_factor, predivide_factor, weight),
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        groups=check_groups(groups, "source", none="each gradient alone"),
        name=name,
        scales_local=scales_local,
        process_set=process_set,
    )


def _positions(groups: Groups, sources: Sequence[Any]) -> list[list[int]]:
    """Return the positions of the sources of each group."""
    if isinstance(groups, int):
        count = min(groups, len(sources))
        bounds = [len(sources) * i // count for i in range(count + 1)] if count else []
        return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
    place = {id(source): position for position, source in enumerate(sources)}
    return [[place[id(one)] for one in group if id(one) in place] for group in groups]
