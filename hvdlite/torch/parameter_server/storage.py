"""The values that a server holds, as parameters of a torch optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hvdlite.errors import ArgumentError
from hvdlite.parameter_server.division import check_rows, check_tensors
from hvdlite.parameter_server.placement import Part
from hvdlite.parameter_server.storage import Gradient, Slot
from hvdlite.torch.collectives.memory import DTYPES, bytes_of, tensor_over
from hvdlite.torch.optimizers.wrapping import Wrapping
from hvdlite.torch.parameter_server.trial import trial_of

_JSON = "json"  # A state that is not a tensor has this dtype.

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class TorchStorage:
    """Parts of a collection, and the optimizer that updates them."""

    def __init__(
        self,
        name: str,
        parts: Sequence[Part],
        make_optimizer: MakeOptimizer,
        check_finite: bool = False,
    ) -> None:
        """Make memory for a server's parts; raise if updates depend on the number of servers."""
        # The collection's name is for messages. With `check_finite` a push with a NaN or an
        # infinity is refused.
        self._name = name
        self._parts = list(parts)
        self._check_finite = check_finite
        self.parameters = [
            torch.nn.Parameter(torch.zeros(part.shape, dtype=DTYPES[part.spec.dtype], device="cpu"))
            for part in parts
        ]
        self.optimizer = _checked(make_optimizer, self.parameters) if parts else None
        self._check_division()

    @property
    def has_momentum(self) -> bool:
        """Whether the optimizer adds up former gradients, as SGD with a momentum does."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return any(isinstance(one.get("momentum"), float) and one["momentum"] > 0 for one in groups)

    def read(self, part: int, into: memoryview) -> None:
        """Copy the values of a part."""
        values = self.parameters[part].detach()
        tensor_over(into, values.dtype, values.shape).copy_(values)

    def write(self, part: int, values: memoryview) -> None:
        """Set the values of a part."""
        own = self.parameters[part].detach()
        own.copy_(tensor_over(values, own.dtype, own.shape))

    def apply(self, gradients: Sequence[Gradient]) -> None:
        """Apply the gradients of one push; parts without a gradient stay as they are."""
        tensors = [(one.part, self._tensor(one)) for one in gradients]
        try:
            for part, gradient in tensors:
                self.parameters[part].grad = gradient
            assert self.optimizer is not None
            self.optimizer.step()
        except RuntimeError as error:
            raise ArgumentError(
                f"{type(self.optimizer).__name__} cannot apply this push: {error}"
            ) from error
        finally:
            for part, _ in tensors:
                self.parameters[part].grad = None

    def slots(self) -> Iterator[Slot]:
        """Copy all that a checkpoint needs, one by one."""
        for part, parameter in enumerate(self.parameters):
            yield _slot(part, "", parameter, parameter)
            state = self.optimizer.state.get(parameter, {}) if self.optimizer else {}
            for name, value in state.items():
                yield _slot(part, name, value, parameter)

    def restore(
        self, part: int, name: str, dtype: str, shape: Sequence[int], data: bytearray
    ) -> None:
        """Set what `slots` has copied, of the same part or put together from others."""
        if name == "":
            self.write(part, memoryview(data))
            return
        assert self.optimizer is not None
        value: Any = json.loads(data) if dtype == _JSON else None
        if dtype != _JSON:
            own: torch.dtype = getattr(torch, dtype)
            value = tensor_over(memoryview(data), own, shape)
        self.optimizer.state[self.parameters[part]][name] = value

    def _check_division(self) -> None:
        """Refuse an optimizer whose updates would depend on the number of servers."""
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            own = {id(parameter) for parameter in group["params"]}
            pairs = zip(self._parts, self.parameters, strict=True)
            parts = [part for part, parameter in pairs if id(parameter) in own]
            if any(part.servers > 1 for part in parts):
                name, update = type(self.optimizer).__name__, trial_of(self.optimizer, group)
                check_rows(parts, update, name)
                among = f"and they are divided among {parts[0].servers} servers: use one server"
                check_tensors(update, name, among)

    def _tensor(self, gradient: Gradient) -> torch.Tensor:
        """Return a gradient as a tensor over the memory in which it came."""
        own = self.parameters[gradient.part]
        if gradient.rows is None:
            dense = tensor_over(gradient.values, own.dtype, own.shape)
            self._check_values(gradient.part, dense)
            return dense
        self._check_sparse(gradient.part)
        index = self._index(gradient.part, gradient.rows)
        values = tensor_over(gradient.values, own.dtype, (len(index), *own.shape[1:]))
        self._check_values(gradient.part, values)
        return torch.sparse_coo_tensor(
            index.unsqueeze(0),
            values,
            own.shape,
            device="cpu",
            is_coalesced=True,
            check_invariants=False,
        )

    def _index(self, part: int, rows: memoryview) -> torch.Tensor:
        """Return the numbers of rows within a part, which must be ascending."""
        of = self._parts[part]
        index = tensor_over(rows, torch.int64, (len(rows),)) - of.first
        low, high = (int(index[0]), int(index[-1])) if len(index) else (0, 0)
        if low < 0 or (of.rows and high >= of.rows) or bool((index.diff() <= 0).any()):
            raise ArgumentError(
                f"rows of {of.spec.name!r} must be ascending and from {of.first} to "
                f"{of.first + of.rows - 1}"
            )
        return index

    def _check_sparse(self, part: int) -> None:
        """Refuse SGD with momentum, whose state would grow with each push of rows."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        if any(one.get("momentum") for one in groups):
            raise ArgumentError(
                f"{type(self.optimizer).__name__} with momentum cannot apply rows of "
                f"{self._parts[part].spec.name!r}: use Adagrad, or SGD without momentum"
            )

    def _check_values(self, part: int, values: torch.Tensor) -> None:
        if self._check_finite and not bool(torch.isfinite(values).all()):
            raise ArgumentError(
                f"the gradient of {self._parts[part].spec.name!r} has a NaN or an infinity"
            )


def _slot(part: int, name: str, value: Any, parameter: torch.nn.Parameter) -> Slot:
    """Copy the values of a part, or one state of its optimizer."""
    if isinstance(value, torch.Tensor):
        copy = value.detach().cpu().contiguous().clone()
        by_rows = value.shape == parameter.shape and value.dim() > 0
        by_rows = by_rows or name == ""
        dtype = str(value.dtype).removeprefix("torch.")
        return Slot(part, name, dtype, tuple(value.shape), by_rows, bytes_of(copy))
    if value is None or isinstance(value, bool | int | float):
        return Slot(part, name, _JSON, (), False, memoryview(json.dumps(value).encode()))
    raise ArgumentError(f"the state {name!r} of the optimizer is a {type(value).__name__}")


def _checked(make_optimizer: MakeOptimizer, parameters: list[torch.nn.Parameter]) -> Any:
    """Make an optimizer, and refuse what cannot update the parameters of a server."""
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
