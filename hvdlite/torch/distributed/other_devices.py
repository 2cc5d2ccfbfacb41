"""Tensors of other devices, in a group such as "cuda:nccl,cpu:hvdlite".

When a backend is a `ProcessGroup` itself, as this one is, torch.distributed makes it the whole
group, and drops the backends that were named for other devices. So the group makes those itself,
when the first tensor of such a device comes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from hvdlite.torch.distributed.engines import Membership
from hvdlite.torch.distributed.memory import OtherDeviceError


def backends_of(config: str) -> dict[str, str]:
    """Return backends by device, from torch.distributed's text, such as "cuda:nccl,cpu:hvdlite"."""
    pairs = [part.split(":") for part in config.split(",")]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def make_group(member: Membership, device: str, backend: str, timeout: timedelta) -> Any:
    """Make a group of torch's own for the tensors of a device; all members come here, in order."""
    store = distributed.PrefixStore(f"hvdlite/{device}/", member.store)
    group = distributed.ProcessGroup(store, member.rank, member.size)
    if backend == "nccl":
        kind = distributed.ProcessGroup.BackendType.NCCL
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        made = distributed.ProcessGroupNCCL(store, member.rank, member.size, options)
    else:
        kind = distributed.ProcessGroup.BackendType.GLOO
        made = distributed.ProcessGroupGloo(store, member.rank, member.size, timeout=timeout)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, made)
    return group


def or_elsewhere(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that gives tensors of other devices to the group of their device."""

    @functools.wraps(own)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return own(self, *arguments, **named)
        except OtherDeviceError as error:
            return getattr(self.elsewhere(error), own.__name__)(*arguments, **named)

    return call
