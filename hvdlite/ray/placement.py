"""Where Ray puts the workers: a placement group, which reserves CPUs and GPUs for all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hvdlite.errors import ArgumentError, BootstrapError
from hvdlite.ray.cluster import import_ray

_NO_LIMIT = 10**9  # seconds; Ray takes whole ones, and forgets fractions
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class Demand:
    """What the workers need."""

    workers: int
    cpus: float = 1
    gpus: float = 0
    strategy: str = "PACK"  # how Ray spreads them over nodes, as for `ray.util.placement_group`
    per_node: int | None = None  # if not None, every node gets exactly so many workers
    timeout: float = 60.0  # seconds that Ray has to reserve all of it; 0 for no limit
    # Whether workers take their part of the placement group in which the caller runs, if any.
    joins_current: bool = True

    def __post_init__(self) -> None:
        """Check the numbers. Raises ArgumentError if one is out of range."""
        if self.workers < 1:
            raise ArgumentError(f"num_workers={self.workers}: at least one worker is needed")
        if self.cpus < 0 or self.gpus < 0 or not self.cpus + self.gpus > 0:
            raise ArgumentError(
                f"cpus_per_worker={self.cpus}, gpus_per_worker={self.gpus}: Ray reserves nothing "
                "for such workers; give a positive number of one of them"
            )
        if self.strategy not in STRATEGIES:
            raise ArgumentError(f"placement={self.strategy!r}: give one of {', '.join(STRATEGIES)}")
        if not self.timeout >= 0:
            raise ArgumentError(
                f"start_timeout={self.timeout}: give a number of seconds, or 0 for no limit"
            )

    def bundles(self) -> list[dict[str, float]]:
        """Return what is reserved together: for each worker, or for all of one node."""
        each = self.per_node or 1
        one = {"CPU": self.cpus * each, "GPU": self.gpus * each}
        bundle = {name: amount for name, amount in one.items() if amount}
        return [dict(bundle) for _ in range(self.workers // each)]


class Reservation:
    """A placement group: one of its own, which `close` removes, or that of the caller."""

    def __init__(self, demand: Demand) -> None:
        """Reserve what the workers need, and wait for it."""
        # Raises BootstrapError if Ray has not reserved it in time.
        ray = import_ray()
        self._demand = demand
        current = ray.util.get_current_placement_group() if demand.joins_current else None
        self._owned = current is None or not self._fits(current)
        if not self._owned:
            self._group = current
            return
        strategy = "STRICT_SPREAD" if demand.per_node else demand.strategy
        self._group = ray.util.placement_group(demand.bundles(), strategy=strategy)
        try:
            if not self._group.wait(math.ceil(demand.timeout) or _NO_LIMIT):
                raise BootstrapError(self._why_not(ray))
        except BaseException:
            self.close()
            raise

    def _fits(self, group: Any) -> bool:
        """Return whether the caller's group has a bundle for each worker, beside the caller's."""
        context = import_ray().get_runtime_context()
        uses_first = any(context.get_assigned_resources().values())
        need = self._demand.bundles()[0]
        enough = [
            bundle
            for bundle in group.bundle_specs[1 if uses_first else 0 :]
            if all(bundle.get(name, 0) >= amount for name, amount in need.items())
        ]
        return self._demand.per_node is None and len(enough) >= self._demand.workers

    def _why_not(self, ray: Any) -> str:
        demand = self._demand
        every, free = ray.cluster_resources(), ray.available_resources()
        names = [name for name in ("CPU", "GPU") if demand.bundles()[0].get(name)]
        has = " and ".join(
            f"{every.get(name, 0):g} {name}s, of which {free.get(name, 0):g} are free"
            for name in names
        )
        wants = " and ".join(f"{demand.bundles()[0][name]:g} {name}s" for name in names)
        what = f"on each of {demand.workers // (demand.per_node or 1)} nodes"
        if demand.per_node is None:
            what = f"for each of {demand.workers} workers ({demand.strategy})"
        return (
            f"Ray has not reserved {wants} {what} within {demand.timeout:g} s: the cluster has "
            f"{has}. Ask for less, or for a longer start_timeout; in trials of Ray Tune, give "
            "TuneConfig a max_concurrent_trials for which the cluster has room"
        )

    def options(self, worker: int) -> dict[str, Any]:
        """Return the options of the actor of a worker."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = worker // (self._demand.per_node or 1) if self._owned else -1
        return {
            "num_cpus": self._demand.cpus,
            "num_gpus": self._demand.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group,
                placement_group_bundle_index=bundle,
                placement_group_capture_child_tasks=True,
            ),
        }

    def close(self) -> None:
        """Give back what was reserved here; it is free when the actors have ended."""
        if self._owned:
            import_ray().util.remove_placement_group(self._group)
