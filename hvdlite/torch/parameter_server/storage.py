"""The values that a server holds, as parameters of a torch optimizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hvdlite.errors import ArgumentError
from hvdlite.parameter_server.storage import Gradient, Slot
from hvdlite.parameter_server.tensors import TensorSpec
from hvdlite.torch.collectives.tensors import DTYPES, bytes_of, tensor_over
from hvdlite.torch.wrapping import Wrapping

_JSON = "json"  # A state that is not a tensor has this dtype.

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class TorchStorage:
    """The tensors of a server, and the optimizer that updates them."""

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        make_optimizer: MakeOptimizer,
        check_finite: bool = False,
    ) -> None:
        """Make memory for a server's tensors, and their optimizer."""
        # With `check_finite` a push with a NaN or an infinity is refused.
        self._specs = list(tensors)
        self._check_finite = check_finite
        self.parameters = [
            torch.nn.Parameter(torch.zeros(one.shape, dtype=DTYPES[one.dtype], device="cpu"))
            for one in tensors
        ]
        self.optimizer = _checked(make_optimizer, self.parameters) if tensors else None

    @property
    def has_momentum(self) -> bool:
        """Whether the optimizer adds up former gradients, as SGD with a momentum does."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return any(isinstance(one.get("momentum"), float) and one["momentum"] > 0 for one in groups)

    def read(self, tensor: int, into: memoryview) -> None:
        """Copy the values of a tensor."""
        values = self.parameters[tensor].detach()
        tensor_over(into, values.dtype, values.shape).copy_(values)

    def write(self, tensor: int, values: memoryview) -> None:
        """Set the values of a tensor."""
        own = self.parameters[tensor].detach()
        own.copy_(tensor_over(values, own.dtype, own.shape))

    def apply(self, gradients: Sequence[Gradient]) -> None:
        """Apply the gradients of one push; tensors without a gradient stay as they are."""
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
        """Copy all that a checkpoint needs, one by one."""
        for index, parameter in enumerate(self.parameters):
            yield _slot(index, "", parameter)
            state = self.optimizer.state.get(parameter, {}) if self.optimizer else {}
            for name, value in state.items():
                yield _slot(index, name, value)

    def restore(self, slot: Slot) -> None:
        """Set what `slots` has copied."""
        if slot.name == "":
            self.write(slot.tensor, slot.data)
            return
        assert self.optimizer is not None
        value: Any = None
        if slot.dtype == _JSON:
            value = json.loads(bytes(slot.data))
        else:
            dtype: torch.dtype = getattr(torch, slot.dtype)
            value = tensor_over(slot.data, dtype, slot.shape)
        self.optimizer.state[self.parameters[slot.tensor]][slot.name] = value

    def _tensor(self, gradient: Gradient) -> torch.Tensor:
        """Return a gradient as a tensor over the memory in which it came."""
        own = self.parameters[gradient.tensor]
        if gradient.rows is None:
            dense = tensor_over(gradient.values, own.dtype, own.shape)
            self._check_values(gradient.tensor, dense)
            return dense
        self._check_sparse(gradient.tensor)
        index = self._index(gradient.tensor, gradient.rows)
        values = tensor_over(gradient.values, own.dtype, (len(index), *own.shape[1:]))
        self._check_values(gradient.tensor, values)
        return torch.sparse_coo_tensor(
            index.unsqueeze(0),
            values,
            own.shape,
            device="cpu",
            is_coalesced=True,
            check_invariants=False,
        )

    def _index(self, tensor: int, rows: memoryview) -> torch.Tensor:
        """Return the numbers of rows, which must be ascending."""
        spec = self._specs[tensor]
        index = tensor_over(rows, torch.int64, (len(rows),))
        low, high = (int(index[0]), int(index[-1])) if len(index) else (0, 0)
        if low < 0 or (spec.rows and high >= spec.rows) or bool((index.diff() <= 0).any()):
            raise ArgumentError(
                f"rows of {spec.name!r} must be ascending and from 0 to {spec.rows - 1}"
            )
        return index

    def _check_sparse(self, tensor: int) -> None:
        """Refuse SGD with momentum, whose state would grow with each push of rows."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        if any(one.get("momentum") for one in groups):
            raise ArgumentError(
                f"{type(self.optimizer).__name__} with momentum cannot apply rows of "
                f"{self._specs[tensor].name!r}: use Adagrad, or SGD without momentum"
            )

    def _check_values(self, tensor: int, values: torch.Tensor) -> None:
        if self._check_finite and not bool(torch.isfinite(values).all()):
            raise ArgumentError(
                f"the gradient of {self._specs[tensor].name!r} has a NaN or an infinity"
            )


def _slot(tensor: int, name: str, value: Any) -> Slot:
    """Copy the values of a tensor, or one state of its optimizer."""
    if isinstance(value, torch.Tensor):
        copy = value.detach().cpu().contiguous().clone()
        dtype = str(value.dtype).removeprefix("torch.")
        return Slot(tensor, name, dtype, tuple(value.shape), bytes_of(copy))
    if value is None or isinstance(value, bool | int | float):
        return Slot(tensor, name, _JSON, (), memoryview(json.dumps(value).encode()))
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
