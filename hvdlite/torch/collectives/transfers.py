"""Sends of torch tensors from one rank to another, and their gradients.

Both ranks of a transfer call it with the same tag, in the same order for each tag. Transfers
without a name are counted by source, destination and tag, so that several may be under way at once.
The backward of a send receives, and that of a receive sends. The latter does not wait there: two
ranks whose backwards go through the same transfers in different orders would wait for each other.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from hvdlite import basics
from hvdlite.errors import ArgumentError
from hvdlite.operation_names import next_name
from hvdlite.process_sets import ProcessSet, global_process_set, member_id
from hvdlite.torch.collectives.compiled_backward import queue
from hvdlite.torch.collectives.graph_breaks import outside_graphs
from hvdlite.torch.collectives.handle import Handle
from hvdlite.torch.collectives.submit import Submission, start_recv, start_send
from hvdlite.torch.collectives.tensors import (
    check,
    note_written,
    read_and_written,
    readable,
    result_of,
    spec,
)


def _peer(rank: Any, argument: str) -> int:
    try:
        return operator.index(rank)
    except TypeError:
        raise ArgumentError(f"{argument}={rank!r} is not a rank; give a whole number") from None


def _name(name: str | None, source: int, to: int, tag: int, process_set: ProcessSet) -> str:
    return name or next_name(f"send.{source}.{to}.{tag}", member_id(process_set))


def _token(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), device=tensor.device)


def _start_sending(
    tensor: torch.Tensor,
    to: int,
    tag: int,
    name: str | None,
    process_set: ProcessSet,
    blocking: bool,
) -> Handle:
    to = _peer(to, "to")
    name = _name(name, basics.rank(), to, tag, process_set)
    check(tensor, name)
    source = readable(tensor)
    core = start_send(name, spec(name, source, None), to, process_set, source, blocking)

    def finish(_: Submission) -> torch.Tensor:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return _token(tensor)
        sent: torch.Tensor = _Sent.apply(tensor, to, name, process_set)
        return sent

    return Handle(core, finish)


def _start_receiving(
    tensor: torch.Tensor,
    source: int,
    tag: int,
    name: str | None,
    process_set: ProcessSet,
    blocking: bool,
) -> Handle:
    source = _peer(source, "source")
    name = _name(name, source, basics.rank(), tag, process_set)
    memory, _ = read_and_written(tensor, name, "recv", True)
    core = start_recv(name, spec(name, memory, memory), source, process_set, memory, blocking)

    def finish(_: Submission) -> torch.Tensor:
        result = result_of(tensor, memory, name, True)
        note_written([tensor])
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return result
        received: torch.Tensor = _Received.apply(tensor, [memory], source, name, process_set)
        return received

    return Handle(core, finish)


class _Sent(torch.autograd.Function):  # type: ignore[misc]
    """Makes a token that stands for a tensor in the graph: its backward receives the gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, to: int, name: str, process_set: ProcessSet
    ) -> torch.Tensor:
        """Return the token."""
        ctx.like = tensor.new_empty(0)
        ctx.shape, ctx.arguments = tensor.shape, (to, 0, f"{name}.backward", process_set)
        return _token(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient that the other rank has for the tensor."""
        gradient = ctx.like.new_empty(ctx.shape)
        return recv(gradient, *ctx.arguments), None, None, None


class _Received(torch.autograd.Function):  # type: ignore[misc]
    """Ties what was received to the graph: its backward sends the gradient to the source."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        memory: list[torch.Tensor],
        source: int,
        name: str,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        """Return the tensor that was received into the memory of `tensor`."""
        ctx.arguments = (source, 0, f"{name}.backward", process_set)
        return memory[0]

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Send the gradient; what the memory had before had no effect."""
        handle = send_async(gradient, *ctx.arguments)
        # The end of the backward waits for it, and raises its error.
        queue(handle.wait)
        return None, None, None, None, None


@outside_graphs
def send(
    tensor: torch.Tensor,
    to: int,
    tag: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Send a tensor to one rank, which calls `recv`; no other rank takes part.

    It returns when the tensor may be changed, and not before the other rank receives: two ranks
    that send to each other start both transfers with `send_async` or `recv_async` first.

    Args:
        tensor: any shape; the other rank has one of the same dtype and number of elements.
        to: the rank (in the world) that receives.
        tag: tells transfers between the same ranks apart. Those of one tag meet in the order in
            which each rank calls them.
        name: identifies the transfer on both ranks, instead of `tag` and a count. The core
            remembers names that come again, which makes them cheaper.
        process_set: both ranks are its members; by default the world.

    Returns:
        A zero that depends on `tensor`, if `tensor` requires a gradient. Its `backward()` receives
        the gradient of the sent tensor from rank `to`, whose backward sends it; the gradient of
        the zero itself does not matter. Add it to a loss, or call `backward()` on it.

    Raises:
        ArgumentError: the tensor cannot be sent, or `to` is this rank, or not a member.
        MismatchError: the ranks' tensors differ in dtype, number of elements or device.

    Example:
        >>> sent = hvd.send(first_half(batch), to=1)  # on rank 0
        >>> sent.backward()  # computes the gradients of first_half
    """
    sent: torch.Tensor = _start_sending(tensor, to, tag, name, process_set, True).wait()
    return sent


@outside_graphs
def send_async(
    tensor: torch.Tensor,
    to: int,
    tag: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `send`; arguments as for `send`.

    Returns:
        A handle, for `synchronize`, which returns what `send` does and raises the errors. Until
        then the tensor must not change.

    Example:
        >>> handle = hvd.send_async(activations, to=1)
        >>> sent = hvd.synchronize(handle)
    """
    return _start_sending(tensor, to, tag, name, process_set, False)


@outside_graphs
def recv(
    tensor: torch.Tensor,
    source: int,
    tag: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Receive a tensor that one rank sends with `send`, into the memory of `tensor`.

    Args:
        tensor: contiguous; it is overwritten. If it requires a gradient, so does the result, and
            its backward sends the gradient to rank `source`.
        source: the rank (in the world) that sends.
        tag: as in `send`.
        name: as in `send`.
        process_set: as in `send`.

    Returns:
        `tensor`, or, if it requires a gradient, a tensor of the same memory in autograd's graph.

    Raises:
        ArgumentError: the tensor cannot be overwritten, or `source` is this rank, or not a member.
        MismatchError: the ranks' tensors differ in dtype, number of elements or device.

    Example:
        >>> hidden = hvd.recv(torch.empty(32, 64, requires_grad=True), source=0)  # on rank 1
        >>> loss(second_half(hidden)).backward()  # sends the gradient of `hidden` to rank 0
    """
    received: torch.Tensor = _start_receiving(tensor, source, tag, name, process_set, True).wait()
    return received


@outside_graphs
def recv_async(
    tensor: torch.Tensor,
    source: int,
    tag: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `recv`; arguments as for `recv`.

    Returns:
        A handle, for `synchronize`, which returns the result and raises the errors. Until then the
        tensor must not be used.

    Example:
        >>> handle = hvd.recv_async(torch.empty(32, 64), source=0)
        >>> hidden = hvd.synchronize(handle)
    """
    return _start_receiving(tensor, source, tag, name, process_set, False)
