"""Which parameters share a bucket: their gradients are submitted as one operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.errors import ArgumentError

FIRST_BUCKET_BYTES = 1 << 20  # It is small, so that communication starts early in backward.
HOST_BUCKET_BYTES = 4 << 20
GPU_BUCKET_BYTES = 25 << 20  # Launches cost more there; docs/gpu.md has the figures.


def bytes_of_cap(bucket_cap_mb: float | None) -> int | None:
    """Return the argument `bucket_cap_mb` in bytes; None leaves the choice to `plan_buckets`."""
    if bucket_cap_mb is None:
        return None
    if bucket_cap_mb <= 0:
        raise ArgumentError("bucket_cap_mb must be a positive number of MiB")
    return int(bucket_cap_mb * (1 << 20))


def form(
    params: Sequence[torch.Tensor],
    groups: int | Sequence[Sequence[torch.Tensor]],
    cap_bytes: int | None,
) -> list[list[torch.Tensor]]:
    """Divide parameters into buckets as the arguments of `DistributedOptimizer` say."""
    if not isinstance(groups, int):
        return follow_groups(params, groups)
    return split_evenly(params, groups) if groups > 0 else plan_buckets(params, cap_bytes)


def plan_buckets(params: Sequence[torch.Tensor], cap_bytes: int | None) -> list[list[torch.Tensor]]:
    """Divide parameters into buckets, in the order in which backward reaches them."""
    # That is the reverse of their registration. A bucket has parameters of one dtype and device. It
    # is closed when it has `cap_bytes`; the first of each dtype and device, when it has
    # FIRST_BUCKET_BYTES. With None, the device decides.
    buckets: list[list[torch.Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for param in reversed(params):
        kind = (param.dtype, param.device)
        if kind not in filling:
            first = kind not in room
            by_device = GPU_BUCKET_BYTES if param.is_cuda else HOST_BUCKET_BYTES
            cap = by_device if cap_bytes is None else cap_bytes
            room[kind] = min(FIRST_BUCKET_BYTES, cap) if first else cap
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
