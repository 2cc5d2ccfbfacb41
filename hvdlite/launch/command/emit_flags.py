"""The flags of --emit, which prints a description of the job for cluster software."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping

from hvdlite.errors import ArgumentError
from hvdlite.launch.emit import EmitRequest

_NEEDS_EMIT = {"ntasks_per_node": "--ntasks-per-node", "name": "--name", "image": "--image"}
# What a described job cannot have, by the name in the options.
_WITHOUT = {
    "hosts": "-H (the cluster chooses the hosts)",
    "hostfile": "--hostfile (the cluster chooses the hosts)",
    "nproc_per_node": "--nproc-per-node (write --ntasks-per-node)",
    "compat": "--compat",
    "min_np": "--min-np",
    "max_np": "--max-np",
    "host_discovery_script": "--host-discovery-script",
    "nodes": "--nodes (write --ntasks-per-node, from which the number of nodes follows)",
    "output_filename": "--output-filename",
    "prefix_output_with_timestamp": "--prefix-output-with-timestamp",
}


def emit_request(options: argparse.Namespace, variables: Mapping[str, str]) -> EmitRequest | None:
    """Return the job to be described; None without --emit."""
    # Raises ArgumentError if flags contradict each other, or -np is missing.
    if options.emit is None:
        for dest, flag in _NEEDS_EMIT.items():
            if getattr(options, dest) is not None:
                raise ArgumentError(f"{flag} belongs to --emit, which is not given")
        return None
    for dest, flag in _WITHOUT.items():
        if getattr(options, dest):
            raise ArgumentError(
                f"{flag} and --emit: a job that is described for a cluster cannot have both"
            )
    if options.num_proc is None:
        raise ArgumentError("--emit: say how many ranks the job has with -np")
    if not math.isfinite(options.grace):
        raise ArgumentError(f"--grace {options.grace:g} and --emit: give a number of seconds")
    command = options.command[1:] if options.command[:1] == ["--"] else list(options.command)
    if options.module and command:
        command = ["python", "-m", *command]
    elif command and command[0].endswith(".py"):
        command = ["python", *command]
    per_node = options.ntasks_per_node
    if per_node is None:
        per_node = options.num_proc
    return EmitRequest(
        command=command,
        ranks=options.num_proc,
        ranks_per_node=per_node,
        name="train" if options.name is None else options.name,
        image=options.image,
        grace=options.grace,
        variables=variables,
    )
