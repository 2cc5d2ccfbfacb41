"""The forming of buckets: which gradients of a reducer travel together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.compression import NoneCompressor
from hvdlite.torch.collectives.submit import Reduction
from hvdlite.torch.compression import PowerSGD
from hvdlite.torch.optimizers.bucket import Bucket
from hvdlite.torch.optimizers.gradient_memory import GradientMemory
from hvdlite.torch.optimizers.layout import digest
from hvdlite.torch.optimizers.low_rank import LowRank, Schedule

FIRST_BUCKET_BYTES = 1 << 20  # small, so that communication starts early in backward

Weight = float | Callable[[], float] | None


@dataclass
class Settings:
    """How gradients are reduced; see `DistributedOptimizer` for each."""

    reduction: Reduction
    compression: Any
    passes: int
    groups: int | Sequence[Sequence[torch.Tensor]]
    sparse_as_dense: bool
    cap_bytes: int
    weight: Weight
    bucket_view: bool = False  # gradient_as_bucket_view
    in_backward: bool = True  # reduce_in="backward"
    of_model: bool = False  # of a DistributedDataParallel, rather than of an optimizer


def form_buckets(
    name: str,
    params: list[torch.Tensor],
    names: Mapping[torch.Tensor, str],
    settings: Settings,
    schedule: Schedule | None,
) -> list[Bucket]:
    """Put parameters into buckets.

    Args:
        name: the name of the reducer.
        params: the parameters, in the order in which they were registered.
        names: their names.
        settings: how the gradients are reduced.
        schedule: when they are compressed by PowerSGD, if they are.
    """
    formed = _divide(params, settings)
    memory = GradientMemory(formed) if settings.bucket_view else None
    labels = [[names[param] for param in bucket] for bucket in formed]
    compression = settings.compression
    if isinstance(compression, PowerSGD):
        layout, compression = digest([*labels, [repr(compression)]]), NoneCompressor
    else:
        layout = digest(labels)
    low_ranks = [None if schedule is None else LowRank(bucket, schedule) for bucket in formed]
    return [
        Bucket(
            f"{name}.{number}",
            bucket,
            labels[number],
            compression,
            settings.sparse_as_dense,
            None if memory is None else functools.partial(memory.of, number),
            layout if number == 0 else None,
            low_ranks[number] or None,  # None without a matrix that is worth it
        )
        for number, bucket in enumerate(formed)
    ]


def _divide(params: list[torch.Tensor], settings: Settings) -> list[list[torch.Tensor]]:
    groups = settings.groups
    if not isinstance(groups, int):
        return follow_groups(params, groups)
    if groups > 0:
        return split_evenly(params, groups)
    return plan_buckets(params, settings.cap_bytes)


def plan_buckets(params: Sequence[torch.Tensor], cap_bytes: int) -> list[list[torch.Tensor]]:
    """Divide parameters into buckets, in the order in which backward reaches them.

    That is the reverse of their registration. A bucket has parameters of one dtype and device. It
    is closed when it has `cap_bytes`; the first of each dtype and device, when it has
    FIRST_BUCKET_BYTES.

    Example:
        >>> a, b, c = (torch.zeros(1 << 18) for _ in range(3))  # 1 MiB each
        >>> [len(bucket) for bucket in plan_buckets([a, b, c], cap_bytes=1 << 21)]
        [1, 2]
    """
    buckets: list[list[torch.Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for param in reversed(params):
        kind = (param.dtype, param.device)
        if kind not in filling:
            first = kind not in room
            room[kind] = min(FIRST_BUCKET_BYTES, cap_bytes) if first else cap_bytes
            filling[kind] = []
            buckets.append(filling[kind])
        filling[kind].append(param)
        room[kind] -= param.numel() * param.element_size()
        if room[kind] <= 0:
            del filling[kind]
    return buckets


def split_evenly(params: Sequence[torch.Tensor], count: int) -> list[list[torch.Tensor]]:
    """Divide parameters into `count` buckets of nearly equal length, in the order of backward."""
    ordered = list(reversed(params))
    bounds = [len(ordered) * i // count for i in range(count + 1)]
    parts = [ordered[bounds[i] : bounds[i + 1]] for i in range(count)]
    return [part for part in parts if part]


def follow_groups(
    params: Sequence[torch.Tensor], groups: Sequence[Sequence[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Make a bucket of each group, and one of each parameter that is in no group."""
    group_of = {param: i for i, group in enumerate(groups) for param in group}
    buckets: dict[object, list[torch.Tensor]] = {}
    for param in reversed(params):
        buckets.setdefault(group_of.get(param, param), []).append(param)
    return list(buckets.values())
