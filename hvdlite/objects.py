"""Collectives of Python objects, which travel pickled; and `join`.

Ranks are authenticated, so every pickle comes from a rank of this job. `HVDLITE_ALLOW_PICKLE=0`
forbids pickles nevertheless. A rank that cannot pickle its object sends a mark instead, so that the
other ranks raise an error rather than wait.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from typing import Any

from hvdlite import basics, ops
from hvdlite.errors import ArgumentError, HvdliteError, RankFailedError
from hvdlite.ops import gather_bytes, next_name
from hvdlite.process_sets import ProcessSet, check_root, global_process_set, member_id
from hvdlite.rendezvous import environment

_FAILED = b"!"  # A rank that cannot pickle its object sends this; every pickle is longer.


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a picklable object from one rank to all.

    Args:
        obj: the object; only the root's is used.
        root_rank: the rank that sends its object.
        name: identifies the operation on all ranks; operations without a name are numbered.
        process_set: the ranks that take part; by default all.

    Returns:
        The object itself on the root, and a copy of it on the other ranks.

    Raises:
        ArgumentError: pickling is forbidden here, or `root_rank` is not a member.
        HvdliteError: the root could not pickle its object.

    Example:
        >>> settings = broadcast_object({"seed": 7}, root_rank=0)
        >>> settings["seed"]
        7
    """
    check_root(root_rank, process_set)
    is_root = basics.rank() == root_rank
    name = name or next_name("broadcast_object", member_id(process_set))
    blocks = _exchange(obj, name, process_set, sends=is_root)
    if is_root:
        return obj
    return _load(blocks[process_set.ranks.index(root_rank)], root_rank, name)


def allgather_object(
    obj: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Collect one picklable object of every rank, on all ranks.

    Args:
        obj: this rank's object.
        name: identifies the operation on all ranks; operations without a name are numbered.
        process_set: the ranks that take part; by default all.

    Returns:
        Copies of the objects of all members, this rank's included, in the order of their ranks.
        Ranks that have joined (`hvd.join`) have none in it.

    Raises:
        ArgumentError: pickling is forbidden here.
        HvdliteError: some rank could not pickle its object.

    Example:
        >>> allgather_object({"rank": 0})
        [{'rank': 0}]
    """
    name = name or next_name("allgather_object", member_id(process_set))
    blocks = _exchange(obj, name, process_set, sends=True)
    ranks: Sequence[int] = process_set.ranks
    if len(ranks) != len(blocks):  # A rank has died since; only the texts of errors name ranks.
        ranks = range(len(blocks))
    members = zip(ranks, blocks, strict=True)
    return [_load(block, rank, name) for rank, block in members if len(block) > 0]


def _exchange(obj: Any, name: str, process_set: ProcessSet, sends: bool) -> list[memoryview]:
    """Gather the pickles of all members by rank; a rank that does not send gives no bytes."""
    if not environment.allow_pickle():
        raise ArgumentError(
            f"'{name}' sends a pickled object, which HVDLITE_ALLOW_PICKLE=0 forbids; "
            "send tensors, or unset it"
        )
    failure: Exception | None = None
    data = b""
    if sends:
        try:
            data = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # A user's __reduce__ may raise anything.
            failure, data = error, _FAILED
    blocks, _ = gather_bytes(basics.engine(), data, name, member_id(process_set))
    if failure is not None:
        raise HvdliteError(f"'{name}': this object cannot be pickled: {failure}") from failure
    return blocks


def _load(block: memoryview, rank: int, name: str) -> Any:
    if len(block) == 0:
        raise ArgumentError(f"'{name}': its root is rank {rank}, which has joined (hvd.join)")
    if block == _FAILED:
        raise HvdliteError(f"'{name}': rank {rank} could not pickle its object; see its own error")
    return pickle.loads(block)


def gather_json(
    value: Any, name: str, process_set: ProcessSet = global_process_set
) -> dict[int, Any]:
    """Gather a value that JSON can represent from each member that has not joined, by rank.

    Raises:
        RankFailedError: a rank died meanwhile, so nobody knows whose values these are.
    """
    data = json.dumps(value).encode()
    blocks, _ = gather_bytes(basics.engine(), data, name, member_id(process_set))
    ranks = process_set.ranks
    if len(ranks) != len(blocks):
        raise RankFailedError(
            f"'{name}' has values of {len(blocks)} ranks, and there are {len(ranks)} now"
        )
    pairs = zip(ranks, blocks, strict=True)
    return {rank: json.loads(bytes(block)) for rank, block in pairs if len(block) > 0}


def join(device: int = -1) -> int:
    """Declare that this rank has no more data, and wait until every rank has called `join`.

    Until then the other ranks run their collectives without the ranks that have joined, in the
    world and in every process set: an average is over the ranks that still submit, and an allgather
    has no rows of the joined ranks. When all have joined, `join` returns, and all ranks take part
    again; unnamed operations are numbered from zero again. A rank that waits here does not update
    its model. To continue with the same model on all ranks, broadcast that of the rank that joined
    last.

    Args:
        device: has no effect; the parameter exists for scripts written for Horovod.

    Returns:
        The rank that joined last. Its model has seen every step.

    Raises:
        HorovodInternalError: a rank died, or left without joining.

    Example:
        >>> for batch in batches_of_this_rank:
        ...     train_on(batch)
        >>> last = hvd.join()
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    """
    handle = basics.engine().join(blocking=True)
    handle.wait()
    ops.restart_operation_names()
    return handle.last_joined
