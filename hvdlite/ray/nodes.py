"""Which nodes of a Ray cluster an elastic job can use, and what it reserves on each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdlite.launch.elastic.discovery import DiscoveryError
from hvdlite.ray.cluster import import_ray

_ROUNDING = 1e-6  # of amounts such as 0.3 / 0.1; Ray counts in ten-thousandths


@dataclass(frozen=True)
class Share:
    """What one worker needs of its node.

    Attributes:
        cpus: its CPUs.
        gpus: its GPUs.
        most: the most workers of a node; None without a limit.
    """

    cpus: float
    gpus: float
    most: int | None = None

    def slots(self, resources: Mapping[str, float]) -> int:
        """Return how many workers a node with these resources has room for.

        Example:
            >>> Share(2, 0).slots({"CPU": 5.0}), Share(0.1, 1).slots({"CPU": 0.3, "GPU": 8.0})
            (2, 3)
        """
        amounts = {"CPU": self.cpus, "GPU": self.gpus}
        rooms = [
            math.floor(resources.get(name, 0.0) / amount + _ROUNDING)
            for name, amount in amounts.items()
            if amount
        ]
        return min([*rooms, *([] if self.most is None else [self.most])])

    def options(self, slots: int) -> dict[str, float]:
        """Return what an actor reserves for so many workers; Ray shares out only whole GPUs > 1.

        Example:
            >>> Share(1, 0.5).options(3)
            {'num_cpus': 3, 'num_gpus': 2}
        """
        gpus = round(self.gpus * slots, 4)
        return {
            "num_cpus": round(self.cpus * slots, 4),
            "num_gpus": math.ceil(gpus) if gpus > 1 else gpus,
        }


class RayHosts:
    """The living nodes of the cluster with room for a worker; see `hosts.HostProvider`.

    Attributes:
        ids: by name, Ray's number of each node that was ever listed.
        slots: by name, how many workers it has room for.
    """

    def __init__(self, share: Share) -> None:
        """Note what a worker needs."""
        self._share = share
        self.ids: dict[str, str] = {}
        self.slots: dict[str, int] = {}

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
