"""The flags of node mode, and the variables by which cluster software says the same."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdlite.errors import ArgumentError, BootstrapError
from hvdlite.launch.description import ThisNode
from hvdlite.launch.resources import available_cores
from hvdlite.rendezvous.address import split_host
from hvdlite.rendezvous.environment import surroundings
from hvdlite.rendezvous.launchers.known import first_of_node_list
from hvdlite.rendezvous.launchers.variables import Variables

_AUTO = "auto"
_FIRST_PORT, _PORTS = 20000, 10000
# What a node cannot be told besides, by the name in the options.
_WITHOUT = {
    "hosts": "-H",
    "hostfile": "--hostfile",
    "host_discovery_script": "--host-discovery-script",
}


@dataclass(frozen=True)
class _Found:
    """What variables tell a node; None stands for what they do not tell."""

    nodes: int | None = None
    node: int | None = None
    meet: str | None = None
    ranks: int | None = None


def this_node(options: argparse.Namespace, environment: Mapping[str, str]) -> ThisNode | None:
    """Return which node this is, and set the number of its ranks if -np does not; None without."""
    # Raises ArgumentError if the flags contradict each other, or do not suffice.
    # Raises BootstrapError if a variable cannot be used.
    if options.nodes is None:
        if options.node_rank is not None or options.meet is not None:
            raise ArgumentError("--node-rank and --meet belong to --nodes, which is not given")
        return None
    for dest, flag in _WITHOUT.items():
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
    return _of_flags(nodes, node, meet, options, variables)


def _of_flags(
    nodes: int, node: int, meet: str, options: argparse.Namespace, variables: Variables
) -> ThisNode:
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
    if text != _AUTO:
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


def _find(variables: Variables) -> _Found:
    """Read what cluster software tells about the nodes."""
    # Raises BootstrapError if a variable cannot be used.
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
    return _Found(nodes, variables.number("SLURM_NODEID"), f"{host}:{_FIRST_PORT + drawn % _PORTS}")
