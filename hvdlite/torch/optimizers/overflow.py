"""Lets the ranks agree on overflows that `torch.amp.GradScaler` finds.

A GradScaler looks for infinities and NaN in the gradients that this rank has. Where ranks have
different gradients, they must agree before any of them skips a step or changes the scale. Torch has
no hook there, so the method that looks is extended, once in the process; other optimizers are
passed on as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hvdlite import ops
from hvdlite.process_sets import ProcessSet
from hvdlite.torch.collectives.allreduce import allreduce

Found = dict[torch.device, torch.Tensor]  # A device has 1.0 if a gradient on it is not finite.


@functools.cache
def extend_grad_scaler() -> None:
    """Make GradScaler call an optimizer's `_unscale_together`, if the optimizer has it."""
    scaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    original = scaler._unscale_grads_

    @functools.wraps(original)
    def unscale(
        self: Any, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, *more: Any
    ) -> Found:
        call = functools.partial(original, self, optimizer, inv_scale, found_inf, *more)
        together = getattr(optimizer, "_unscale_together", None)
        found: Found = call() if together is None else together(call, found_inf)
        return found

    scaler._unscale_grads_ = unscale


def agree(
    unscale: Callable[[], Found], found_inf: torch.Tensor, name: str, process_set: ProcessSet
) -> Found:
    """Unscale the gradients of this rank, and return what all ranks together have found."""
    # `found_inf` is GradScaler's, on the device of its scale.
    found = unscale()
    own = [one.to(found_inf.device) for one in found.values()]
    most = torch.stack([found_inf, *own]).amax()
    most = allreduce(most, name=name, op=ops.Max, process_set=process_set)
    found = found or {found_inf.device: found_inf}  # A rank may have no gradients.
    for one in found.values():
        one.copy_(most)
    return found
