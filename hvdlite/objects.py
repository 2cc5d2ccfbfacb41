"""Python objects between ranks, pickled.

Ranks are authenticated, so what arrives comes from a rank of this job; `HVDLITE_ALLOW_PICKLE=0`
forbids unpickling all the same. A rank that cannot pickle its object sends a mark, so that the
others raise instead of waiting for it.
"""

from __future__ import annotations

import pickle
from typing import Any

from hvdlite import basics
from hvdlite.bootstrap import environment
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.gather_bytes import gather_bytes
from hvdlite.operation_names import next_name
from hvdlite.process_sets import ProcessSet, check_root, global_process_set, member_id

_FAILED = b"!"  # what a rank sends that could not pickle its object; no pickle is so short


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send any picklable object of one rank to all.

    Args:
        obj: the object; only the root's is looked at.
        root_rank: the rank that sends.
        name: identifies the operation on all ranks; numbered without.
        process_set: whose members take part; all ranks without.

    Returns:
        The root's own object on the root, an equal one on the others.

    Raises:
        ArgumentError: pickling is forbidden here, or `root_rank` is no rank.
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
    """Collect one picklable object of every rank on all.

    Args:
        obj: this rank's object.
        name: identifies the operation on all ranks; numbered without.
        process_set: whose members take part; all ranks without.

    Returns:
        The objects by rank, without those of ranks that have joined (`hvd.join`); this rank's own
        among them is a copy.

    Raises:
        ArgumentError: pickling is forbidden here.
        HvdliteError: some rank could not pickle its object.

    Example:
        >>> allgather_object({"rank": 0})
        [{'rank': 0}]
    """
    name = name or next_name("allgather_object", member_id(process_set))
    blocks = _exchange(obj, name, process_set, sends=True)
    members = zip(process_set.ranks, blocks, strict=True)
    return [_load(block, rank, name) for rank, block in members if len(block) > 0]


def _exchange(obj: Any, name: str, process_set: ProcessSet, sends: bool) -> list[memoryview]:
    """Pickle (where this rank sends) and gather everybody's bytes, by position in the set."""
    if not environment.allow_pickle():
        raise ArgumentError(
            f"'{name}' sends a pickled object, which HVDLITE_ALLOW_PICKLE=0 forbids; "
            "send tensors, or unset it"
        )
    failure: Exception | None = None
    data = b""  # as from a rank that has joined
    if sends:
        try:
            data = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # whatever a user's __reduce__ raises
            failure, data = error, _FAILED
    blocks = gather_bytes(basics.engine(), data, name, member_id(process_set))
    if failure is not None:
        raise HvdliteError(f"'{name}': this object cannot be pickled: {failure}") from failure
    return blocks


def _load(block: memoryview, rank: int, name: str) -> Any:
    if len(block) == 0:
        raise ArgumentError(f"'{name}': its root is rank {rank}, which has joined (hvd.join)")
    if block == _FAILED:
        raise HvdliteError(f"'{name}': rank {rank} could not pickle its object; see its own error")
    return pickle.loads(block)
