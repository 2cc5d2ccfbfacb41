"""Which parameters share a bucket, where their gradients lie, and whether ranks agree on both."""

from __future__ import annotations

import json
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hvdlite import _core, basics, ops
from hvdlite.errors import ArgumentError, DeadlockError, HvdliteError, MismatchError
from hvdlite.objects import gather_json
from hvdlite.ops import travels_as
from hvdlite.process_sets import ProcessSet
from hvdlite.replicas import ranks_text
from hvdlite.torch.collectives.submit import Reduction, start_allreduce
from hvdlite.torch.collectives.tensors import NUMBER_OF, spec

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


def form_buckets(
    params: Sequence[torch.Tensor],
    groups: int | Sequence[Sequence[torch.Tensor]],
    cap_bytes: int | None,
) -> list[list[torch.Tensor]]:
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


# The flags of each parameter say whether there is a gradient; for a sparse one that travels dense:
# a one, and its number of sparse dimensions.
FLAGS = 3
# The flags of the bucket are the number of the step, and a one. Their quotient is the mean step
# number of the ranks that take part, by which these check that they are in the same step.
COMMON_FLAGS = 2
ALIGNMENT = 16  # The unit is bytes; csrc/gpu/device_workspace.h has the same.


class GradientMemory:
    """The gradient memory of one reducer, allocated at first use and anew in a new world.

    Reduced gradients stay in it from step to step, and each `grad` is a view of it.
    """

    # It has one block of memory for each dtype and device. The block contains the reducer's buckets
    # in turn: the gradients of a bucket, then its flags. Each tensor begins at a multiple of
    # ALIGNMENT. The core lays out a batch for a GPU in the same way, also a batch of several
    # buckets, so it can reduce such a batch in place. On a GPU the block is memory of the core that
    # is registered with NCCL. On CPUs it is memory that the ranks of the host share, so that the
    # core reads the gradients of all ranks where they lie; and a plain tensor where there is no
    # room for that.

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


class BucketPlaces(NamedTuple):
    gradients: list[Place]
    flags: torch.Tensor


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
        fits: bool = wire.dtype == self.memory.dtype and wire.shape == self.memory.shape
        return fits

    def take(self, result: torch.Tensor) -> torch.Tensor:
        """Copy a result into `memory` if it is elsewhere; return `view`."""
        if result is not self.memory:
            self.memory.copy_(result)
        return self.view


def flags_dtype(wire: torch.dtype) -> torch.dtype:
    # With the dtype of the gradients, the flags travel in the same batch; but float16 is too narrow
    # for the share of a rank with a small weight.
    narrow = wire == torch.float16 or not wire.is_floating_point
    return torch.float32 if narrow else wire


# Ranks train the same parameters in the same buckets. Buckets have numbers as names, so that the
# ranks' requests match whatever they train. The request of the first bucket carries a digest of the
# names in all buckets, as the shape of a tensor without elements: the core compares it when it
# negotiates the request, and never again while it stays the same. If digests differ, that bucket is
# a MismatchError on every rank, and `other_layout` finds the difference. Other buckets may then be
# in flight on some ranks alone, and nobody waits for them.


def digest(buckets: Sequence[Sequence[str]]) -> int:
    return zlib.crc32(json.dumps([list(bucket) for bucket in buckets]).encode())


def layout_spec(
    name: str, number: int, memory: torch.Tensor, wire: int | None = None
) -> _core.Tensor:
    # It has the dtype and the address of `memory`, a tensor that is sent after it. So a batch whose
    # tensors are in the order of their addresses stays in this order.
    address = memory.data_ptr()
    return _core.Tensor(
        name,
        NUMBER_OF[memory.dtype],
        [0, number],
        address,
        address,
        memory.device.index if memory.is_cuda else -1,
        travels_as(wire, str(memory.dtype).removeprefix("torch.")),
    )


def differs(error: HvdliteError) -> bool:
    """Return whether all ranks got this error of a first bucket, so that all of them explain it."""
    return isinstance(error, MismatchError) and not isinstance(error, DeadlockError)


def other_layout(
    name: str, buckets: Sequence[Sequence[tuple[str, torch.Tensor]]], process_set: ProcessSet
) -> MismatchError | None:
    """Return the error that says how the ranks' layouts differ; None if they do not."""
    # All ranks call it when they could not reduce a first bucket.
    own = {
        one: [f"{str(param.dtype).removeprefix('torch.')} {list(param.shape)}", number]
        for number, bucket in enumerate(buckets)
        for one, param in bucket
    }
    text = _difference(gather_json(own, f"#{name}.layout", process_set))
    return None if text is None else MismatchError(f"'{name}': {text}")


def meet_without_parameters(name: str, process_set: ProcessSet) -> None:
    """Meet the owner's first bucket without parameters; raise if other ranks train something."""
    empty = torch.empty(0, device="cpu")  # No other rank has a tensor of this shape.
    specs = [spec(f"{name}.layout", empty, empty)]
    reduction = Reduction(ops.Sum, process_set=process_set)
    try:
        start_allreduce(f"{name}.0", specs, reduction, empty, blocking=True).wait()
    except MismatchError as error:
        if not differs(error):
            raise
        raise other_layout(name, [], process_set) or error from None


def _difference(layouts: dict[int, dict[str, list[object]]]) -> str | None:
    """Say how ranks differ in their parameters, each with its kind and the number of its bucket."""
    # Buckets are in the order of backward. The text names the first parameter that differs.
    names = dict.fromkeys(one for layout in layouts.values() for one in reversed(layout))
    for one in names:
        having = [rank for rank, layout in layouts.items() if one in layout]
        lacking = [rank for rank in layouts if rank not in having]
        if lacking:
            return (
                f"the parameter '{one}' is trained on {ranks_text(having)} and not on "
                f"{ranks_text(lacking)}; make, freeze, thaw and name parameters alike on every "
                "rank, and call add_param_group() on all of them"
            )
    cuts = {
        rank: [(one, number) for one, (_, number) in layout.items()]
        for rank, layout in layouts.items()
    }
    (first, layout), *others = layouts.items()
    for rank, other in others:
        if cuts[rank] == cuts[first]:
            continue
        for one in names:
            if layout[one][0] != other[one][0]:
                return (
                    f"the parameter '{one}' is {layout[one][0]} on rank {first} and "
                    f"{other[one][0]} on rank {rank}; give every rank the same model"
                )
        return (
            f"rank {first} and rank {rank} put the same parameters into other buckets; give "
            "every rank the same order of parameters, bucket_cap_mb, num_groups and groups"
        )
    return None
