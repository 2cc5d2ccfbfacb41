"""Averages the buffers of a model, such as the moments of batch normalization, over all ranks."""

from __future__ import annotations

import torch
from torch import nn

from hvdlite.errors import ArgumentError
from hvdlite.ops import next_name
from hvdlite.process_sets import ProcessSet, global_process_set, member_id
from hvdlite.torch.collectives.allreduce import grouped_allreduce


def allreduce_buffers(model: nn.Module, process_set: ProcessSet = global_process_set) -> None:
    """Replace every floating-point buffer of a model by its average over the ranks.

    Each rank's batch normalization computes moving averages from that rank's batches. Call this
    function on every rank before evaluation and before a checkpoint, so that all ranks evaluate the
    same model. Buffers of other types, such as the number of batches, keep their values.

    Args:
        model: the model; its buffers are averaged in place.
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
