"""What may look at the gradients of a reducer: `hvdlite.torch.noise_scale` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class GradientObserver(Protocol):
    """It is called in the thread of backward or of `step`, and must not wait for other ranks."""

    def sends(self, params: Sequence[torch.Tensor]) -> None:
        """Look at gradients of this rank, before they are reduced.

        Raises:
            HvdliteError: they are not sent.
        """

    def received(self, params: Sequence[torch.Tensor]) -> None:
        """Look at the gradients of a cycle after they were reduced."""

    def forget(self) -> None:
        """Forget the gradients of the cycle under way, which is over."""
