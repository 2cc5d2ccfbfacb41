"""The buffers of a model, such as the moments of batch normalization, on all ranks."""

from __future__ import annotations

import torch
from torch import nn

from hvdlite.errors import ArgumentError
from hvdlite.operation_names import next_name
from hvdlite.process_sets import ProcessSet, global_process_set, member_id
from hvdlite.torch.collectives.allreduce import grouped_allreduce


def allreduce_buffers(model: nn.Module, process_set: ProcessSet = global_process_set) -> None:
    """Replace every floating-point buffer of a model by its average over the ranks.

    Batch normalization keeps moving averages of what this rank sees. Call this before evaluation
    and before a checkpoint, on every rank, and ranks evaluate the same model. Buffers of other
    types stay as they are: the number of batches, for example.

    Args:
        model: whose buffers are averaged in place.
        process_set: its members take part; by default all ranks.

    Raises:
        ArgumentError: `model` is not a model, or a buffer cannot be sent.
        MismatchError: the ranks' models differ.

    Example:
        >>> hvd.allreduce_buffers(model)
        >>> accuracy = evaluate(model.eval())
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"allreduce_buffers takes a model, not a {type(model).__name__}")
    name = next_name("allreduce_buffers", member_id(process_set))
    buffers = [one for one in model.buffers() if one.is_floating_point()]
    if not buffers:
        return
    with torch.no_grad():
        averages = grouped_allreduce(
            [one.detach() for one in buffers], name=name, process_set=process_set
        )
        for buffer, average in zip(buffers, averages, strict=True):
            buffer.copy_(average)
