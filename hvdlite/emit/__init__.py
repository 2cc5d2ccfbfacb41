"""`hvdlite-run --emit KIND`: descriptions of a job for cluster software.

`KINDS` has a function for each kind, which turns an `EmitRequest` into the text that is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvdlite.emit.kubernetes import job, jobset
from hvdlite.emit.kubernetes_kubeflow import mpijob, trainjob
from hvdlite.emit.request import EmitRequest
from hvdlite.emit.slurm import slurm

KINDS: Mapping[str, Callable[[EmitRequest], str]] = {
    "slurm": slurm,
    "job": job,
    "jobset": jobset,
    "trainjob": trainjob,
    "mpijob": mpijob,
}


def emit(kind: str, request: EmitRequest) -> str:
    """Describe a job in the words of one kind of cluster software."""
    # Raises ArgumentError if this kind cannot run such a job, or needs something that is not given.
    return KINDS[kind](request)
