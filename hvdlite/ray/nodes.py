"""Which nodes of a Ray cluster an elastic job can use, and what it reserves on each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdlite.launch.elastic.discovery import DiscoveryError
from hvdlite.ray.cluster import import_ray

_ROUNDING = 1e-6  # Ray counts in ten-thousandths, so 0.3 / 0.1 is rounded.


@dataclass(frozen=True)
class Share:
    """What one worker needs of its node."""

    cpus: float
    gpus: float
    most: int | None = None  # the most workers of a node; None without a limit

    def slots(self, resources: Mapping[str, float]) -> int:
        """Return how many workers a node with these resources has room for."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus}
        rooms = [
            math.floor(resources.get(name, 0.0) / amount + _ROUNDING)
            for name, amount in amounts.items()
            if amount
        ]
        return min([*rooms, *([] if self.most is None else [self.most])])

    def options(self, slots: int) -> dict[str, float]:
        """Return what an actor reserves for so many workers; Ray shares out only whole GPUs > 1."""
        gpus = round(self.gpus * slots, 4)
        return {
            "num_cpus": round(self.cpus * slots, 4),
            "num_gpus": math.ceil(gpus) if gpus > 1 else gpus,
        }


class RayHosts:
    """The living nodes of the cluster with room for a worker; see `hosts.HostProvider`."""

    def __init__(self, share: Share) -> None:
        """Note what a worker needs."""
        self._share = share
        self.ids: dict[str, str] = {}  # Ray's number of each node that was ever listed.
        self.slots: dict[str, int] = {}  # A node has room for so many workers.

    def hosts(self) -> dict[str, int]:
        """Ask Ray for its nodes; those that were listed first come first."""
        try:
            found: list[dict[str, Any]] = import_ray().nodes()
        except Exception as error:  # What Ray raises while its head is away differs.
            raise DiscoveryError(f"Ray does not tell its nodes: {error}") from None
        listed: dict[str, int] = {}
        for node in found:
            slots = self._share.slots(node["Resources"]) if node["Alive"] else 0
            if slots:
                name = f"{node['NodeManagerAddress']}/{node['NodeID'][:8]}"
                self.ids[name], listed[name] = node["NodeID"], slots
        self.slots.update(listed)
        return {name: listed[name] for name in self.ids if name in listed}

    def close(self) -> None:
        """Do nothing: Ray's answer is not waited for."""
