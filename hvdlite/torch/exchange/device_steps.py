"""The steps that ranks were at, read from flags on a GPU without waiting for the GPU."""

from __future__ import annotations

import torch

from hvdlite.torch.exchange.gradient_memory import COMMON_FLAGS


class DeviceSteps:
    """Copies a bucket's last flags to the host, and reads them when they have arrived there.

    One copy is on its way at a time, so what it tells is of an earlier step, usually of the last
    one. Ranks that are at different steps stay so, and a later copy tells what this one missed.
    """

    def __init__(self, flags: torch.Tensor) -> None:
        """Make room for the last flags of a vector on a GPU."""
        self._copy = torch.empty(COMMON_FLAGS, dtype=flags.dtype, device="cpu", pin_memory=True)
        self._arrived = torch.cuda.Event()
        self._step: int | None = None  # this rank's, of the copy on its way

    def look(self, flags: torch.Tensor, step: int) -> tuple[int, list[float]] | None:
        """Start a copy, unless one is on its way.

        Args:
            flags: the reduced flags, as of the current stream.
            step: this rank's step.

        Returns:
            If the copy before has arrived: this rank's step then, and the flags.
        """
        found = None
        if self._step is not None:
            if not self._arrived.query():
                return None
            found = self._step, self._copy.tolist()
        self._copy.copy_(flags[-COMMON_FLAGS:], non_blocking=True)
        self._arrived.record(torch.cuda.current_stream(flags.device))
        self._step = step
        return found
