"""Each gradient goes to the owner of its parameter alone (`ShardedOptimizer(stage=2)`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hvdlite.torch.exchange.gradient_bucket import GradientBucket
from hvdlite.torch.exchange.gradient_exchange import GradientExchange
from hvdlite.torch.exchange.layout import digest
from hvdlite.torch.exchange.owned_bucket import OwnedBucket
from hvdlite.torch.exchange.ownership import Division, Ownership
from hvdlite.torch.exchange.settings import Settings


class OwnedExchange(GradientExchange):
    """Reduces each gradient to the rank that updates its parameter."""

    divides = True

    def __init__(self, name: str, settings: Settings, division: Division) -> None:
        """Make it for the owners, by position in the process set."""
        super().__init__(name, settings)
        self._division = division
        self._owners: Ownership | None = None  # It is for the parameters in the buckets.

    def outdated(self, takes_part: bool) -> bool:
        """Return whether the owners are others than those of the buckets."""
        return (self._division.present() if takes_part else None) is not self._owners

    def make_buckets(
        self, params: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]
    ) -> Sequence[GradientBucket]:
        """Make the buckets, whose parameters get owners if they have none."""
        self._owners = None
        if not params:  # A rank that is not a member has none.
            return []
        owners = self._owners = self._division.present()
        owners.take(params)
        formed, named = self._form(params, names)
        layout = digest(
            [
                [f"{owners.owner(param)}:{one}" for param, one in zip(bucket, names, strict=True)]
                for bucket, names in zip(formed, named, strict=True)
            ]
        )
        waiting: list[OwnedBucket] = []
        return [
            OwnedBucket(
                f"{self._name}.{number}",
                bucket,
                named[number],
                owners,
                self._settings.reduction.process_set,
                self._settings.sparse_as_dense,
                waiting,
                layout if number == 0 else None,
            )
            for number, bucket in enumerate(formed)
        ]
