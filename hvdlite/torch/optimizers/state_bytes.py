"""The state of an optimizer as bytes, for ranks that send each other parts of it."""

from __future__ import annotations

import io
from typing import Any

import torch

from hvdlite.rendezvous import environment


def serialized(state: Any) -> bytes:
    """Return the bytes of an object with tensors."""
    memory = io.BytesIO()
    torch.save(state, memory)
    return memory.getvalue()


def deserialized(data: bytes | memoryview) -> Any:
    """Undo `serialized`, into host memory; objects other than tensors may need pickle."""
    safely = not environment.allow_pickle()
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=safely)
