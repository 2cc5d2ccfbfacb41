"""Run a function as an elastic job on a Ray cluster: it grows and shrinks with Ray's nodes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdlite.errors import ArgumentError, BootstrapError
from hvdlite.launch.api import results_of
from hvdlite.launch.call import pack
from hvdlite.launch.description import Description, Elastic
from hvdlite.launch.elastic.discovery import DiscoveryError
from hvdlite.launch.job import run_job
from hvdlite.launch.remote.channels import LaunchError
from hvdlite.ray.cluster import import_ray
from hvdlite.ray.nodes import RayHosts, Share
from hvdlite.ray.placement import Demand
from hvdlite.ray.remote_launcher import RayLauncher
from hvdlite.rendezvous.assignments import JOB_ID_BYTES, TOKEN_BYTES
from hvdlite.rendezvous.handshake import Job

_COMMAND = ("python", "-m", "hvdlite.launch.call")  # each node has its own Python


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    demand: Demand,
    workers: int | None,
    elastic: Elastic,
    env: Mapping[str, str],
) -> list[Any]:
    """Call a function on workers that come and go; see `run`.

    Args:
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        demand: what each worker needs, and how long nodes and workers may take to meet.
        workers: how many start; None for as many as there is room for.
        elastic: how their number may change.
        env: more variables of the workers' environment.

    Raises:
        ArgumentError: numbers contradict each other.
        BootstrapError: a node cannot take part, or there has been too little room for too long.
        RankFailedError: a rank failed without an exception.
        Exception: the exception of the first failing rank, with its traceback as the cause.
    """
    if elastic.script is not None or elastic.slots_per_host is not None:
        raise ArgumentError("host_discovery_script and slots_per_host: Ray knows the nodes itself")
    if demand.strategy != "PACK":
        raise ArgumentError(
            f"placement={demand.strategy!r}: an elastic job fills all nodes, as PACK does"
        )
    ray = import_ray()
    if not ray.is_initialized():
        ray.init()
    share = Share(demand.cpus, demand.gpus, elastic.max_np)
    hosts = RayHosts(share)
    job = Job(secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(JOB_ID_BYTES), epoch=0)
    variables = {**env, "HVDLITE_START_TIMEOUT": f"{demand.timeout:g}"}
    try:
        ranks = workers or _room(hosts, elastic)
        elastic.check(ranks)
        with RayLauncher(job, hosts, share, variables, demand.timeout) as remote_launcher:
            what = Description(
                _COMMAND,
                ranks,
                variables,
                remote_launcher=remote_launcher,
                stdin=pack(fn, args, kwargs),
                elastic=elastic,
                job=job,
                provider=hosts,
            )
            return results_of(run_job(what))
    except (DiscoveryError, LaunchError) as error:
        raise BootstrapError(str(error)) from None


def _room(hosts: RayHosts, elastic: Elastic) -> int:
    """Return how many workers there is room for now, within the limits of the job."""
    room = sum(hosts.hosts().values())
    return max(room if elastic.max_np is None else min(room, elastic.max_np), elastic.min_np or 1)
