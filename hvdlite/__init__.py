"""hvdlite trains on many devices what you train on one: data parallelism with Horovod's API.

This package imports no framework. Scripts import an adapter, such as `hvdlite.torch`.
`hvdlite.run` calls a function on many ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdlite.rendezvous.environment import take_live_pipe, take_token

if TYPE_CHECKING:
    from hvdlite.launch.api import run

    __version__: str

# Children of this process inherit its environment, and need neither the job's secret nor the pipe.
take_token()
take_live_pipe()

__all__ = ["__version__", "run"]


def __getattr__(name: str) -> Any:
    """Import on first use only what most ranks do not use: it takes a quarter of the start."""
    if name == "__version__":
        from importlib.metadata import version

        # Not from the core: `hvdlite-run --doctor` works where the core does not load.
        globals()[name] = found = version("hvdlite")
        return found
    if name == "run":
        from hvdlite.launch.api import run

        return run
    advice = "" if name.startswith("_") else "; use import hvdlite.torch as hvd, or another adapter"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
