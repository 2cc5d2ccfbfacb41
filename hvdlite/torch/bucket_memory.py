"""Gradient memory: reduced gradients stay in it from step to step, and each `grad` is a view of it.

A reducer has one block of memory for each dtype and device. The block contains the reducer's
buckets in turn: the gradients of a bucket, then its flags. Each tensor begins at a
multiple of ALIGNMENT. The core lays out a batch for a GPU in the same way, also a batch of several
buckets, so it can reduce such a batch in place. On a GPU the block is memory of the core that is
registered with NCCL. On CPUs it is memory that the ranks of the host share, so that the core reads
the gradients of all ranks where they lie; and a plain tensor where there is no room for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hvdlite import _core, basics

# The flags of each parameter say whether there is a gradient; for a sparse one that travels dense:
# a one, and its number of sparse dimensions.
FLAGS = 3
# The flags of the bucket are the number of the step, and a one. Their quotient is the mean step
# number of the ranks that take part, by which these check that they are in the same step.
COMMON_FLAGS = 2
ALIGNMENT = 16  # The unit is bytes; csrc/gpu/fusion_layout.h has the same.


class Place:
    """The part of the gradient memory that belongs to one parameter."""

    def __init__(self, param: torch.Tensor, memory: torch.Tensor) -> None:
        order = sorted(range(param.dim()), key=lambda i: -param.stride(i))
        if not param.permute(order).is_contiguous():
            order = list(range(param.dim()))  # It has gaps, or it overlaps.
        self._order = order if order != sorted(order) else None
        back = sorted(range(param.dim()), key=order.__getitem__)
        # `data` has its own version: backward writes to one gradient while others are in flight.
        # It is sent: contiguous, in the order of the strides.
        self.memory = memory.view([param.size(i) for i in order])
        # It has the parameter's shape and strides, and becomes its `grad`.
        self.view = self.memory.permute(back).data
        self._address = self.view.data_ptr()
        block = memory.untyped_storage()
        self._block = range(block.data_ptr(), block.data_ptr() + block.nbytes())

    def suits(self, param: torch.Tensor) -> bool:
        """Return whether the parameter still has the dtype, device and shape of this part."""
        view = self.view  # The view moves with it.
        same_kind: bool = param.dtype == view.dtype and param.device == view.device
        return same_kind and param.shape == view.shape and view.data_ptr() == self._address

    def wire(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the tensor to send for a gradient: `memory` itself, or one to pack into it."""
        if gradient is self.view:
            return self.memory
        if gradient.data_ptr() in self._block:  # Other results may be written there meanwhile.
            gradient = gradient.clone()
        ordered = gradient if self._order is None else gradient.permute(self._order)
        return ordered.contiguous()

    def takes(self, wire: torch.Tensor) -> bool:
        """Return whether the result of `wire` can be written to `memory`."""
        if wire is self.memory:
            return True
        fits: bool = wire.dtype == self.memory.dtype and wire.shape == self.memory.shape
        return fits

    def take(self, result: torch.Tensor) -> torch.Tensor:
        """Copy a result into `memory` if it is elsewhere; return `view`."""
        if result is not self.memory:
            self.memory.copy_(result)
        return self.view


class BucketPlaces(NamedTuple):
    """The part of the gradient memory that belongs to one bucket."""

    gradients: list[Place]
    flags: torch.Tensor


def flags_dtype(wire: torch.dtype) -> torch.dtype:
    """Choose the dtype of a bucket's flags."""
    # With the dtype of the gradients, the flags travel in the same batch; but float16 is too narrow
    # for the share of a rank with a small weight.
    narrow = wire == torch.float16 or not wire.is_floating_point
    return torch.float32 if narrow else wire


class GradientMemory:
    """The gradient memory of one reducer, allocated at first use and anew in a new world."""

    def __init__(self, buckets: Sequence[Sequence[torch.Tensor]]) -> None:
        self._buckets = buckets
        self._places: list[BucketPlaces] = []
        self._world: weakref.ref[_core.Engine] | None = None  # This engine owns the memory.

    def of(self, bucket: int) -> BucketPlaces:
        """Return the part of a bucket, or raise an OutOfMemoryError if the GPU has no room."""
        engine = basics.engine()
        if self._world is None or self._world() is not engine:
            self._places = self._allocate()
            self._world = weakref.ref(engine)
        return self._places[bucket]

    def _allocate(self) -> list[BucketPlaces]:
        wanted: list[tuple[_Kind, int]] = []
        for params in self._buckets:
            wanted += [((param.dtype, param.device), param.numel()) for param in params]
            first = params[0]
            wanted.append(
                ((flags_dtype(first.dtype), first.device), FLAGS * len(params) + COMMON_FLAGS)
            )
        parts = _carve(wanted)
        return [
            BucketPlaces([Place(param, next(parts)) for param in params], next(parts))
            for params in self._buckets
        ]


_Kind = tuple[torch.dtype, torch.device]


def _carve(wanted: Sequence[tuple[_Kind, int]]) -> Iterator[torch.Tensor]:
    """Allocate a block for each kind, and yield the wanted numbers of elements of it in order."""
    begins, sizes = [], dict.fromkeys((kind for kind, _ in wanted), 0)
    for kind, count in wanted:
        begins.append(sizes[kind])
        aligned = -(-count * kind[0].itemsize // ALIGNMENT) * ALIGNMENT
        sizes[kind] += aligned // kind[0].itemsize
    blocks = {kind: _allocate_block(*kind, count) for kind, count in sizes.items()}
    for (kind, count), begin in zip(wanted, begins, strict=True):
        yield blocks[kind][begin : begin + count]


def _allocate_block(dtype: torch.dtype, device: torch.device, count: int) -> torch.Tensor:
    engine, size = basics.engine(), count * dtype.itemsize
    if device.type == "cuda" and count > 0:
        slot = engine.allocate_gradient_memory(device.index, size)
        return torch.as_tensor(slot, device=device).view(dtype)
    if device.type == "cpu" and count > 0:
        memory = engine.lend_gradient_memory(size)
        if memory is not None:
            return torch.frombuffer(memory, dtype=dtype)
    return torch.empty(count, dtype=dtype, device=device)
