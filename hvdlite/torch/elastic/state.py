"""`TorchState`: models, optimizers, samplers and plain objects of an elastic job."""

from __future__ import annotations

import copy
import hashlib
import itertools
import pickle
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._pytree import tree_flatten

from hvdlite import basics
from hvdlite.elastic.state import TensorState, check_name
from hvdlite.objects import allgather_object, broadcast_object
from hvdlite.rendezvous.epochs import current
from hvdlite.torch.collectives.tensors import bytes_of
from hvdlite.torch.functions import broadcast_optimizer_state, broadcast_parameters, load_exactly
from hvdlite.torch.virtual.order import generators, seed_of
from hvdlite.torch.wrapping import Wrapping

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateDictHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class TorchState(TensorState):
    """What a rank that trains with PyTorch saves, restores, and receives when it joins.

    Args:
        model: a torch.nn.Module.
        optimizer: its optimizer, distributed or not.
        rng: also save and restore the random generators of Python, NumPy and torch. A rank that
            joins gets those of rank 0 if the other ranks have equal ones, and otherwise generators
            of its own.
        kwargs: further attributes. Models, optimizers, samplers, and what has `state_dict()` and
            `load_state_dict()`, are saved as such; other objects travel pickled.

    Raises:
        ArgumentError: a value cannot be pickled, or an attribute has the name of a method.

    Example:
        >>> state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, epoch=0, batch=0)
        >>> state.epoch += 1
        >>> state.commit()
    """

    _handlers: Mapping[str, StateHandler] = {}

    def __init__(
        self, model: Any = None, optimizer: Any = None, rng: bool = False, **kwargs: Any
    ) -> None:
        handlers: dict[str, StateHandler] = {}
        plain = {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            handler = handler_of(value)
            if handler is None:
                plain[name] = value
            else:
                check_name(type(self), name)
                handlers[name] = handler
        for name, handler in handlers.items():
            setattr(self, name, handler.value)
        if rng:
            handlers["_generators"] = RandomStateHandler()
        self._handlers = handlers
        super().__init__(**plain)

    def save(self) -> None:
        """Copy models, optimizers and the other attributes into buffers that stay."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to the last `save`."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def _layout(self) -> dict[str, str]:
        return {
            f"{name}: {tensor}": description
            for name, handler in self._handlers.items()
            for tensor, description in handler.layout().items()
        }

    def _sync_tensors(self) -> None:
        for handler in self._handlers.values():
            handler.sync()

    def reset(self) -> None:
        """Let the samplers distribute their samples to the present ranks."""
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a new model or optimizer is saved at once."""
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


@runtime_checkable
class _Stateful(Protocol):
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
        super().__init__(value)
        self._snapshot = Snapshot()
        self.save()

    def save(self) -> None:
        self._snapshot.take(self.value.state_dict())

    def restore(self) -> None:
        self._load(self._snapshot.copy())

    def sync(self) -> None:
        self._load(broadcast_object(self.value.state_dict(), root_rank=0))

    def _load(self, state_dict: Any) -> None:
        self.value.load_state_dict(state_dict)


class ModelStateHandler(StateDictHandler):
    """Handles a `torch.nn.Module`."""

    def sync(self) -> None:
        state_dict = self.value.state_dict()
        broadcast_parameters(state_dict, root_rank=0)
        if not all(isinstance(value, torch.Tensor) for value in state_dict.values()):
            self._load(state_dict)

    def layout(self) -> dict[str, str]:
        return {name: _describe(value) for name, value in self.value.state_dict().items()}


class OptimizerStateHandler(StateDictHandler):
    """Handles a `torch.optim.Optimizer`, distributed or not."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)

    def restore(self) -> None:
        """Load a copy of the saved state, and drop the gradients of the step that failed."""
        super().restore()
        for group in self.value.param_groups:
            for param in group["params"]:
                param.grad = None

    def reset(self) -> None:
        """Drop the gradients of batches that no step has used; their samples come again."""
        if isinstance(self.value, Wrapping):
            self.value._go_on()

    def layout(self) -> dict[str, str]:
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
        super().sync()
        self.value.reset()

    def reset(self) -> None:
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
    for kind, handler in _registry:
        # Protocols look for methods, which classes have as well as their objects.
        if isinstance(value, kind) and not isinstance(value, type):
            return handler(value)
    return None


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "not a tensor"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


class Snapshot:
    """Copies a state_dict, into the tensors of the copy before where these suit."""

    # New memory for each copy costs several times the time.

    def __init__(self) -> None:
        self._copied: Any = None
        self._buffers: list[torch.Tensor] = []

    def take(self, value: Any) -> None:
        tensors = [one for one in tree_flatten(value)[0] if isinstance(one, torch.Tensor)]
        with torch.no_grad():
            before = itertools.chain(self._buffers, itertools.repeat(None))
            self._buffers = [_copy_tensor(*pair) for pair in zip(before, tensors, strict=False)]
        memo = {id(one): buffer for one, buffer in zip(tensors, self._buffers, strict=True)}
        self._copied = copy.deepcopy(value, memo)

    def copy(self) -> Any:
        """Return a copy of the copy, which callers may change."""
        return copy.deepcopy(self._copied)


def _copy_tensor(old: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    if (
        old is not None
        and old.layout == tensor.layout == torch.strided
        and (old.shape, old.dtype, old.device) == (tensor.shape, tensor.dtype, tensor.device)
    ):
        return old.copy_(tensor)
    return tensor.detach().clone()


class RandomStateHandler(StateHandler):
    # Each rank saves and restores its own. When ranks join, they must neither change the streams of
    # the others nor repeat one of them: two ranks with equal streams would drop the same units. So
    # a rank that joins copies a generator of rank 0 only if all ranks have that one equal already
    # (then the script wants it so); otherwise it seeds one of its own.

    def __init__(self) -> None:
        super().__init__(None)
        self._is_member = False  # The first synchronization of a rank ends its joining.
        self.save()

    def save(self) -> None:
        self._saved = {name: one.read() for name, one in generators().items()}

    def restore(self) -> None:
        self._write(self._saved)

    def sync(self) -> None:
        states = {name: one.read() for name, one in generators().items()}
        digests = {name: _digest(state) for name, state in states.items()}
        everyone = allgather_object((self._is_member, digests, torch.initial_seed()))
        members = [digests for is_member, digests, _ in everyone if is_member]
        if members and len(members) < len(everyone):
            equal = {name for name in members[0] if len({one.get(name) for one in members}) == 1}
            common = broadcast_object({name: states[name] for name in equal}, root_rank=0)
            if not self._is_member:
                self._write(common)
                self._seed_others(equal, everyone[0][2])
        self._is_member = True

    def _write(self, states: dict[str, Any]) -> None:
        for name, generator in generators().items():
            if name in states:
                generator.write(states[name])

    def _seed_others(self, copied: set[str], seed: int) -> None:
        epoch = current()
        worker = basics.rank() if epoch is None else epoch.worker
        number = seed_of(seed, worker)
        for name, generator in generators().items():
            if name not in copied:
                generator.seed(number)


def _digest(state: Any) -> bytes:
    value = bytes_of(state) if isinstance(state, torch.Tensor) else pickle.dumps(state)
    return hashlib.sha256(value).digest()
