"""Handlers: each saves, restores and synchronizes one attribute of a `TorchState`.

The registry chooses the handler by the attribute's type. Attributes without a handler are plain
objects.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from hvdlite.objects import broadcast_object
from hvdlite.torch.adasum import DistributedAdasum
from hvdlite.torch.elastic.snapshot import Snapshot
from hvdlite.torch.functions import broadcast_optimizer_state, broadcast_parameters, load_exactly
from hvdlite.torch.local_sgd import Local
from hvdlite.torch.optimizer import Distributed
from hvdlite.torch.virtual.stepping import VirtualStepping


@runtime_checkable
class _Stateful(Protocol):
    """Anything with a state_dict: a scheduler, a GradScaler."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


@runtime_checkable
class _Sampler(_Stateful, Protocol):
    """A sampler that distributes its samples to the ranks: `ElasticSampler`, or one like it."""

    def record_batch(self, batch_idx: int, batch_size: int) -> Any: ...
    def reset(self) -> Any: ...


class StateHandler:
    """Saves, restores and synchronizes one attribute of a `TorchState`.

    Derive from it for types of your own, and put the class into the registry.

    Example:
        >>> class CounterHandler(StateHandler):
        ...     def save(self):
        ...         self.saved = self.value.count
        ...     def restore(self):
        ...         self.value.count = self.saved
        ...     def sync(self):
        ...         self.value.count = hvd.broadcast_object(self.value.count)
        >>> registry = hvd.elastic.state.get_handler_registry()
        >>> hvd.elastic.state.set_handler_registry([(Counter, CounterHandler), *registry])
    """

    def __init__(self, value: Any) -> None:
        """Take charge of a value."""
        self.value = value

    def save(self) -> None:
        """Keep a copy of the value's state."""
        raise NotImplementedError(f"{type(self).__name__} has no save()")

    def restore(self) -> None:
        """Go back to the copy of the last `save`."""
        raise NotImplementedError(f"{type(self).__name__} has no restore()")

    def sync(self) -> None:
        """Replace the value's state by that of rank 0."""
        raise NotImplementedError(f"{type(self).__name__} has no sync()")

    def set_value(self, value: Any) -> None:
        """Take charge of another value, and save it."""
        self.value = value
        self.save()

    def reset(self) -> None:
        """Adapt to new ranks; most values do not depend on them."""

    def layout(self) -> dict[str, str]:
        """Describe the tensors that must be alike on all ranks, by name; by default none."""
        return {}


class StateDictHandler(StateHandler):
    """Handles what has `state_dict()` and `load_state_dict()`: schedulers, GradScaler."""

    def __init__(self, value: Any) -> None:
        """Take charge of a value, and save it."""
        super().__init__(value)
        self._snapshot = Snapshot()
        self.save()

    def save(self) -> None:
        """Copy the state_dict into buffers that stay."""
        self._snapshot.take(self.value.state_dict())

    def restore(self) -> None:
        """Load a copy of the saved state_dict."""
        self._load(self._snapshot.copy())

    def sync(self) -> None:
        """Load rank 0's state_dict."""
        self._load(broadcast_object(self.value.state_dict(), root_rank=0))

    def _load(self, state_dict: Any) -> None:
        self.value.load_state_dict(state_dict)


class ModelStateHandler(StateDictHandler):
    """Handles a `torch.nn.Module`."""

    def sync(self) -> None:
        """Overwrite parameters and buffers with those of rank 0."""
        state_dict = self.value.state_dict()
        broadcast_parameters(state_dict, root_rank=0)
        if not all(isinstance(value, torch.Tensor) for value in state_dict.values()):
            self._load(state_dict)

    def layout(self) -> dict[str, str]:
        """Describe parameters and buffers."""
        return {name: _describe(value) for name, value in self.value.state_dict().items()}


class OptimizerStateHandler(StateDictHandler):
    """Handles a `torch.optim.Optimizer`, distributed or not."""

    def sync(self) -> None:
        """Replace state and options by those of rank 0, which may have more state."""
        broadcast_optimizer_state(self.value, root_rank=0)

    def restore(self) -> None:
        """Load a copy of the saved state, and drop the gradients of the step that failed."""
        super().restore()
        for group in self.value.param_groups:
            for param in group["params"]:
                param.grad = None

    def reset(self) -> None:
        """Drop the gradients of batches that no step has used; their samples come again."""
        if isinstance(self.value, VirtualStepping) and self.value._virtual is not None:
            self.value._virtual.go_on()
        if isinstance(self.value, DistributedAdasum):
            self.value.drop_accumulated()
        if isinstance(self.value, Distributed):
            self.value._reducer.drop_accumulated()
        if isinstance(self.value, Local) and self.value._starter is not None:
            self.value._starter.drop_accumulated()

    def layout(self) -> dict[str, str]:
        """Describe the parameters that it updates."""
        return {
            f"group {i}, parameter {j}": _describe(param)
            for i, group in enumerate(self.value.param_groups)
            for j, param in enumerate(group["params"])
        }

    def _load(self, state_dict: Any) -> None:
        load_exactly(self.value, state_dict)


class SamplerStateHandler(StateDictHandler):
    """Handles an `ElasticSampler`, or what has its methods."""

    def sync(self) -> None:
        """Load rank 0's state, and distribute what remains to the present ranks."""
        super().sync()
        self.value.reset()

    def reset(self) -> None:
        """Distribute what remains to the present ranks."""
        self.value.reset()


Registry = list[tuple[Any, type[StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (_Sampler, SamplerStateHandler),
    (_Stateful, StateDictHandler),
]


def get_handler_registry() -> Registry:
    """Return the pairs of a type and its handler; the first pair whose type fits counts."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the pairs of a type and its handler, for states that are made later."""
    global _registry
    _registry = registry


def handler_of(value: Any) -> StateHandler | None:
    """Make the handler of a value; return None for a plain object."""
    for kind, handler in _registry:
        # Protocols look for methods, which classes have as well as their objects.
        if isinstance(value, kind) and not isinstance(value, type):
            return handler(value)
    return None


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "not a tensor"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
