"""`TorchState`: models, optimizers, samplers and plain objects of an elastic job."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from hvdlite import basics
from hvdlite.elastic.state import TensorState, check_name
from hvdlite.objects import allgather_object, broadcast_object
from hvdlite.rendezvous.epochs import current
from hvdlite.torch.adasum import DistributedAdasum
from hvdlite.torch.collectives.tensors import bytes_of
from hvdlite.torch.functions import broadcast_optimizer_state, broadcast_parameters, load_exactly
from hvdlite.torch.local_sgd import Local
from hvdlite.torch.optimizer import Distributed
from hvdlite.torch.virtual.order import generators, seed_of
from hvdlite.torch.virtual.steps import VirtualStepping

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

    Example:
        >>> state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, epoch=0, batch=0)
        >>> state.epoch += 1
        >>> state.commit()
    """

    _handlers: Mapping[str, StateHandler] = {}

    def __init__(
        self, model: Any = None, optimizer: Any = None, rng: bool = False, **kwargs: Any
    ) -> None:
        """Make the attributes, and save them.

        Args:
            model: a torch.nn.Module.
            optimizer: its optimizer, distributed or not.
            rng: also save and restore the random generators of Python, NumPy and torch. A rank that
                joins gets those of rank 0 if the other ranks have equal ones, and otherwise
                generators of its own.
            kwargs: further attributes. Models, optimizers, samplers, and what has `state_dict()`
                and `load_state_dict()`, are saved as such; other objects travel pickled.

        Raises:
            ArgumentError: a value cannot be pickled, or an attribute has the name of a method.
        """
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


class Snapshot:
    """Copies nested dicts, lists and tuples of tensors and other values."""

    # Tensors are copied into the buffers of the copy before, on the same device: new memory for
    # each copy costs several times the time.

    def __init__(self) -> None:
        self._copied: Any = None

    def take(self, value: Any) -> None:
        """Copy a value, in place of the copy before."""
        with torch.no_grad():
            self._copied = self._copy_into(self._copied, value)

    def copy(self) -> Any:
        """Return a copy of the copy, which callers may change."""
        with torch.no_grad():
            return _clone(self._copied)

    def _copy_into(self, old: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _copy_tensor(old, value)
        if isinstance(value, dict):
            before = old if isinstance(old, dict) else {}
            copied = copy.copy(value)  # This keeps the metadata of a module's state_dict.
            for key, item in value.items():
                copied[key] = self._copy_into(before.get(key), item)
            return copied
        if type(value) in (list, tuple):
            same = type(old) is type(value) and len(old) == len(value)
            return type(value)(map(self._copy_into, old if same else [None] * len(value), value))
        return copy.deepcopy(value)


def _copy_tensor(old: Any, tensor: torch.Tensor) -> torch.Tensor:
    reusable = (
        isinstance(old, torch.Tensor)
        and (old.shape, old.dtype, old.device) == (tensor.shape, tensor.dtype, tensor.device)
        and old.layout == tensor.layout == torch.strided
    )
    return old.copy_(tensor) if reusable else tensor.detach().clone()


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        cloned = copy.copy(value)
        for key, item in value.items():
            cloned[key] = _clone(item)
        return cloned
    if type(value) in (list, tuple):
        return type(value)(map(_clone, value))
    return copy.deepcopy(value)


class RandomStateHandler(StateHandler):
    """Handles all generators; `TorchState(..., rng=True)` has one."""

    def __init__(self) -> None:
        super().__init__(None)
        self._is_member = False  # The first synchronization of a rank ends its joining.
        self.save()

    def save(self) -> None:
        """Copy this rank's generators."""
        self._saved = {name: one.read() for name, one in generators().items()}

    def restore(self) -> None:
        """Set this rank's generators to the copies."""
        self._write(self._saved)

    def sync(self) -> None:
        """Give ranks that join generators; the other ranks keep theirs."""
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
