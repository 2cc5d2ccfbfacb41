"""Process groups of torch.distributed with the backend hvdlite, and with gloo to compare with."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

import hvdlite.torch as hvd

TIMEOUT = datetime.timedelta(seconds=120)

_gloo: Any = None


def start() -> None:
    """Begin hvdlite's own world and a process group: both work in one process."""
    global _gloo
    hvd.init()
    dist.init_process_group("hvdlite", timeout=TIMEOUT)
    _gloo = dist.new_group(backend="gloo", timeout=TIMEOUT)


def gloo() -> Any:
    """Return a group of all ranks over gloo."""
    return _gloo


def ours() -> Any:
    """Return the group of all ranks over hvdlite."""
    return dist.group.WORLD
