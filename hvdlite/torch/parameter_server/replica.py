"""A worker's copy of the model: it pushes gradients to the servers, and pulls values from them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvdlite.errors import ArgumentError
from hvdlite.parameter_server.client import Client, Rows
from hvdlite.parameter_server.clocks import check_pace
from hvdlite.parameter_server.tensors import TensorSpec
from hvdlite.torch.collectives.tensors import NAMES, bytes_of

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


class Replica:
    """The parameters of a model whose values the servers hold; `group.replica` makes it.

    Attributes:
        clock: the number of steps that this worker has done; one that joins later begins where the
            last of the others is.

    Example:
        replica = group.replica(model.named_parameters())
        loss_of(model, batch).backward()
        replica.step()
    """

    def __init__(
        self,
        client: Client,
        named_parameters: NamedParameters,
        staleness: int | None = None,
        push_every: int = 1,
        pull_every: int = 1,
    ) -> None:
        """Register the parameters, and pull their values; see `Group.replica`.

        Args:
            client: the connections of this worker.
            named_parameters: `model.named_parameters()`.
            staleness: how many steps this worker may be ahead of the slowest one; None: any number.
            push_every: in every how many steps gradients are pushed.
            pull_every: in every how many steps values are pulled.

        Raises:
            ArgumentError: an argument cannot be used.
        """
        check_pace(staleness, push_every, pull_every)
        self._staleness = staleness
        self._push_every = push_every
        self._pull_every = pull_every
        self._steps = 0
        self._names, self._parameters = _trained(named_parameters)
        specs = [_spec(*one) for one in zip(self._names, self._parameters, strict=True)]
        # Servers read and write this directly; it is another copy where that cannot be the
        # parameter.
        self._hosts = [_host_memory(one) for one in self._parameters]
        self._memory = [bytes_of(one) for one in self._hosts]
        self._collection = client.register(specs, self._memory)
        self.clock = self._collection.clock
        self._exchange(None, pull=True, staleness=None)

    def step(self) -> None:
        """Push the gradients, forget them, and pull values.

        With `push_every` or `pull_every` above 1 a step does only what is due. Gradients that are
        not pushed yet stay where they are, so that the next backward pass adds to them.

        Raises:
            ArgumentError: no parameter has a gradient, or a gradient is not like its parameter.
            RankFailedError: a server died; the message has its last checkpoint.
        """
        self._steps += 1
        push = self._steps % self._push_every == 0
        pull = self._steps % self._pull_every == 0
        gradients = self._gradients() if push else None
        self.clock += 1
        self._exchange(gradients, pull, self._staleness)
        if push:
            for parameter in self._parameters:
                parameter.grad = None

    def pull(self) -> None:
        """Pull values now, without a bound: before an evaluation, for example."""
        self._exchange(None, pull=True, staleness=None)

    def _exchange(
        self, gradients: dict[int, memoryview | Rows] | None, pull: bool, staleness: int | None
    ) -> None:
        into = self._memory if pull else None
        self._collection.step(self.clock, gradients, into, staleness)
        if not pull:
            return
        with torch.no_grad():
            for parameter, host in zip(self._parameters, self._hosts, strict=True):
                if host.data_ptr() != parameter.data_ptr():
                    parameter.copy_(host)
                else:
                    # The values were written behind autograd's back.
                    torch.autograd.graph.increment_version(parameter)

    def _gradients(self) -> dict[int, memoryview | Rows]:
        found: dict[int, memoryview | Rows] = {}
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                found[index] = self._gradient(index, parameter.grad.detach())
        if not found:
            raise ArgumentError(
                "replica.step() found no gradient: call backward() before it, on the model whose "
                "parameters the replica has"
            )
        return found

    def _gradient(self, index: int, gradient: torch.Tensor) -> memoryview | Rows:
        parameter = self._parameters[index]
        if gradient.dtype != parameter.dtype:
            raise ArgumentError(
                f"the gradient of {self._names[index]!r} is {gradient.dtype}, and the parameter "
                f"{parameter.dtype}"
            )
        if not gradient.is_sparse:
            return bytes_of(gradient.cpu().contiguous())
        if gradient.sparse_dim() != 1:
            raise ArgumentError(
                f"the sparse gradient of {self._names[index]!r} does not have whole rows; make it "
                "dense"
            )
        gradient = gradient.cpu().coalesce()
        numbers = bytes_of(gradient.indices()[0].contiguous()).cast("q")
        return Rows(numbers, bytes_of(gradient.values().contiguous()))


def _trained(named_parameters: NamedParameters) -> tuple[list[str], list[torch.nn.Parameter]]:
    """Return the parameters that are trained; frozen ones stay with each worker."""
    try:
        named = [(name, one) for name, one in named_parameters]
    except (TypeError, ValueError):
        named = []
    if not named or not all(isinstance(name, str) for name, _ in named):
        raise ArgumentError("replica() needs names and parameters: model.named_parameters()")
    for name, one in named:
        if not isinstance(one, torch.nn.Parameter):
            raise ArgumentError(
                f"{name!r} is not a parameter; servers hold parameters alone. Buffers, such as the "
                "moments of BatchNorm, are each worker's own: give model.named_parameters()"
            )
    trained = [(name, one) for name, one in named if one.requires_grad]
    if not trained:
        raise ArgumentError("replica() got no parameter that requires a gradient")
    return [name for name, _ in trained], [one for _, one in trained]


def _spec(name: str, parameter: torch.nn.Parameter) -> TensorSpec:
    if parameter.dtype not in NAMES:
        raise ArgumentError(
            f"parameter {name!r} is {parameter.dtype}, and servers hold {', '.join(NAMES.values())}"
        )
    return TensorSpec(name, NAMES[parameter.dtype], tuple(parameter.shape))


def _host_memory(parameter: torch.nn.Parameter) -> torch.Tensor:
    values = parameter.detach()
    if values.device.type == "cpu" and values.is_contiguous():
        return values
    return values.cpu().contiguous().clone()
