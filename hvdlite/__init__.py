"""Train on many devices what you train on one.

Importing this package imports no framework: use `hvdlite.torch`. `hvdlite.run` calls a function on
many ranks.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from hvdlite.bootstrap.environment import take_token

if TYPE_CHECKING:
    from hvdlite.launch.api import run

# Not the core's own: `hvdlite-run --doctor` has to say why a core does not load.
__version__ = version("hvdlite")

# Children of this process have no use for the job's secret.
take_token()

__all__ = ["__version__", "run"]


def __getattr__(name: str) -> Any:
    """Import the launcher when somebody asks for it: ranks do not."""
    if name == "run":
        from hvdlite.launch.api import run

        return run
    advice = "" if name.startswith("_") else "; use import hvdlite.torch as hvd, or another adapter"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
