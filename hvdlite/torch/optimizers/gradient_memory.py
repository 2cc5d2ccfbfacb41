"""Slots: memory in which reduced gradients stay from step to step, `grad` being a view of it.

A reducer has one slot for each dtype and device, in which its buckets lie one behind the other: the
gradients of a bucket, then its flags. A tensor begins at a multiple of ALIGNMENT. That is how the
core lays out a batch for a GPU, also one that holds several buckets; so it reduces such a batch
where it is. On a GPU a slot is memory of the core, which NCCL knows; on CPUs it is a plain tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hvdlite import _core, basics

# How many ride along for each parameter: whether there is a gradient; where a sparse one travels
# dense: its rows, that this is so, and how many of its dimensions are sparse.
FLAGS = 4
# And once for all of them the number of the step, and a one: their quotient is the mean over the
# ranks that take part, by which they see that they are in the same step.
COMMON_FLAGS = 2
ALIGNMENT = 16  # bytes; that of csrc/gpu/fusion_layout.h


class Place:
    """Where the reduced gradient of one parameter lies.

    Attributes:
        memory: as elements travel: contiguous, dimensions in the order of the parameter's strides.
        view: the same in the shape and the strides of the parameter; to become its `grad`.
    """

    def __init__(self, param: torch.Tensor, memory: torch.Tensor) -> None:
        order = sorted(range(param.dim()), key=lambda i: -param.stride(i))
        if not param.permute(order).is_contiguous():
            order = list(range(param.dim()))  # with gaps, or overlapping
        self._order = order if order != sorted(order) else None
        back = sorted(range(param.dim()), key=order.__getitem__)
        # `data` has a version of its own: backward writes to one gradient while others travel.
        self.memory = memory.view([param.size(i) for i in order])
        self.view = self.memory.permute(back).data
        self._address = self.view.data_ptr()
        slot = memory.untyped_storage()
        self._slot = range(slot.data_ptr(), slot.data_ptr() + slot.nbytes())

    def suits(self, param: torch.Tensor) -> bool:
        """Say whether this is still the place of the parameter, which may have moved since."""
        view = self.view  # moves with it
        same_kind: bool = param.dtype == view.dtype and param.device == view.device
        return same_kind and param.shape == view.shape and view.data_ptr() == self._address

    def wire(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient as it travels: `memory` itself, or what is packed into it."""
        if gradient is self.view:
            return self.memory
        if gradient.data_ptr() in self._slot:  # What is written there meanwhile would change it.
            gradient = gradient.clone()
        ordered = gradient if self._order is None else gradient.permute(self._order)
        return ordered.contiguous()

    def takes(self, wire: torch.Tensor) -> bool:
        """Say whether what travels as `wire` may arrive in `memory`."""
        if wire is self.memory:
            return True
        fits: bool = wire.dtype == self.memory.dtype and wire.shape == self.memory.shape
        return fits

    def take(self, result: torch.Tensor) -> torch.Tensor:
        """Put what arrived into `memory` if it is elsewhere; return `view`."""
        if result is not self.memory:
            self.memory.copy_(result)
        return self.view


class BucketPlaces(NamedTuple):
    """The part of the slots that is one bucket's."""

    gradients: list[Place]
    flags: torch.Tensor


def flags_dtype(wire: torch.dtype) -> torch.dtype:
    """Choose the dtype of a bucket's flags.

    That of its gradients lets them ride in the same batch; float16 is too narrow for the share of a
    rank with a small weight.
    """
    narrow = wire == torch.float16 or not wire.is_floating_point
    return torch.float32 if narrow else wire


class Slots:
    """The slots of one reducer, allocated when they are needed first and anew in a new world."""

    def __init__(self, buckets: Sequence[Sequence[torch.Tensor]]) -> None:
        """Plan them for these buckets of parameters."""
        self._buckets = buckets
        self._places: list[BucketPlaces] = []
        self._world: weakref.ref[_core.Engine] | None = None  # whose engine knows the slots

    def of(self, bucket: int) -> BucketPlaces:
        """Return the places of a bucket, by its number.

        Raises:
            OutOfMemoryError: there is no room on the GPU.
        """
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
    """Give so many elements of each kind, those of one kind one behind the other in one slot."""
    begins, sizes = [], dict.fromkeys((kind for kind, _ in wanted), 0)
    for kind, count in wanted:
        begins.append(sizes[kind])
        aligned = -(-count * kind[0].itemsize // ALIGNMENT) * ALIGNMENT
        sizes[kind] += aligned // kind[0].itemsize
    slots = {kind: _make_slot(*kind, count) for kind, count in sizes.items()}
    for (kind, count), begin in zip(wanted, begins, strict=True):
        yield slots[kind][begin : begin + count]


def _make_slot(dtype: torch.dtype, device: torch.device, count: int) -> torch.Tensor:
    if device.type != "cuda" or count == 0:
        return torch.empty(count, dtype=dtype, device=device)
    slot = basics.engine().allocate_gradient_memory(device.index, count * dtype.itemsize)
    return torch.as_tensor(slot, device=device).view(dtype)
