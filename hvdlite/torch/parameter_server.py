"""Asynchronous training with parameter servers: `hvd.parameter_server.connect()`.

Start the script by `hvdlite-run -np 8 --servers 2 python train.py`: the first two processes serve,
and the other six train. Nobody calls `hvd.init()`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any

import torch

from hvdlite.errors import ArgumentError, UndividedRateWarning
from hvdlite.parameter_server import group as neutral
from hvdlite.parameter_server.client import Client, Rows
from hvdlite.parameter_server.collection import Report, ServerReport, WorkerReport, check_pace
from hvdlite.parameter_server.tensors import ITEM_BYTES, Gradient, Slot, Storage, TensorSpec
from hvdlite.rendezvous.environment import detect
from hvdlite.torch.collectives.sparse import sparse_tensor
from hvdlite.torch.collectives.tensors import bytes_of, tensor_over
from hvdlite.torch.wrapping import Wrapping

__all__ = ["Group", "Replica", "Report", "ServerReport", "WorkerReport", "connect"]


class Group(neutral.Group):
    """The servers and workers of a job, as one of them sees them; `connect` makes it."""

    def serve(
        self,
        make_optimizer: MakeOptimizer,
        save: str | PathLike[str] | None = None,
        save_every: float = 60.0,
        load: str | PathLike[str] | None = None,
        check_finite: bool = False,
    ) -> None:
        """Serve until all workers have ended, or SIGTERM asks this process to end.

        Args:
            make_optimizer: takes a list of parameters, what this server holds, and returns their
                optimizer. Divide the rate by `group.workers`: every worker's push is one step.
            save: the path of checkpoints, of which each server writes its own file: `ps.ckpt` is
                `ps.ckpt.0-of-2` and `ps.ckpt.1-of-2`. If there is one at the start, the servers go
                on from it; their number must be the same.
            save_every: seconds between two checkpoints; the last one is written at the end.
            load: the path of another checkpoint to begin with.
            check_finite: whether to refuse a push with a NaN or an infinity; its worker gets an
                ArgumentError.

        Raises:
            ArgumentError: an argument cannot be used, or this process is a worker, or has served
                already.

        Example:
            def make_optimizer(params):
                return torch.optim.SGD(params, lr=0.1 / group.workers, momentum=0.9)

            group.serve(make_optimizer, save="ps.ckpt", save_every=600)
        """

        def make_storage(tensors: Sequence[TensorSpec]) -> Storage:
            storage = TorchStorage(tensors, make_optimizer, check_finite)
            self._warn_of_the_rate(storage)
            return storage

        self.serve_storage(make_storage, save, save_every, load)

    def _warn_of_the_rate(self, storage: TorchStorage) -> None:
        known, self.knows_workers = self.knows_workers, True
        workers = self.workers
        if known or self.index > 0 or workers == 1 or not storage.has_momentum:
            return
        warnings.warn(
            f"the optimizer of the parameter servers has a momentum, and its rate does not depend "
            f"on group.workers: each of {workers} workers makes a step of the whole rate, and such "
            "training usually diverges. Divide the rate: lr=0.1 / group.workers",
            UndividedRateWarning,
            stacklevel=2,
        )

    def replica(
        self,
        named_parameters: NamedParameters,
        staleness: int | None = None,
        push_every: int = 1,
        pull_every: int = 1,
    ) -> Replica:
        """Register the parameters of this worker's model, and pull their values.

        The first worker's values become those of all, unless the servers have a checkpoint.
        Parameters that do not require a gradient, and buffers, stay each worker's own.

        Args:
            named_parameters: `model.named_parameters()`, the same model on every worker.
            staleness: how many steps this worker may be ahead of the slowest one when it pulls;
                0 keeps workers in step, None waits for nobody.
            push_every: in every how many steps the sum of the gradients is pushed.
            pull_every: in every how many steps values are pulled.

        Returns:
            The replica, whose `step()` comes after each backward pass.

        Raises:
            ArgumentError: an argument cannot be used, or this process is a server.
            MismatchError: another worker, or the checkpoint, has another model.
            RankFailedError: a server died.

        Example:
            replica = group.replica(model.named_parameters(), staleness=3)
            for batch in batches:
                loss_of(model, batch).backward()
                replica.step()
        """
        return Replica(self.client, named_parameters, staleness, push_every, pull_every)


def connect() -> Group:
    """Connect this process to its job: a worker to all servers.

    Returns:
        The group; close it, or use it in a `with` statement, when the training is over.

    Raises:
        BootstrapError: the job has no servers, or they cannot be reached in time.

    Example:
        with hvd.parameter_server.connect() as group:
            ...
    """
    return Group(detect(with_servers=True))


NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


class Replica:
    """The parameters of a model whose values the servers hold; `group.replica` makes it.

    The arguments after `client` are those of `Group.replica`.

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
        self._client = client
        self.clock = client.register(specs, self._memory)
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
        self._client.step(self.clock, gradients, into, staleness)
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
        found = {
            index: self._gradient(index, parameter.grad.detach())
            for index, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        }
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
    dtype = str(parameter.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise ArgumentError(
            f"parameter {name!r} is {parameter.dtype}, and servers hold {', '.join(ITEM_BYTES)}"
        )
    return TensorSpec(name, dtype, tuple(parameter.shape))


def _host_memory(parameter: torch.nn.Parameter) -> torch.Tensor:
    values = parameter.detach()
    if values.device.type == "cpu" and values.is_contiguous():
        return values
    return values.cpu().contiguous().clone()


_JSON = "json"  # A state that is not a tensor has this dtype.

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class TorchStorage:
    """The tensors of a server, as parameters of the torch optimizer that updates them; a `Storage`.

    With `check_finite` a push with a NaN or an infinity is refused.
    """

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        make_optimizer: MakeOptimizer,
        check_finite: bool = False,
    ) -> None:
        self._specs = list(tensors)
        self._check_finite = check_finite
        self.parameters = [
            torch.nn.Parameter(
                torch.zeros(one.shape, dtype=getattr(torch, one.dtype), device="cpu")
            )
            for one in tensors
        ]
        self.optimizer = _checked(make_optimizer, self.parameters) if tensors else None

    @property
    def has_momentum(self) -> bool:
        """Whether the optimizer adds up former gradients, as SGD with a momentum does."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return any(one.get("momentum") for one in groups)

    def read(self, tensor: int, into: memoryview) -> None:
        values = self.parameters[tensor].detach()
        tensor_over(into, values.dtype, values.shape).copy_(values)

    def write(self, tensor: int, values: memoryview) -> None:
        own = self.parameters[tensor].detach()
        own.copy_(tensor_over(values, own.dtype, own.shape))

    def apply(self, gradients: Sequence[Gradient]) -> None:
        tensors = [(one.tensor, self._tensor(one)) for one in gradients]
        try:
            for index, gradient in tensors:
                self.parameters[index].grad = gradient
            assert self.optimizer is not None
            self.optimizer.step()
        except RuntimeError as error:
            raise ArgumentError(
                f"{type(self.optimizer).__name__} cannot apply this push: {error}"
            ) from error
        finally:
            for index, _ in tensors:
                self.parameters[index].grad = None

    def slots(self) -> Iterator[Slot]:
        for index, parameter in enumerate(self.parameters):
            yield _slot(index, "", parameter)
            state = self.optimizer.state.get(parameter, {}) if self.optimizer else {}
            for name, value in state.items():
                yield _slot(index, name, value)

    def restore(self, slot: Slot) -> None:
        if slot.name == "":
            self.write(slot.tensor, slot.data)
            return
        assert self.optimizer is not None
        if slot.dtype == _JSON:
            value = json.loads(bytes(slot.data))
        else:
            value = tensor_over(slot.data, getattr(torch, slot.dtype), slot.shape)
        self.optimizer.state[self.parameters[slot.tensor]][slot.name] = value

    def _tensor(self, gradient: Gradient) -> torch.Tensor:
        own, spec = self.parameters[gradient.tensor], self._specs[gradient.tensor]
        rows = None if gradient.rows is None else self._rows(spec, gradient.rows)
        shape = own.shape if rows is None else (len(rows), *own.shape[1:])
        values = tensor_over(gradient.values, own.dtype, shape)
        if self._check_finite and not bool(torch.isfinite(values).all()):
            raise ArgumentError(f"the gradient of {spec.name!r} has a NaN or an infinity")
        if rows is None:
            return values
        return sparse_tensor(rows.unsqueeze(0), values, own.shape, is_coalesced=True)

    def _rows(self, spec: TensorSpec, numbers: memoryview) -> torch.Tensor:
        if self.has_momentum:  # Its state would grow with each push.
            raise ArgumentError(
                f"{type(self.optimizer).__name__} with momentum cannot apply rows of "
                f"{spec.name!r}: use Adagrad, or SGD without momentum"
            )
        rows = tensor_over(numbers, torch.int64, (len(numbers),))
        low, high = (int(rows[0]), int(rows[-1])) if len(rows) else (0, 0)
        if low < 0 or (spec.rows and high >= spec.rows) or bool((rows.diff() <= 0).any()):
            raise ArgumentError(
                f"rows of {spec.name!r} must be ascending and from 0 to {spec.rows - 1}"
            )
        return rows


def _slot(tensor: int, name: str, value: Any) -> Slot:
    if isinstance(value, torch.Tensor):
        copy = value.detach().cpu().contiguous().clone()
        dtype = str(value.dtype).removeprefix("torch.")
        return Slot(tensor, name, dtype, tuple(value.shape), bytes_of(copy))
    if value is None or isinstance(value, bool | int | float):
        return Slot(tensor, name, _JSON, (), memoryview(json.dumps(value).encode()))
    raise ArgumentError(f"the state {name!r} of the optimizer is a {type(value).__name__}")


def _checked(make_optimizer: MakeOptimizer, parameters: list[torch.nn.Parameter]) -> Any:
    optimizer = make_optimizer(parameters)
    if isinstance(optimizer, Wrapping):
        raise ArgumentError(
            f"serve() got a {type(optimizer).__name__}, which works together with other ranks; a "
            "server has none: return the plain torch.optim optimizer"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            "serve() needs a function that takes a list of parameters and returns a torch "
            f"optimizer of them; it returned {optimizer!r}"
        )
    own = {id(one) for one in parameters}
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    if own != held:
        raise ArgumentError(
            f"the optimizer that serve() got has {len(held)} parameters, and not exactly the "
            f"{len(own)} that its function was given: optimize the `params` of its argument"
        )
    return optimizer
