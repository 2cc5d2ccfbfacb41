"""`TorchState`: models, optimizers, samplers and plain objects of an elastic job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdlite.elastic.state import check_name
from hvdlite.elastic.tensor_state import TensorState
from hvdlite.torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateDictHandler,
    StateHandler,
    get_handler_registry,
    handler_of,
    set_handler_registry,
)
from hvdlite.torch.elastic.random_state import RandomStateHandler

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
