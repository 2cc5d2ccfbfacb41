"""The GPUs that this process could use, and the folders in which NCCL may be.

The core looks for NCCL in this order: a copy that the framework has loaded, the file that
HVDLITE_NCCL_LIBRARY names, the nvidia-nccl wheels, the system.

Example:
    >>> from hvdlite import gpu
    >>> for subject, works, text in gpu.report():
    ...     print(subject, works, text)
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path


def nccl_folders() -> list[str]:
    """List the folders in which wheels have installed NCCL, in the order of the import path."""
    folders = [Path(entry) / "nvidia" / "nccl" / "lib" for entry in sys.path if entry]
    return [str(folder) for folder in folders if (folder / "libnccl.so.2").exists()]


def report() -> list[tuple[str, bool, str]]:
    """List, for each subject (driver, NCCL...), whether it works, and what was found or why not."""
    from hvdlite import _core

    return _core.gpu_report(nccl_folders())


@functools.cache
def works(subject: str) -> bool:
    """Return whether the subject of a row of `report` works; the answer is cached."""
    return any(works for name, works, _ in report() if name == subject)
