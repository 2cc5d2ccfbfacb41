"""The handles that asynchronous collectives return, and how results enter autograd's graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from hvdlite import _core
from hvdlite.torch.collectives.submit import Submission
from hvdlite.torch.collectives.tensors import note_written
from hvdlite.torch.dynamo import outside_graphs

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class Handle:
    """A collective in flight: `poll` it, and `synchronize` it for the result.

    The asynchronous functions return handles; scripts do not make them. A handle keeps the tensors
    of its collective alive.

    Args:
        core: the core's handle of the collective.
        finish: makes the result of what the core returns.

    Example:
        >>> handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
        >>> total = handle.wait()
    """

    __slots__ = ("_core", "_finish", "_result")

    # The core's own handle is enough if no tensor is on a GPU.
    def __init__(self, core: Submission | _core.Handle, finish: Callable[[Any], Any]) -> None:
        self._core = core
        self._finish: Callable[[Any], Any] | None = finish
        self._result: Any = None

    def done(self) -> bool:
        """Return whether the collective has completed, successfully or with an error."""
        return self._core.done()

    def wait(self) -> Any:
        """Block until the collective has completed; return the same result at every call."""
        self._core.wait()
        if self._finish is not None:
            self._result = self._finish(self._core)
            self._finish = None
        return self._result

    def first(self) -> Handle:
        """Return a handle of the same collective whose result is the first one of its list."""
        return Handle(self._core, lambda _: self.wait()[0])


@outside_graphs
def poll(handle: Handle) -> bool:
    """Return whether an asynchronous collective has completed, so that `synchronize` is immediate.

    Args:
        handle: what an asynchronous function returned.

    Example:
        >>> handle = hvd.allreduce_async(torch.ones(2))
        >>> while not hvd.poll(handle):
        ...     ...  # something else
    """
    return handle.done()


@outside_graphs
def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous collective and return its result.

    Args:
        handle: what an asynchronous function returned.

    Returns:
        A tensor; for grouped collectives a list of tensors. In-place collectives return the tensors
        that they were given.

    Raises:
        HvdliteError: the collective failed.

    Example:
        >>> total = hvd.synchronize(hvd.allreduce_async(torch.ones(2), op=hvd.Sum))
    """
    return handle.wait()


def parameters_of(
    verb: Callable[_Parameters, Any],
) -> Callable[[Callable[..., _Result]], Callable[_Parameters, _Result]]:
    """Decorate a form of a collective that hands its arguments on: it has those of `verb`."""

    def decorate(form: Callable[..., _Result]) -> Callable[_Parameters, _Result]:
        returned = inspect.signature(form).return_annotation
        signature = inspect.signature(verb).replace(return_annotation=returned)
        form.__signature__ = signature  # type: ignore[attr-defined]
        return form

    return decorate


def tie(
    tensor: torch.Tensor,
    output: torch.Tensor,
    backward: Callable[..., torch.Tensor],
    *arguments: object,
) -> torch.Tensor:
    """Make `output` depend on `tensor` if autograd needs it; return `output`.

    `backward(gradient of output, *arguments)` returns the gradient of `tensor`. It is a collective
    itself, and can be differentiated again. The formulas are Horovod's; docs/collectives.md has
    them. None of `arguments` is one of the tensors.
    """
    # In place both are one tensor. A leaf that was overwritten in place is not tied, because
    # scripts overwrite parameters outside of any graph.
    in_place = output is tensor
    if tensor.requires_grad and torch.is_grad_enabled() and not (in_place and tensor.is_leaf):
        # `output` is in a list, because autograd would otherwise see a second input.
        return Collective.apply(tensor, [output], backward, arguments)
    if in_place:
        note_written([tensor])
    return output


class Collective(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        result: Sequence[torch.Tensor],
        backward: Callable[..., torch.Tensor],
        arguments: Sequence[object],
    ) -> torch.Tensor:
        ctx.gradient_of, ctx.arguments = backward, arguments
        if result[0] is tensor:
            ctx.mark_dirty(tensor)
        return result[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return ctx.gradient_of(gradient, *ctx.arguments), None, None, None
