"""What ranks must have alike of the parameters that they train, and what to say if they do not.

Buckets are numbered, so that ranks meet in them whatever they train. The request of the first one
carries a digest of the names in all buckets, as the shape of a tensor without elements: the core
compares it when it negotiates the request, and never again while it stays the same. Where digests
differ, that bucket is a MismatchError on every rank, and `explain` finds out what is behind it.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Sequence

import torch

from hvdlite import _core, basics, ops
from hvdlite.errors import HvdliteError, MismatchError
from hvdlite.gather_bytes import gather_bytes
from hvdlite.process_sets import ProcessSet, member_id
from hvdlite.replicas import ranks_text
from hvdlite.torch.collectives.submit import Reduction, start_allreduce
from hvdlite.torch.collectives.tensors import NUMBER_OF, spec
from hvdlite.torch.compression import WIDE


def digest(buckets: Sequence[Sequence[str]]) -> int:
    """Return a number that tells apart which parameters lie in which buckets.

    Example:
        >>> digest([["a", "b"]]) == digest([["a"], ["b"]])
        False
    """
    return zlib.crc32(json.dumps([list(bucket) for bucket in buckets]).encode())


def layout_spec(
    name: str, number: int, memory: torch.Tensor, wire: int | None = None
) -> _core.Tensor:
    """Describe a tensor without elements whose shape says a digest.

    It lies at the beginning of `memory`, a tensor that is sent behind it, and has its dtype. So a
    batch that is laid out in order stays so.
    """
    address = memory.data_ptr()
    return _core.Tensor(
        name,
        NUMBER_OF[memory.dtype],
        [0, number],
        address,
        address,
        memory.device.index if memory.is_cuda else -1,
        wire if memory.dtype in WIDE else None,
    )


def explain(
    name: str,
    buckets: Sequence[Sequence[tuple[str, torch.Tensor]]],
    in_flight: Sequence[str],
    process_set: ProcessSet,
    cause: MismatchError,
) -> MismatchError:
    """Find out why ranks could not reduce a first bucket together; all of them call it.

    Operations that not every rank has submitted are brought to their ends, so that nobody waits for
    them and the world goes on.

    Args:
        name: of what the buckets belong to.
        buckets: the named parameters of this rank.
        in_flight: the operations of the buckets that this rank has submitted.
        process_set: whose members reduce the buckets.
        cause: what the core said.

    Returns:
        An error that names the parameter and the ranks; `cause`, where layouts are the same.
    """
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
        if len(block) > 0  # it has not joined
    }
    wanted = {one for _, names in said.values() for one in names}
    _complete(wanted - {f"{name}.0", *in_flight}, process_set)
    text = _difference({rank: layout for rank, (layout, _) in said.items()})
    return cause if text is None else MismatchError(f"'{name}': {text}")


def meet_without_parameters(name: str, process_set: ProcessSet) -> None:
    """Take part in a first bucket of that owner on a rank that trains nothing.

    Raises:
        MismatchError: other ranks train something.
    """
    empty = torch.empty(0)
    specs = [spec(f"{name}.layout", empty, empty)]
    reduction = Reduction(ops.Sum, process_set=process_set)
    try:
        start_allreduce(f"{name}.0", specs, reduction, empty, blocking=True).wait()
    except MismatchError as error:
        raise explain(name, [], [], process_set, error) from None


def _complete(names: set[str], process_set: ProcessSet) -> None:
    """End operations that this rank lacks, by an error: nobody else has submitted the like."""
    empty = torch.empty(0)
    handles = []
    reduction = Reduction(ops.Sum, process_set=process_set)
    for name in sorted(names):
        handles.append(start_allreduce(name, [spec(name, empty, empty)], reduction, empty, False))
    for handle in handles:
        with contextlib.suppress(HvdliteError):
            handle.wait()


def _difference(layouts: dict[int, list[list[list[object]]]]) -> str | None:
    """Say in words where the ranks' layouts differ first; None where they do not."""
    kinds: dict[int, dict[str, tuple[object, object]]] = {}
    for rank, buckets in layouts.items():  # which go backwards
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
