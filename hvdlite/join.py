"""`join`: how ranks with different numbers of batches end their loops together."""

from __future__ import annotations

from hvdlite import basics, operation_names


def join(device: int = -1) -> int:
    """Say that this rank has nothing more to give, and wait until every rank says so.

    Until then the others go on among themselves: averages are over those that still give, an
    allgather has no rows of the ranks that have joined, and so on. A process set goes on without
    those of its members that have joined. Afterwards all ranks take part again; unnamed operations
    are counted from zero. While a rank waits here it takes no update: to go on with one state on
    all ranks, broadcast that of the rank that joined last.

    Args:
        device: accepted for scripts written for Horovod; without effect.

    Returns:
        The last rank that joined: its model has seen every step.

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
    operation_names.restart_operations()
    return handle.last_joined
