"""How the gradients of one reducer travel: `GradientExchange`, one allreduce for each bucket.

A mode that sends other things, or sends them in another way, is a subclass in a file of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from hvdlite.torch.bucket_memory import GradientMemory
from hvdlite.torch.buckets import Bucket
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.exchange.bucket_plan import form
from hvdlite.torch.exchange.layout import digest
from hvdlite.torch.exchange.settings import Settings


class GradientExchange:
    """The plain exchange. Used by the threads that use the reducer."""

    # In a cycle a reducer calls `begin`, and `reduction` for each bucket that it submits. It calls
    # `begin_anew` when ranks have missed steps.

    of_one_step = True  # It says whether all gradients that are reduced together are of one step.

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name  # It begins the names of all operations, and is unique on this rank.
        self.settings = settings

    def make_buckets(
        self, params: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]
    ) -> Sequence[Bucket]:
        """Make the buckets of these parameters, whose order is the same on all ranks."""
        formed = form(params, self.settings.groups, self.settings.cap_bytes)
        named = [[names[param] for param in bucket] for bucket in formed]
        memory = GradientMemory(formed) if self.settings.bucket_view else None
        layout = digest(named)
        return [
            Bucket(
                f"{self.name}.{number}",
                bucket,
                named[number],
                self.settings.compression,
                self.settings.sparse_as_dense,
                None if memory is None else functools.partial(memory.of, number),
                layout if number == 0 else None,
            )
            for number, bucket in enumerate(formed)
        ]

    def begin_anew(self) -> None:
        """Forget what other ranks may not remember alike; each bucket does the same."""

    def begin(self) -> None:
        """Begin a cycle."""

    def reduction(self, reduction: Reduction, fresh: bool) -> Reduction:
        """Return how a bucket is combined; `fresh` says that this rank has a gradient."""
        return reduction

    def after_step(self) -> None:
        """Note the end of the optimizer's step; ranks may meet here."""
