"""`join`: ranks with different numbers of batches end their training loops together."""

from __future__ import annotations

from hvdlite import basics, operation_names


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
    operation_names.restart_operations()
    return handle.last_joined
