"""The gradients of one reducer that are reduced, until a step uses them.

A further backward adds to gradients that are there. An average of gradients that are the same on
all ranks keeps them, but a sum multiplies them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch

from hvdlite.errors import HvdliteError


class ReducedGradients:
    """What is known of the gradients that one reducer has reduced."""

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        """Begin without gradients; `names` are those of the parameters, and may grow."""
        # It says whether gradients are reduced, none was computed since, and no step has used them.
        self.current = False
        self._names = names  # It keeps all parameters alive.
        # The keys are the ids of parameters, as a tensor's own hash takes long.
        self._reduced: dict[int, weakref.ref[torch.Tensor]] = {}

    def note(self, params: Iterable[torch.Tensor]) -> None:
        """Note that the gradients of these parameters are reduced."""
        # Parameters that were frozen meanwhile may still have theirs.
        for param in params:
            gradient = param.grad
            if gradient is not None:
                self._reduced[id(param)] = weakref.ref(gradient)

    def replaced(self, params: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Return the first parameter whose `grad` is another tensor than the reduced one."""
        # What the script changes in place, as clipping does, still is the reduced gradient.
        for param in params:
            gradient, reduced = param.grad, self._reduced.get(id(param))
            if gradient is not None and (reduced is None or reduced() is not gradient):
                return param
        return None

    def check_sums(self, params: Iterable[torch.Tensor]) -> None:
        """Refuse to sum gradients again that are sums over the ranks already."""
        for param in params:
            reduced = self._reduced.get(id(param))
            if reduced is None or param.grad is None or reduced() is not param.grad:
                continue
            name = self._names[param]
            raise HvdliteError(
                f"backward() would add to the gradient of {name}, which is a sum "
                "over the ranks since the last one and cannot be summed again; with op=hvd.Sum "
                "say backward_passes_per_step=, run all but the last backward() of a step "
                "under optimizer.no_sync(), or call optimizer.zero_grad() to drop it"
            )

    def use(self) -> None:
        """Note that the optimizer has used them, or that they are zeroed."""
        self.current = False
        self._reduced = {}
