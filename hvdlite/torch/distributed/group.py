"""The face of a process group that torch.distributed sees."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from hvdlite.errors import ArgumentError
from hvdlite.torch.distributed import ending
from hvdlite.torch.distributed.collectives import Collectives
from hvdlite.torch.distributed.engines import Membership, make_engine
from hvdlite.torch.distributed.exchanges import Exchanges
from hvdlite.torch.distributed.memory import OtherDeviceError
from hvdlite.torch.distributed.other_devices import (
    backends_of,
    make_group,
    or_elsewhere,
)
from hvdlite.torch.distributed.overloads import FORMS, overloaded
from hvdlite.torch.distributed.point_to_point import PointToPoint

NAME = "hvdlite"


class HvdliteGroup(
    Collectives,
    Exchanges,
    PointToPoint,
    distributed.ProcessGroup,  # type: ignore[misc]
):
    """A process group whose members exchange CPU tensors over an engine of hvdlite."""

    # torch.distributed makes it, and calls its methods: users call the functions of
    # torch.distributed.

    def __init__(self, options: Any) -> None:
        member = Membership(
            options.store,
            options.group_rank,
            options.group_size,
            options.group_id,
            options.timeout,
        )
        distributed.ProcessGroup.__init__(self, member.rank, member.size)
        engine = make_engine(member)
        ending.enter(engine, member.rank)
        Collectives.__init__(self, engine, member.rank, member.size, member.name, member.timeout)
        self._member = member
        self._described = ""
        self._elsewhere: dict[str, Any] = {}

    def getBackendName(self) -> str:
        """Return the word that users give to init_process_group."""
        return NAME

    name = getBackendName
    _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        """Return the name that torch.distributed has given to this group."""
        return self._title

    def setGroupName(self, name: str) -> None:
        """Take the name that torch.distributed gives to this group."""
        self._title = name

    _set_group_name = setGroupName

    @property
    def group_name(self) -> str:
        """The name that torch.distributed has given to this group."""
        return self._title

    def getGroupDesc(self) -> str:
        """Return the description that the user has given to this group."""
        return self._described

    def setGroupDesc(self, text: str) -> None:
        """Take the description that the user gives to this group."""
        self._described = text

    _set_group_desc = setGroupDesc

    @property
    def group_desc(self) -> str:
        """The description that the user has given to this group."""
        return self._described

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors this group carries."""
        return [torch.device(name) for name in self._backends()]

    def _backends(self) -> dict[str, str]:
        """Return by device the backends that the user has named."""
        try:
            config = distributed.distributed_c10d.get_backend_config(self)
        except (KeyError, ValueError):
            config = ""  # torch.distributed does not know the group yet, or no longer.
        return backends_of(config) or {"cpu": NAME}

    def elsewhere(self, error: OtherDeviceError) -> Any:
        """Return the group for the tensors of another device, or raise the error."""
        device = error.device.type
        backend = self._backends().get(device)
        if backend not in ("nccl", "gloo"):
            raise error
        if device not in self._elsewhere:
            made = make_group(self._member, device, backend, self._timeout)
            self._elsewhere[device] = made
        return self._elsewhere[device]

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation may take."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def get_group_store(self) -> Any:
        """Return the store by which the members have met."""
        return self._member.store

    def _get_backend(self, device: torch.device) -> Any:
        """Return what carries tensors of a device; for CPU tensors, this group itself."""
        device = torch.device(device)
        if self._backends().get(device.type) == NAME:
            return self
        try:
            return self.elsewhere(OtherDeviceError("_get_backend", device))._get_backend(device)
        except OtherDeviceError:
            raise ArgumentError(
                f"process group '{self._title}' has no backend for {device}; name one for each "
                'device, as in init_process_group("cuda:nccl,cpu:hvdlite")'
            ) from None

    # Torch asks this of a backend.
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return that tensors need no memory of the backend's own."""
        return False

    @property
    def options(self) -> Any:
        """The timeout of operations, as torch's backends give it."""
        return torch._C._distributed_c10d.Backend.Options(NAME, self._timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the members count from 0."""

    def _get_sequence_number_for_group(self) -> int:
        """Return how many operations this rank has started."""
        return self._numbering.started()

    def shutdown(self) -> None:
        """Leave the group when the operations in flight have ended, or their time has passed."""
        while self._elsewhere:
            self._elsewhere.popitem()[1].shutdown()
        # While an exception is handled, as in a `finally`, the operations get a moment only: other
        # ranks may wait for what this one would have done.
        if sys.exc_info()[0] is None:
            self._end_all_in_flight()
        self._kept.clear()
        ending.end(self._engine)

    def abort(self) -> None:
        """Leave the group at once; the other members get an error."""
        self._engine.abort(f"rank {self._own_rank} aborted process group '{self._title}'")
        ending.end(self._engine)


# Earlier releases of torch, and its C++ code, call these methods by other names.
_OTHER_NAMES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
for _verb in FORMS:
    setattr(HvdliteGroup, _verb, or_elsewhere(overloaded(getattr(HvdliteGroup, _verb))))
for _other, _verb in _OTHER_NAMES.items():
    setattr(HvdliteGroup, _other, getattr(HvdliteGroup, _verb))
