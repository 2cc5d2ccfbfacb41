"""`hvdlite-run --emit KIND`: descriptions of a job for cluster software.

`KINDS` names for each kind the module with the function of that name, which turns an `EmitRequest`
into the text that is printed. The module is imported only then: hvdlite-run starts sooner so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hvdlite.errors import ArgumentError

KINDS: Mapping[str, str] = {
    "slurm": "slurm",
    "job": "kubernetes",
    "jobset": "kubernetes",
    "trainjob": "kubernetes",
}


def emit(kind: str, request: EmitRequest) -> str:
    """Describe a job; raise ArgumentError if this kind of software cannot run it as it is."""
    module = importlib.import_module(f"hvdlite.launch.emit.{KINDS[kind]}")
    describe: Callable[[EmitRequest], str] = getattr(module, kind)
    return describe(request)


@dataclass(frozen=True)
class EmitRequest:
    """A job that cluster software is to run."""

    command: Sequence[str]  # the program of every rank, and its arguments
    ranks: int
    ranks_per_node: int  # the most ranks that a node gets; every node but the last has so many
    name: str = "train"
    image: str | None = None  # the container image with hvdlite and the program
    grace: float = 30.0  # seconds that the ranks have to save something when they are told to stop
    variables: Mapping[str, str] = field(default_factory=dict)  # of every rank, from flags

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ArgumentError(f"-np {self.ranks}: at least one rank is needed")
        if self.ranks_per_node < 1:
            raise ArgumentError(
                f"--ntasks-per-node {self.ranks_per_node}: at least one rank per node is needed"
            )
        if not self.command:
            raise ArgumentError("--emit: say what the ranks run, after all flags")

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)
