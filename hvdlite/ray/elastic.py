"""Run a function as an elastic job on a Ray cluster: it grows and shrinks with Ray's nodes.

An actor on each node reserves what all workers of its node need, and runs an agent, which connects
to the driver and dies with its actor. The job's secret travels to it by Ray, and it proves by the
usual handshake that it knows the secret.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdlite.errors import ArgumentError, BootstrapError
from hvdlite.launch import agent
from hvdlite.launch.api import results_of
from hvdlite.launch.call import pack
from hvdlite.launch.channels import LaunchError
from hvdlite.launch.description import Description, Elastic
from hvdlite.launch.elastic.discovery import DiscoveryError
from hvdlite.launch.run import run_job
from hvdlite.launch.sealed import NODE_SILENCE, IncomingAgents, SealedChannel
from hvdlite.ray.group import Demand, import_ray, own_place, ray_says
from hvdlite.rendezvous.address import listen
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import Job

_COMMAND = ("python", "-m", "hvdlite.launch.call")  # each node has its own Python
_LOOK_SECONDS = 0.1
_ROUNDING = 1e-6  # Ray counts in ten-thousandths, so 0.3 / 0.1 is rounded.
_CHANNELS = 1 << 31  # the most that may be opened in the life of a job
# Variables of an actor that are not those of a rank: its place in Ray, Ray's debugger, and a number
# of threads that is for all ranks of the node.
_OF_THE_ACTOR = ("RAY_JOB_ID", "RAY_RAYLET_PID", "PYTHONBREAKPOINT", "OMP_NUM_THREADS")


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    demand: Demand,
    workers: int | None,
    elastic: Elastic,
    env: Mapping[str, str],
) -> list[Any]:
    """Call a function on workers that come and go, and raise as `run` does, which explains all.

    `workers` says how many start; None for as many as there is room for.
    """
    if elastic.host_discovery_script is not None or elastic.slots_per_host is not None:
        raise ArgumentError("host_discovery_script and slots_per_host: Ray knows the nodes itself")
    if demand.strategy != "PACK":
        raise ArgumentError(
            f"placement={demand.strategy!r}: an elastic job fills all nodes, as PACK does"
        )
    ray = import_ray()
    if not ray.is_initialized():
        ray.init()
    hosts = RayHosts(demand.cpus, demand.gpus, elastic.max_np)
    job = Job.drawn()
    variables = {**env, "HVDLITE_START_TIMEOUT": f"{demand.timeout:g}"}
    try:
        if not workers:
            room = sum(hosts.hosts().values())
            room = room if elastic.max_np is None else min(room, elastic.max_np)
            workers = max(room, elastic.min_np or 1)
        elastic.check(workers)
        with RayLauncher(job, hosts, variables, demand.timeout) as remote_launcher:
            what = Description(
                _COMMAND,
                workers,
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


class RayHosts:
    """The living nodes of the cluster with room for a worker; see `hosts.HostProvider`.

    A worker needs `cpus` and `gpus`, and a node gets at most `most` workers.
    """

    def __init__(self, cpus: float, gpus: float, most: int | None = None) -> None:
        self.cpus, self.gpus, self.most = cpus, gpus, most
        self.ids: dict[str, str] = {}  # Ray's number of each node that was ever listed
        self._slots: dict[str, int] = {}  # how many workers a node has room for

    def hosts(self) -> dict[str, int]:
        """Ask Ray for its nodes; those that were listed first come first."""
        try:
            found: list[dict[str, Any]] = import_ray().nodes()
        except Exception as error:  # What Ray raises while its head is away differs.
            raise DiscoveryError(f"Ray does not tell its nodes: {error}") from None
        listed: dict[str, int] = {}
        for node in found:
            slots = self.room(node["Resources"]) if node["Alive"] else 0
            if slots:
                name = f"{node['NodeManagerAddress']}/{node['NodeID'][:8]}"
                self.ids[name], listed[name] = node["NodeID"], slots
        self._slots.update(listed)
        return {name: listed[name] for name in self.ids if name in listed}

    def room(self, resources: Mapping[str, float]) -> int:
        """Return how many workers a node with these resources has room for."""
        rooms = [
            math.floor(resources.get(name, 0.0) / amount + _ROUNDING)
            for name, amount in (("CPU", self.cpus), ("GPU", self.gpus))
            if amount
        ]
        return min(rooms if self.most is None else [*rooms, self.most])

    def reserved(self, host: str) -> dict[str, float]:
        """Return what the actor of a node reserves; Ray shares out only whole GPUs > 1."""
        slots = self._slots[host]
        gpus = round(self.gpus * slots, 4)
        return {
            "num_cpus": round(self.cpus * slots, 4),
            "num_gpus": math.ceil(gpus) if gpus > 1 else gpus,
        }

    def close(self) -> None:
        """Do nothing: Ray's answer is not waited for."""


class RayLauncher(IncomingAgents):
    """How Ray starts agents; see `channels.RemoteLauncher`. Leaving it ends all actors."""

    def __init__(
        self, job: Job, hosts: RayHosts, variables: Mapping[str, str], connect_seconds: float
    ) -> None:
        """Listen for the nodes; raise OSError if that is impossible at this node's address."""
        self.connect_seconds = connect_seconds  # that a node may take
        self._hosts = hosts
        self._variables = dict(variables)
        super().__init__(job, _CHANNELS, listen(f"{own_place().address}:0"), room=0)
        self._channels: dict[int, RayChannel] = {}
        self._of_host: dict[str, RayChannel] = {}
        self._start()

    def close(self) -> bool:
        first = super().close()
        for channel in self._channels.values():
            channel.end()
        return first

    def reachable(self, host: str) -> bool:
        """Return True: only an attempt tells."""
        return True

    def open(self, host: str) -> RayChannel:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        number = len(self._channels)
        channel = self._of_host[host] = self._channels[number] = RayChannel(
            Deadline(self.connect_seconds)
        )
        there = NodeAffinitySchedulingStrategy(self._hosts.ids[host], soft=False)
        reserved = self._hosts.reserved(host)
        threads = max(1, int(self._hosts.cpus))
        try:
            actor = import_ray().remote(NodeActor).options(scheduling_strategy=there, **reserved)
            channel.actor = actor.remote()
            channel.ref = channel.actor.serve.remote(
                self.address, self._job, number, self._variables, threads
            )
        except Exception as error:  # Ray raises many kinds while its head is away.
            channel.fail(ray_says(error))
        return channel

    def explain(self, host: str, said: str, status: int | None) -> str:
        return f"cannot start on Ray's node {host}: {said or 'it has hung up'}"

    def host_address(self, host: str, hello: Mapping[str, Any]) -> str:
        return self._of_host[host].peer

    def _dialled(self, number: int, connection: socket.socket, keys: tuple[bytes, bytes]) -> None:
        channel = self._channels.get(number)
        if channel is None:
            connection.close()
        else:
            channel.attach(connection, keys)

    def _sleep_seconds(self, now: float) -> float:
        return _LOOK_SECONDS

    def _tick(self, asleep: float) -> None:
        for channel in list(self._channels.values()):
            if channel.pending:
                self._look_at(channel)

    def _look_at(self, channel: RayChannel) -> None:
        """End a channel whose actor has failed, or takes too long."""
        ray = import_ray()
        if channel.deadline.passed:
            channel.fail(
                f"Ray has not started its actor within {self.connect_seconds:g} s; other work may "
                "hold its CPUs or GPUs (`ray status` tells), or it cannot reach the driver at "
                f"{self.address}; a longer start_timeout gives it more time"
            )
        elif channel.ref is not None and ray.wait([channel.ref], timeout=0)[0]:
            try:
                channel.fail(f"its agent ended with status {ray.get(channel.ref)}")
            except Exception as error:
                channel.fail(ray_says(getattr(error, "cause", None) or error))


class RayChannel:
    """The channel to the agent of one node, made before that connects; see `channels.Channel`."""

    def __init__(self, deadline: Deadline) -> None:
        self._inner, self._owners = socket.socketpair()
        self.read_fd = self.write_fd = self._owners.fileno()
        self.peer = ""  # the IP address from which the node has connected; "" before
        self.pending = True  # whether the node has not connected yet
        self.deadline = deadline  # until when it has to connect
        self.actor: Any = None
        self.ref: Any = None
        self._why = ""
        self._lock = threading.Lock()
        self._sealed: SealedChannel | None = None

    def attach(self, connection: socket.socket, keys: tuple[bytes, bytes]) -> None:
        with self._lock:
            if not self.pending:
                connection.close()
                return
            self.pending = False
            pair = (self._inner, self._owners)
            self._sealed = SealedChannel(connection, keys, NODE_SILENCE, pair=pair)
            self.peer = self._sealed.peer

    def fail(self, why: str) -> None:
        """End the channel, unless the node has connected."""
        with self._lock:
            if self.pending:
                self.pending = False
                self._why = why
                self._inner.close()

    def said(self) -> str:
        return self._why if self._sealed is None else self._sealed.said()

    def cut(self) -> None:
        """Break the channel at once; what the owner has written is still sent."""
        self.fail("it was given up")
        with contextlib.suppress(OSError):
            self._owners.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Give back what the actor has reserved, after what is under way to it."""
        self.cut()
        if self._sealed is not None:
            self._sealed.end()
        self._owners.close()
        actor, self.actor = self.actor, None
        if actor is not None:
            with contextlib.suppress(Exception):  # Ray, or the actor, may have ended.
                import_ray().kill(actor)


class NodeActor:
    def serve(
        self, address: str, job: Job, number: int, variables: Mapping[str, str], threads: int
    ) -> int:
        return agent.serve(address, job, number, variables, _OF_THE_ACTOR, threads)
