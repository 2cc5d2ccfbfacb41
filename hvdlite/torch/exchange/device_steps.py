"""The steps that ranks were at, read from flags on a GPU two steps later."""

from __future__ import annotations

from collections import deque

import torch

from hvdlite import basics
from hvdlite.torch.bucket_memory import COMMON_FLAGS

# The host may be as many steps ahead of its GPU.
BEHIND = 2


class DeviceSteps:
    """Copies a bucket's last flags to the host, and reads them `BEHIND` steps later."""

    # So the host seldom waits for the GPU, and all ranks learn of a step in the same later step.
    # Ranks that are at different steps stay so, and all of them raise an error there.

    def __init__(self) -> None:
        self._copies: deque[tuple[int, torch.Tensor, torch.cuda.Event]] = deque()
        self._engine: object = None  # The copies are from this engine's world.

    def look(self, flags: torch.Tensor, step: int) -> tuple[int, list[float]] | None:
        """Start a copy of reduced flags; return step and flags of `BEHIND` steps ago, if any."""
        found = None
        if self._engine is not basics.engine():
            self._engine = basics.engine()
            self._copies.clear()  # What a world that failed has left may be anything.
        if len(self._copies) == BEHIND:
            then, copy, arrived = self._copies.popleft()
            arrived.synchronize()
            found = then, copy.tolist()
        else:
            copy = torch.empty(COMMON_FLAGS, dtype=flags.dtype, device="cpu", pin_memory=True)
            arrived = torch.cuda.Event()
        copy.copy_(flags[-COMMON_FLAGS:], non_blocking=True)
        arrived.record(torch.cuda.current_stream(flags.device))
        self._copies.append((step, copy, arrived))
        return found
