"""`hvdlite-run --emit KIND`: descriptions of a job for cluster software.

`KINDS` names for each kind the module with the function of that name, which turns an `EmitRequest`
into the text that is printed. The module is imported only then: hvdlite-run starts sooner so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from hvdlite.launch.emit.request import EmitRequest

KINDS: Mapping[str, str] = {
    "slurm": "slurm",
    "job": "kubernetes",
    "jobset": "kubernetes",
    "trainjob": "kubernetes_kubeflow",
}


def emit(kind: str, request: EmitRequest) -> str:
    """Describe a job in the words of one kind of cluster software."""
    # Raises ArgumentError if this kind cannot run such a job, or needs something that is not given.
    module = importlib.import_module(f"hvdlite.launch.emit.{KINDS[kind]}")
    describe: Callable[[EmitRequest], str] = getattr(module, kind)
    return describe(request)
