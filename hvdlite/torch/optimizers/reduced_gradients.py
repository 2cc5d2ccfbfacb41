"""The gradients of one reducer that are reduced, and those to which no backward may add then.

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
        # This says why no backward may follow while they are reduced.
        self.refusal: str | None = None
        self._names = names
        self._reduced: dict[torch.Tensor, weakref.ref[torch.Tensor]] = {}

    def protect(self, params: Iterable[torch.Tensor]) -> None:
        """Let no backward add to them."""
        # Parameters that were frozen meanwhile may still have theirs.
        self._reduced = {param: one for param, one in self._reduced.items() if _is_grad(param, one)}
        grads = ((param, param.grad) for param in params)
        self._reduced |= {param: weakref.ref(one) for param, one in grads if one is not None}

    def check(self, params: Iterable[torch.Tensor]) -> None:
        """Refuse a backward while a protected gradient is its parameter's `grad`, or `refusal`."""
        if self.current and self.refusal is not None:
            raise HvdliteError(self.refusal)
        for param in params:
            if param not in self._reduced or not _is_grad(param, self._reduced[param]):
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


def _is_grad(param: torch.Tensor, gradient: weakref.ref[torch.Tensor]) -> bool:
    return param.grad is not None and gradient() is param.grad
