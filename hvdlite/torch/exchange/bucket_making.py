"""Makes the buckets of a reducer from its parameters and settings."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from hvdlite.compression import NoneCompressor
from hvdlite.torch.exchange.bucket import Bucket
from hvdlite.torch.exchange.bucket_plan import form
from hvdlite.torch.exchange.gradient_bucket import GradientBucket
from hvdlite.torch.exchange.gradient_memory import GradientMemory
from hvdlite.torch.exchange.layout import digest
from hvdlite.torch.exchange.low_rank import LowRank, Schedule
from hvdlite.torch.exchange.low_rank_bucket import LowRankBucket
from hvdlite.torch.exchange.owned_bucket import OwnedBucket
from hvdlite.torch.exchange.ownership import Ownership
from hvdlite.torch.exchange.settings import Settings


def make_buckets(
    name: str,
    params: Sequence[torch.Tensor],
    names: Mapping[torch.Tensor, str],
    settings: Settings,
    owners: Ownership | None,
    schedule: Schedule | None,
) -> Sequence[GradientBucket]:
    """Make the buckets of these parameters.

    Args:
        name: the name of the reducer.
        params: in the same order on all ranks.
        names: the names of the parameters.
        settings: how gradients are reduced.
        owners: of the parameters, by position in the process set; each gradient then goes to the
            owner of its parameter alone. None: all ranks get all gradients.
        schedule: says when PowerSGD compresses gradients; None: it never does.
    """
    formed = form(params, settings.groups, settings.cap_bytes)
    named = [[names[param] for param in bucket] for bucket in formed]
    if owners is not None:
        return _of_owners(name, formed, named, settings, owners)
    memory = GradientMemory(formed) if settings.bucket_view else None
    layout, compression = digest(named), settings.compression
    if schedule is not None:
        layout, compression = digest([*named, [repr(compression)]]), NoneCompressor

    def make(number: int, bucket: Sequence[torch.Tensor]) -> Bucket:
        arguments = (
            f"{name}.{number}",
            bucket,
            named[number],
            compression,
            settings.sparse_as_dense,
            None if memory is None else functools.partial(memory.of, number),
            layout if number == 0 else None,
        )
        low_rank = None if schedule is None else LowRank(bucket, schedule)
        return LowRankBucket(low_rank, *arguments) if low_rank else Bucket(*arguments)

    return [make(number, bucket) for number, bucket in enumerate(formed)]


def _of_owners(
    name: str,
    formed: Sequence[Sequence[torch.Tensor]],
    named: Sequence[Sequence[str]],
    settings: Settings,
    owners: Ownership,
) -> Sequence[GradientBucket]:
    layout = digest(
        [
            [f"{owners.owner(param)}:{one}" for param, one in zip(bucket, names, strict=True)]
            for bucket, names in zip(formed, named, strict=True)
        ]
    )
    waiting: list[OwnedBucket] = []
    return [
        OwnedBucket(
            f"{name}.{number}",
            bucket,
            named[number],
            owners,
            settings.reduction.process_set,
            settings.sparse_as_dense,
            waiting,
            layout if number == 0 else None,
        )
        for number, bucket in enumerate(formed)
    ]
