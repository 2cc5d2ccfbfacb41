"""Gradients that travel together: which parameters form a bucket, and one bucket's round trip.

A *bucket* is a list of parameters whose gradients are submitted as one operation. A parameter is
*present* on a rank that has a gradient for it; the others contribute zeros, and a vector of flags,
one per parameter, rides along: where no rank had a gradient, every rank leaves `grad` at None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.errors import HvdliteError
from hvdlite.torch.submit import Reduction, Submission, start_allreduce
from hvdlite.torch.tensors import check, spec

FIRST_BUCKET_BYTES = 1 << 20  # small, so that communication starts early in backward


def plan_buckets(params: Sequence[torch.Tensor], cap_bytes: int) -> list[list[torch.Tensor]]:
    """Cut parameters into buckets, in the order in which backward reaches them.

    That is the reverse of their registration. A bucket holds one dtype of one device and is closed
    when it has `cap_bytes`; the first of each when it has FIRST_BUCKET_BYTES.

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
    """Cut parameters into `count` buckets of nearly equal length, in the order of backward."""
    ordered = list(reversed(params))
    bounds = [len(ordered) * i // count for i in range(count + 1)]
    parts = [ordered[bounds[i] : bounds[i + 1]] for i in range(count)]
    return [part for part in parts if part]


def follow_groups(
    params: Sequence[torch.Tensor], groups: Sequence[Sequence[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Make a bucket of each group, and one of each parameter that is in none."""
    group_of = {param: i for i, group in enumerate(groups) for param in group}
    buckets: dict[object, list[torch.Tensor]] = {}
    for param in reversed(params):
        buckets.setdefault(group_of.get(param, param), []).append(param)
    return list(buckets.values())


@dataclass
class _Trip:
    """One gradient under way."""

    param: torch.Tensor
    gradient: torch.Tensor  # the parameter's own, or zeros
    version: int  # of `gradient` when it left; -1 where the parameter had none
    wire: torch.Tensor  # what is reduced; may be `gradient` itself
    context: Any  # of the compressor

    @property
    def present(self) -> bool:
        return self.version >= 0

    def untouched(self) -> bool:
        """Say whether nobody replaced or wrote to the gradient since it left."""
        if not self.present:
            return self.param.grad is None
        return self.param.grad is self.gradient and self.gradient._version == self.version


class Bucket:
    """The gradients of some parameters, round after round: `submit`, then `finish`.

    Between the two the gradients belong to the core. Not thread-safe.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        compression: Any,
        sparse_as_dense: bool,
    ) -> None:
        self.params = list(params)
        self.missing = len(self.params)  # parameters whose gradient is not ready; the owner counts
        self._name = f"{name}[{names[0][:100]}..{names[-1][:100]}]"
        self._names = list(names)
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._trips: list[_Trip] = []
        self._flags = torch.empty(0)
        self._handle: Submission | None = None

    @property
    def submitted(self) -> bool:
        """Whether the gradients are under way."""
        return self._handle is not None

    def submit(self, reduction: Reduction, blocking: bool) -> None:
        """Send the gradients, and zeros for those that this rank does not have.

        Raises:
            HvdliteError: a gradient cannot be sent; nothing was.
        """
        with torch.no_grad():
            trips = [self._leave(*pair) for pair in zip(self.params, self._names, strict=True)]
            flags = self._write_flags(trips)
        specs = [
            spec(name, trip.wire, trip.wire) for name, trip in zip(self._names, trips, strict=True)
        ]
        specs.append(spec(f"{self._name}.flags", flags, flags))
        keep = ([trip.wire for trip in trips], flags)
        self._handle = start_allreduce(self._name, specs, reduction, keep, blocking)
        self._trips = trips

    def _leave(self, param: torch.Tensor, name: str) -> _Trip:
        gradient, version = param.grad, -1
        if gradient is None:
            gradient = torch.zeros_like(param, memory_format=torch.contiguous_format)
        else:
            if gradient.layout != torch.strided and self._sparse_as_dense:
                gradient = param.grad = gradient.to_dense()
            version = gradient._version
        check(gradient, name)
        wire, context = self._compression.compress(gradient)
        return _Trip(param, gradient, version, wire.contiguous(), context)

    def _write_flags(self, trips: list[_Trip]) -> torch.Tensor:
        wire = trips[0].wire.dtype
        # The dtype of the gradients lets the flags ride in their batch; float16 is too narrow for
        # the share of a rank with a small weight.
        narrow = wire == torch.float16 or not wire.is_floating_point
        dtype = torch.float32 if narrow else wire
        device = trips[0].wire.device
        if self._flags.numel() != len(trips) or (self._flags.dtype, self._flags.device) != (
            dtype,
            device,
        ):
            self._flags = torch.empty(len(trips), dtype=dtype, device=device)
        if all(trip.present for trip in trips):
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor([trip.present for trip in trips], dtype=dtype))
        return self._flags

    def finish(self, counts: bool) -> None:
        """Wait, and put the results into `grad`.

        Args:
            counts: whether this rank's gradients count (its weight is not zero).

        Raises:
            HvdliteError: the reduction failed, or somebody changed a gradient that was under way.
        """
        handle, trips = self._handle, self._trips
        assert handle is not None
        handle.wait()
        self.reset()
        for name, trip in zip(self._names, trips, strict=True):
            if not trip.untouched():
                raise HvdliteError(
                    f"the gradient of {name} was changed while it was being reduced, and is wrong "
                    "now; call optimizer.synchronize() after backward(), before clipping, "
                    "unscaling, zeroing or a second backward()"
                )
        known = counts and all(trip.present for trip in trips)
        present = [True] * len(trips) if known else (self._flags > 0).tolist()
        with torch.no_grad():
            for trip, somewhere in zip(trips, present, strict=True):
                self._arrive(trip, somewhere)

    def _arrive(self, trip: _Trip, somewhere: bool) -> None:
        if not somewhere:
            trip.param.grad = None
            return
        result = self._compression.decompress(trip.wire, trip.context)
        if not trip.present:
            trip.param.grad = result
        elif result is not trip.gradient:
            trip.gradient.copy_(result)

    def reset(self) -> None:
        """Forget the round."""
        self._handle = None
        self._trips = []
        self.missing = len(self.params)
