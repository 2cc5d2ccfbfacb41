"""Ray itself, imported when it is needed, and where this process runs in its cluster."""

from __future__ import annotations

from typing import Any

from hvdlite.rendezvous.assignments import Place

NEEDS_RAY = (
    "hvdlite.ray needs Ray, which is not installed here; install it by "
    "pip install 'hvdlite[ray]', on every node of the cluster"
)


def import_ray() -> Any:
    """Import Ray. Raises ImportError if it is not installed."""
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ImportError(NEEDS_RAY) from None
    return ray


def own_place() -> Place:
    """Return the node of the cluster on which this process runs, and its address."""
    ray = import_ray()
    return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def ray_says(error: BaseException) -> str:
    """Return what an exception of Ray says of an actor, in one sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    of_cause = [line for line in lines if line.startswith("The actor is dead because")]
    said = (of_cause or lines or [type(error).__name__])[0].split(". ")[0].rstrip(".")
    return f"Ray says: {said}"
