"""Node mode: hvdlite-run is started once on each node, and node 0 is the launcher.

The other nodes connect to node 0 and are its agents; each introduces itself: its host, how many
ranks it runs, and how many nodes it was told. All nodes know the secret of the job; the connections
between them are authenticated, but not encrypted. So neither the environment nor the secret
travels: each node's ranks have the environment of that node.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdlite.errors import ArgumentError, BootstrapError
from hvdlite.launch.agent import LauncherChannel, attend, tell_signals
from hvdlite.launch.channels import LaunchError
from hvdlite.launch.description import Description
from hvdlite.launch.hosts import Host, threads_per_rank
from hvdlite.launch.loop import SignalInbox
from hvdlite.launch.messages import Kind, data_frame
from hvdlite.launch.resources import available_cores
from hvdlite.launch.run import run_job
from hvdlite.launch.sealed import NODE_SILENCE, IncomingAgents, SealedChannel, dial
from hvdlite.rendezvous.address import is_loopback, listen, split_host
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.environment import FIRST_PORT, PORTS, surroundings
from hvdlite.rendezvous.handshake import JOB_ID_BYTES, Job, OtherEpochError
from hvdlite.rendezvous.launchers import Variables, first_of_node_list
from hvdlite.rendezvous.store import bound_to, listen_when_possible

_REMEDY = "give all nodes the address and a free port of node 0's host with --meet"
_AGAIN_SECONDS = 0.5  # until a node of another epoch is tried again, which may be a leftover
_LOOK_SECONDS = 0.25  # between looks at signals
_ARRIVAL_SECONDS = 0.02  # between looks at nodes that arrive
_SECOND_SECONDS = 15.0  # how long a second node of one number may wait for the end of the first
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")
# What a node cannot be told besides, by the name in the options.
_NOT_WITH_NODES = {
    "hosts": "-H",
    "hostfile": "--hostfile",
    "host_discovery_script": "--host-discovery-script",
}


@dataclass(frozen=True)
class ThisNode:
    nodes: int  # how many nodes the job has
    node: int  # the number of this one
    meet: str  # the address at which node 0 waits for the others, "host:port"
    # The secret of the job; empty if there is one node.
    token: bytes = field(default=b"", repr=False)
    epoch: int = 0  # how often the job was started again
    # The IP address at which node 0 listens, if it is not that of `meet`.
    bind_address: str | None = None
    start_timeout: float = 60.0  # seconds that the nodes have to meet; 0 means no limit

    @property
    def job(self) -> Job:
        """The job whose nodes meet; its ranks get another number, which node 0 draws."""
        digest = hashlib.sha256(b"nodes" + self.token).digest()
        return Job(self.token, digest[:JOB_ID_BYTES], self.epoch)


def this_node(options: argparse.Namespace, environment: Mapping[str, str]) -> ThisNode | None:
    """Return which node this is, and set the number of its ranks if -np does not; None without."""
    if options.nodes is None:
        if options.node_rank is not None or options.meet is not None:
            raise ArgumentError("--node-rank and --meet belong to --nodes, which is not given")
        return None
    for dest, flag in _NOT_WITH_NODES.items():
        if getattr(options, dest) is not None:
            raise ArgumentError(f"--nodes and {flag}: a job has one of them")
    if options.via != "ssh":
        raise ArgumentError("--nodes and --via: the nodes are started one by one, by none of them")
    variables = Variables(environment)
    found = _find(variables)
    nodes = _number_of_nodes(options.nodes, found, variables)
    node = found.node if options.node_rank is None else options.node_rank
    meet = found.meet if options.meet is None else options.meet
    if options.num_proc is None and options.nproc_per_node is None:
        options.num_proc = found.ranks
    if nodes == 1:
        return ThisNode(1, 0, "")
    if node is None:
        raise ArgumentError(f"--nodes {nodes}: say which one this is with --node-rank, from 0")
    if not 0 <= node < nodes:
        raise ArgumentError(f"--node-rank {node}: give a number from 0 to {nodes - 1}")
    if meet is None:
        raise ArgumentError(f"--nodes {nodes}: say where they meet with --meet HOST:PORT of node 0")
    if split_host(meet)[1] == 0:
        raise ArgumentError(f"--meet {meet}: give a port that is free on node 0's host")
    around = surroundings()
    if not around.token:
        raise BootstrapError(
            "--nodes: HVDLITE_TOKEN is missing, by which the nodes recognise each other; give all "
            "of them the same 64 random hexadecimal digits, from `openssl rand -hex 32`"
        )
    timeout = options.start_timeout
    return ThisNode(
        nodes,
        node,
        meet,
        token=around.token,
        epoch=variables.number("HVDLITE_EPOCH", variables.number("SLURM_RESTART_COUNT", 0)),
        bind_address=around.bind_address,
        start_timeout=around.start_timeout if timeout is None else timeout,
    )


def _number_of_nodes(text: str, found: _Found, variables: Variables) -> int:
    if text != "auto":
        if not text.isdigit() or int(text) < 1:
            raise ArgumentError(f"--nodes {text}: give a number from 1, or auto")
        return int(text)
    if found.nodes is not None:
        return found.nodes
    index = variables.get("JOB_COMPLETION_INDEX")
    if index is not None:
        raise ArgumentError(
            f"--nodes auto: JOB_COMPLETION_INDEX={index} says which node this is, and no variable "
            "how many there are and where they meet; give --nodes N --meet HOST:PORT"
        )
    raise ArgumentError(
        "--nodes auto: neither PET_NNODES is set, nor has srun started one task on each node; give "
        "--nodes N --node-rank R --meet HOST:PORT"
    )


@dataclass(frozen=True)
class _Found:
    """What variables tell a node; None stands for what they do not tell."""

    nodes: int | None = None
    node: int | None = None
    meet: str | None = None
    ranks: int | None = None


def _find(variables: Variables) -> _Found:
    if "PET_NNODES" in variables:
        return _kubeflow(variables)
    if variables.has("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"):
        return _slurm(variables)
    return _Found(node=variables.optional_number("JOB_COMPLETION_INDEX"))


def _kubeflow(variables: Variables) -> _Found:
    """Read the variables of Kubeflow's trainers, which they set for torchrun."""
    host, port = variables.get("PET_MASTER_ADDR"), variables.get("PET_MASTER_PORT") or "29500"
    return _Found(
        nodes=variables.number("PET_NNODES"),
        node=variables.optional_number("PET_NODE_RANK"),
        meet=f"{host}:{port}" if host else None,
        ranks=_ranks_of_node(variables.get("PET_NPROC_PER_NODE"), variables),
    )


def _ranks_of_node(text: str | None, variables: Variables) -> int | None:
    """Read a number of ranks, or one of torchrun's words for it."""
    if text is None or text.isdigit():
        return None if text is None else int(text)
    gpus = _gpus(variables)
    if text == "gpu" or (text == "auto" and gpus):
        return gpus
    if text in ("auto", "cpu"):
        return available_cores()
    raise BootstrapError(
        f"PET_NPROC_PER_NODE={text} cannot be used: give a number, auto, cpu or gpu"
    )


def _gpus(variables: Variables) -> int:
    """Count the GPUs that the ranks may use, without a driver."""
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip()])
    return len([one for one in Path("/dev").glob("nvidia[0-9]*") if one.name[6:].isdigit()])


def _slurm(variables: Variables) -> _Found:
    """Read the variables of a step of Slurm that has one task on each node."""
    nodes, tasks = (variables.number(f"SLURM_STEP_NUM_{what}") for what in ("NODES", "TASKS"))
    if nodes != tasks:
        raise BootstrapError(
            f"--nodes: srun started {tasks} tasks on {nodes} nodes, and hvdlite-run is to be "
            "started once on each; give srun --ntasks-per-node=1, and hvdlite-run -np"
        )
    host = first_of_node_list(variables.text("SLURM_STEP_NODELIST"))
    step = f"{variables.get('SLURM_JOB_ID')}.{variables.get('SLURM_STEP_ID')}.{os.getuid()}"
    drawn = int.from_bytes(hashlib.sha256(step.encode()).digest()[:4], "little")
    return _Found(nodes, variables.number("SLURM_NODEID"), f"{host}:{FIRST_PORT + drawn % PORTS}")


def run_node(here: ThisNode, what: Description) -> int:
    if here.nodes == 1:
        return run_job(what).status
    return _launch(here, what) if here.node == 0 else _join(here, what)


def _launch(here: ThisNode, what: Description) -> int:
    deadline = Deadline(here.start_timeout)
    address = bound_to(here.bind_address, here.meet)
    listener = listen_when_possible(lambda: listen(address), address, "node 0", _REMEDY, deadline)
    _refuse_loopback(listener, address)
    remote_launcher = NodeLauncher(listener, here.job, here.nodes, here.start_timeout, here.meet)
    status, why = 130, ""
    try:
        nodes = remote_launcher.gather(deadline)
        own = Host(f"{socket.gethostname()} [node 0]", what.ranks, here=True)
        hosts = [own, *(Host(node.name, node.ranks, here=False) for node in nodes)]
        whole = replace(
            what,
            ranks=sum(host.slots for host in hosts),
            hosts=hosts,
            remote_launcher=remote_launcher,
            job=Job(here.token, secrets.token_bytes(JOB_ID_BYTES), here.epoch),
        )
        status = run_job(whole).status
        return status
    except Exception as error:
        status, why = 1, str(error)
        raise
    finally:
        remote_launcher.conclude(status, why)


def _refuse_loopback(listener: socket.socket, address: str) -> None:
    """Refuse a name that /etc/hosts maps to this host alone; the user may insist on 127.0.0.1."""
    host = split_host(address)[0]
    bound = str(listener.getsockname()[0])
    if is_loopback(f"{bound}:0") and host != bound and host not in _LOOPBACK_NAMES:
        listener.close()
        raise BootstrapError(
            f"node 0 would wait at {address}, which is {bound} here, and no other host can reach "
            f"that; {_REMEDY}, or set HVDLITE_BIND_ADDRESS on node 0"
        )


def _join(here: ThisNode, what: Description) -> int:
    sealed = _connect(here, what.ranks)
    channel = LauncherChannel(sealed.read_fd, sealed.write_fd)
    me = f"node {here.node} of {here.nodes}"

    def environment(part: dict[str, Any]) -> dict[str, str]:
        ranks = part["ranks"]
        print(
            f"hvdlite-run: {me} runs ranks {', '.join(map(str, ranks))}; node 0 shows their output",
            file=sys.stderr,
        )
        part["folder"], part["command"] = str(Path.cwd()), list(what.command)
        part["compat"] = what.compat
        hostname = socket.gethostname()
        part["own"] = {
            "HVDLITE_TOKEN": here.token.hex(),
            "HVDLITE_HOSTNAME": hostname,
            "HOROVOD_HOSTNAME": hostname,
        }
        return what.shared_environment(threads_per_rank(available_cores(), what.ranks))

    try:
        attend(channel, environment, patient=True, afterwards=partial(_wait_for_outcome, channel))
    finally:
        sealed.end()
    if channel.outcome is None:
        raise BootstrapError(
            f"{me} has lost node 0 at {here.meet}: {sealed.said() or 'it is silent'}; its ranks "
            "here have been ended"
        )
    status, why = channel.outcome
    if status != 0:
        why = why or "node 0 shows the reason"
        print(f"hvdlite-run: {me}: the job ended with status {status}: {why}", file=sys.stderr)
    return status


def _wait_for_outcome(channel: LauncherChannel, inbox: SignalInbox) -> None:
    """Wait for the ranks of other nodes, which may go on when those of this node have ended."""
    while channel.outcome is None and not channel.lost:
        tell_signals(channel, inbox)
        channel.wait(_LOOK_SECONDS)
        channel.receive()


def _connect(here: ThisNode, ranks: int) -> SealedChannel:
    """Connect to node 0, which may not listen yet, or whose name may not be known yet."""
    deadline = Deadline(here.start_timeout)
    while True:
        try:
            return dial(
                "node 0", here.meet, here.job, here.node, deadline, introduction(here.nodes, ranks)
            )
        except OtherEpochError:  # After a restart, the earlier node 0 may be about to end.
            if deadline.seconds_left < _AGAIN_SECONDS:
                raise
            deadline.sleep(_AGAIN_SECONDS)
        except BootstrapError as error:
            raise BootstrapError(
                f"{error}; is node 0's address {here.meet}, and is HVDLITE_TOKEN the same there?"
            ) from error


@dataclass
class Node:
    number: int  # its number, from 1
    channel: SealedChannel  # the last channel to its agent
    hostname: str = ""  # the name of its host; this and its ranks are known from its introduction
    ranks: int = 0  # how many ranks it runs
    opened: bool = False  # whether that channel is in use, so that its user closes it
    arrived_at: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """The name of the node in messages, which no other node has."""
        return f"{self.hostname} [node {self.number}]"


class NodeLauncher(IncomingAgents):
    """The remote launcher of node mode; `conclude` ends it. A node that was lost may come again."""

    def __init__(
        self, listener: socket.socket, job: Job, nodes: int, connect_seconds: float, meet: str
    ) -> None:
        """Listen for the other nodes; `nodes` counts node 0, too, which they know as `meet`."""
        super().__init__(job, nodes, listener)
        self.connect_seconds = connect_seconds
        self._count = nodes
        self._meet = meet
        self._gathered = False  # whether all nodes have been there
        self._wrong = ""  # how nodes contradict each other
        # Only the service's thread adds nodes and arrivals.
        self._nodes: dict[str, Node] = {}  # Their names are the keys.
        self._arrivals: list[Node] = []
        self._start()

    def gather(self, deadline: Deadline) -> list[Node]:
        """Wait until all other nodes have connected; return them by their numbers."""
        while self._wrong or len(self._nodes) < self._count - 1:
            if self._wrong or deadline.passed:
                raise LaunchError(self._wrong or self._missing())
            time.sleep(_ARRIVAL_SECONDS)
            for node in list(self._nodes.values()):
                if node.channel.ended:
                    raise LaunchError(
                        f"lost {node.name} before the job began: {node.channel.said()}"
                    )
        self._gathered = True
        return sorted(self._nodes.values(), key=lambda node: node.number)

    def conclude(self, status: int, why: str) -> None:
        """Take no more nodes, and tell those without ranks how the job has ended."""
        self.close()
        unused = [node.channel for node in self._nodes.values() if not node.opened]
        _tell([*unused, *(one.channel for one in self._arrivals)], status, why)

    # What the agents' side calls.

    def reachable(self, host: str) -> bool:
        node = self._nodes[host]
        return not node.opened and not node.channel.ended

    def open(self, host: str) -> SealedChannel:
        node = self._nodes[host]
        if node.opened:
            raise LaunchError(f"{host} has not connected again")
        node.opened = True
        return node.channel

    def explain(self, host: str, said: str, status: int | None) -> str:
        return f"lost {host} before its ranks ran: {said or 'it has hung up'}"

    def host_address(self, host: str, hello: Mapping[str, Any]) -> str:
        return self._nodes[host].channel.peer

    # The service's thread.

    def _dialled(self, number: int, connection: socket.socket, keys: tuple[bytes, bytes]) -> None:
        if number == 0:
            connection.close()
        else:
            self._arrivals.append(Node(number, SealedChannel(connection, keys, NODE_SILENCE)))

    def _sleep_seconds(self, now: float) -> float:
        return _ARRIVAL_SECONDS if self._arrivals else super()._sleep_seconds(now)

    def _tick(self, asleep: float) -> None:
        for one in list(self._arrivals):
            said = one.channel.introduction
            if said is None and not one.channel.ended:
                continue
            there = next((n for n in self._nodes.values() if n.number == one.number), None)
            # A node that comes back may be faster than the news that its first channel has ended.
            first_lives = there is not None and not there.channel.ended
            if self._gathered and first_lives and asleep < one.arrived_at + _SECOND_SECONDS:
                continue
            self._arrivals.remove(one)
            if said is None:
                _tell([one.channel], 1, "")
            else:
                self._accept(one, there, said)

    def _accept(self, one: Node, there: Node | None, said: bytes) -> None:
        try:
            one.hostname, one.ranks, nodes = _introduced(said)
        except (ValueError, RecursionError):
            self._refuse(
                one,
                f"node {one.number} ({one.channel.peer}) says what no node of this version of "
                "hvdlite says; install the same version on all nodes",
            )
            return
        if there is not None and not there.channel.ended:
            wrong = (
                f"two nodes say that they are node {one.number}: {there.hostname} "
                f"({there.channel.peer}) and {one.hostname} ({one.channel.peer}); give each one "
                "its own --node-rank"
            )
        elif nodes != self._count:
            wrong = (
                f"{one.name} was started with --nodes {nodes}, and node 0 with --nodes "
                f"{self._count}; give all nodes the same number"
            )
        elif there is not None and there.ranks != one.ranks:
            wrong = f"{there.name} has come back with -np {one.ranks}; it had -np {there.ranks}"
        else:
            if there is not None:
                if not there.opened:
                    _tell([there.channel], 1, "")
                there.channel, there.opened = one.channel, False
            else:
                self._nodes[one.name] = one
            return
        self._refuse(one, wrong)

    def _refuse(self, one: Node, wrong: str) -> None:
        if not self._gathered:
            self._wrong = self._wrong or wrong
        _tell([one.channel], 1, wrong)

    def _missing(self) -> str:
        there = {node.number for node in self._nodes.values()}
        missing = [str(one) for one in range(1, self._count) if one not in there]
        return (
            f"node {', '.join(missing)} of {self._count} has not connected to node 0 at "
            f"{self._meet} in time; does hvdlite-run start there, with the same --meet, "
            "HVDLITE_TOKEN and HVDLITE_EPOCH? --start-timeout gives it more time"
        )


def introduction(nodes: int, ranks: int) -> bytes:
    return json.dumps([socket.gethostname(), ranks, nodes]).encode()


def _introduced(said: bytes) -> tuple[str, int, int]:
    match json.loads(said):
        case [str(hostname), int(ranks), int(nodes)] if ranks > 0:
            return hostname, ranks, nodes
    raise ValueError("no introduction")


def _tell(channels: list[SealedChannel], status: int, why: str) -> None:
    for channel in channels:
        with contextlib.suppress(OSError):
            os.write(channel.write_fd, data_frame(Kind.OUTCOME, 0, [status, why]))
        channel.cut()
    for channel in channels:
        channel.end()
