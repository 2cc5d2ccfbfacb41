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
    """Describe a job in the words of one kind of cluster software."""
    # Raises ArgumentError if this kind cannot run such a job, or needs something that is not given.
    module = importlib.import_module(f"hvdlite.launch.emit.{KINDS[kind]}")
    describe: Callable[[EmitRequest], str] = getattr(module, kind)
    return describe(request)


@dataclass(frozen=True)
class EmitRequest:
    """A job that cluster software is to run."""

    command: Sequence[str]  # the program of every rank, and its arguments
    ranks: int  # how many ranks the job has
    ranks_per_node: int  # the most ranks that a node gets; every node but the last has so many
    name: str = "train"
    # The container image with hvdlite and the program; None if it was not given.
    image: str | None = None
    grace: float = 30.0  # seconds that the ranks have to save something when they are told to stop
    # Environment variables that flags set for every rank.
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the numbers."""
        # Raises ArgumentError if a number is out of range, or there is no command.
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
        """How many nodes the ranks fill."""
        return -(-self.ranks // self.ranks_per_node)
