"""Send and receive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from hvdlite.torch.distributed.engines import Membership
from hvdlite.torch.distributed.submission import Submissions


class PointToPoint(Submissions):
    """Operations between two members, over a gloo group of the same members."""

    def connect(self, member: Membership) -> None:
        """Make the gloo group, together: later, two of four members would wait for the others."""
        store = distributed.PrefixStore("gloo", member.store)
        self._gloo: Any = distributed.ProcessGroupGloo(
            store, member.rank, member.size, timeout=member.timeout
        )

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> Any:
        """Send a tensor."""
        return self._gloo.send([tensors[0].detach().contiguous()], to, tag)

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> Any:
        """Receive a tensor."""
        return self._gloo.recv(tensors, source, tag)
