"""`hvdlite-run --compat`: scripts that import horovod run unchanged.

The folder of this file goes on the ranks' path. In it lies a package called horovod, whose modules
are those of hvdlite, under Horovod's names; see `hvdlite.compat.aliases`. Where hvdlite means
something else than Horovod by itself, a knob says so, and has Horovod's meaning here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# By what scripts for Horovod expect; whoever starts the job may say otherwise.
_MEANINGS = {"HVDLITE_AVERAGE_OVER_JOINED": "1"}


def on_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Put the alias package before everything else, an installed horovod too.

    Knobs that are not set get Horovod's meaning.

    Example:
        >>> on_path({"PYTHONPATH": "/mine"})["PYTHONPATH"].endswith("compat:/mine")
        True
    """
    own = str(Path(__file__).resolve().parent)
    rest = environment.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (own, rest)))
    return {**_MEANINGS, **environment, "PYTHONPATH": path}
