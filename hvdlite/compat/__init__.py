"""`hvdlite-run --compat`: scripts that import horovod run unchanged.

The folder of this file goes on the ranks' path. In it lies a package called horovod, whose modules
are those of hvdlite, under Horovod's names; see `hvdlite.compat.aliases`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def on_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Put the alias package before everything else, an installed horovod too.

    Example:
        >>> on_path({"PYTHONPATH": "/mine"})["PYTHONPATH"].endswith("compat:/mine")
        True
    """
    own = str(Path(__file__).resolve().parent)
    rest = environment.get("PYTHONPATH", "")
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, (own, rest)))}
