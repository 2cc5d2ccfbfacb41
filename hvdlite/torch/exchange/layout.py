"""Checks that ranks train the same parameters in the same buckets, and explains differences.

Buckets have numbers as names, so that the ranks' requests match whatever they train. The request of
the first bucket carries a digest of the names in all buckets, as the shape of a tensor without
elements: the core compares it when it negotiates the request, and never again while it stays the
same. If digests differ, that bucket is a MismatchError on every rank, and `explain` finds the
difference.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Sequence
from typing import TypeGuard

import torch

from hvdlite import _core, basics, ops
from hvdlite.errors import DeadlockError, HvdliteError, MismatchError
from hvdlite.ops import gather_bytes, travels_as
from hvdlite.process_sets import ProcessSet, member_id
from hvdlite.replicas import ranks_text
from hvdlite.torch.collectives.submit import Reduction, start_allreduce
from hvdlite.torch.collectives.tensors import NUMBER_OF, spec


def digest(buckets: Sequence[Sequence[str]]) -> int:
    """Return a checksum of the names of the parameters in each bucket."""
    return zlib.crc32(json.dumps([list(bucket) for bucket in buckets]).encode())


def layout_spec(
    name: str, number: int, memory: torch.Tensor, wire: int | None = None
) -> _core.Tensor:
    """Describe a tensor without elements whose shape contains a digest."""
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


def differs(error: HvdliteError) -> TypeGuard[MismatchError]:
    """Return whether all ranks got this error of a first bucket, so that all of them explain it."""
    return isinstance(error, MismatchError) and not isinstance(error, DeadlockError)


def explain(
    name: str,
    buckets: Sequence[Sequence[tuple[str, torch.Tensor]]],
    in_flight: Sequence[str],
    process_set: ProcessSet,
    cause: MismatchError,
) -> MismatchError:
    """Return an error that says why ranks could not reduce a first bucket; all of them call it."""
    # Operations that not every rank has submitted are ended by an error, so that no rank waits for
    # them and the world goes on. `cause` is returned if the layouts are the same.
    own = [
        [[one, str(param.dtype).removeprefix("torch."), list(param.shape)] for one, param in bucket]
        for bucket in buckets
    ]
    data = json.dumps([own, list(in_flight)]).encode()
    number = member_id(process_set)
    blocks = gather_bytes(basics.engine(), data, f"#{name}.layout", number)
    said = {
        rank: json.loads(bytes(block))
        for rank, block in zip(process_set.ranks, blocks, strict=True)
        if len(block) > 0  # The rank has not joined.
    }
    wanted = {one for _, names in said.values() for one in names}
    _complete(wanted - {f"{name}.0", *in_flight}, process_set)
    text = _difference({rank: layout for rank, (layout, _) in said.items()})
    return cause if text is None else MismatchError(f"'{name}': {text}")


def meet_without_parameters(name: str, process_set: ProcessSet) -> None:
    """Meet the owner's first bucket without parameters; raise if other ranks train something."""
    empty = torch.empty(0, device="cpu")
    specs = [spec(f"{name}.layout", empty, empty)]
    reduction = Reduction(ops.Sum, process_set=process_set)
    try:
        start_allreduce(f"{name}.0", specs, reduction, empty, blocking=True).wait()
    except MismatchError as error:
        if not differs(error):
            raise
        raise explain(name, [], [], process_set, error) from None


def _complete(names: set[str], process_set: ProcessSet) -> None:
    """Submit operations of other ranks with a shape that no other has, to end them by an error."""
    empty = torch.empty(0, device="cpu")
    handles = []
    reduction = Reduction(ops.Sum, process_set=process_set)
    for name in sorted(names):
        handles.append(start_allreduce(name, [spec(name, empty, empty)], reduction, empty, False))
    for handle in handles:
        with contextlib.suppress(HvdliteError):
            handle.wait()


def _difference(layouts: dict[int, list[list[list[object]]]]) -> str | None:
    """Describe the first difference of the ranks' layouts; None if there is none."""
    kinds: dict[int, dict[str, tuple[object, object]]] = {}
    for rank, buckets in layouts.items():  # Buckets are in the order of backward.
        known = [known for bucket in buckets for known in bucket]
        kinds[rank] = {str(one): (dtype, shape) for one, dtype, shape in reversed(known)}
    for one in dict.fromkeys(one for kind in kinds.values() for one in kind):
        having = [rank for rank, kind in kinds.items() if one in kind]
        lacking = [rank for rank in kinds if rank not in having]
        if lacking:
            return (
                f"the parameter '{one}' is trained on {ranks_text(having)} and not on "
                f"{ranks_text(lacking)}; make, freeze, thaw and name parameters alike on every "
                "rank, and call add_param_group() on all of them"
            )
    (first, layout), *others = layouts.items()
    for rank, other in others:
        if _names_in(other) == _names_in(layout):
            continue
        for one, (dtype, shape) in kinds[first].items():
            if kinds[rank][one] != (dtype, shape):
                there = " ".join(map(str, kinds[rank][one]))
                return (
                    f"the parameter '{one}' is {dtype} {shape} on rank {first} and {there} on rank "
                    f"{rank}; give every rank the same model"
                )
        return (
            f"rank {first} and rank {rank} put the same parameters into other buckets; give "
            "every rank the same order of parameters, bucket_cap_mb, num_groups and groups"
        )
    return None


def _names_in(layout: list[list[list[object]]]) -> list[list[object]]:
    return [[known[0] for known in bucket] for bucket in layout]
