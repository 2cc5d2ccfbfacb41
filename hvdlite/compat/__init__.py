"""`hvdlite-run --compat`: scripts that import horovod run unchanged.

`on_path` puts the folder of this file on the ranks' import path. It holds a package called horovod,
whose modules are those of hvdlite under Horovod's names; see `hvdlite.compat.aliases`. Where
hvdlite's default behaviour differs from Horovod's, a knob chooses, and `on_path` sets it to
Horovod's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Knobs with Horovod's behaviour; variables that the user sets win.
_MEANINGS = {"HVDLITE_AVERAGE_OVER_JOINED": "1"}


def on_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with our package horovod before an installed one on the path."""
    # Knobs that are not set get Horovod's behaviour.
    own = str(Path(__file__).resolve().parent)
    rest = environment.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (own, rest)))
    return {**_MEANINGS, **environment, "PYTHONPATH": path}
