"""Train on a Ray cluster: `run`, an executor with Horovod's names, and a backend of Ray Train.

Workers are actors of Ray, and meet as the ranks of hvdlite-run do. `run` and `RayExecutor` start
them (`executor`, by `group`); with `HvdliteTrainer`, Ray Train starts them (`train`). In an elastic
job the actors are one for each node, and run agents, which start the ranks as on other hosts of
hvdlite-run (`elastic`).

This package imports Ray on first use only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdlite.ray.executor import RayExecutor, run

if TYPE_CHECKING:
    from hvdlite.ray.train import HvdliteConfig, HvdliteTrainer

__all__ = ["HvdliteConfig", "HvdliteTrainer", "RayExecutor", "run"]


def __getattr__(name: str) -> Any:
    """Import the classes of Ray Train on first use: they derive from Ray's."""
    if name in ("HvdliteConfig", "HvdliteTrainer"):
        from hvdlite.ray import train

        return getattr(train, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
