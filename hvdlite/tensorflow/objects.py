"""Collectives of Python objects, with the arguments that Horovod has for TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdlite import objects
from hvdlite.process_sets import ProcessSet, global_process_set


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send any picklable object of one rank to all ranks; see `hvdlite.objects.broadcast_object`.

    Args:
        obj: the object; only the root's matters.
        root_rank: the rank that sends.
        session: accepted for scripts written for Horovod; without effect.
        name: identifies the operation on all ranks; a call without a name is numbered.
        process_set: its members take part; by default all ranks.

    Returns:
        A copy of the root's object; on the root, the object itself.

    Example:
        >>> hvd.broadcast_object({"seed": 7}, root_rank=0)["seed"]
        7
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return `broadcast_object` as a function of the object alone.

    Arguments as for `broadcast_object`.

    Example:
        >>> from_first = hvd.broadcast_object_fn(root_rank=0)
        >>> from_first("hello")
        'hello'
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Collect an object of every rank on all ranks; see `hvdlite.objects.allgather_object`.

    Args:
        obj: this rank's object.
        session: accepted for scripts written for Horovod; without effect.
        name: identifies the operation on all ranks; a call without a name is numbered.
        process_set: its members take part; by default all ranks.

    Returns:
        The objects, in rank order.

    Example:
        >>> hvd.allgather_object(hvd.rank())
        [0]
    """
    return objects.allgather_object(obj, name, process_set)
