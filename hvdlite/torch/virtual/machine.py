"""What a machine must have in common with another one so that both compute the same bits."""

from __future__ import annotations

import platform

import torch

import hvdlite


def describe(threads: int) -> dict[str, str]:
    """Return the kind of processor, the versions of the libraries, and torch's threads."""
    kind = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else "none"
    return {
        "processor": kind,
        "GPU": gpu,
        "torch": str(torch.__version__),
        "hvdlite": hvdlite.__version__,
        "threads": str(threads),
    }
