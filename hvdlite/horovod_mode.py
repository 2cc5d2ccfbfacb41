"""A flag of this process: its script imported `horovod`, under `hvdlite-run --compat`.

In a few details hvdlite has a better behaviour than Horovod. A script that was written for Horovod
may rely on Horovod's, so it gets that one.
"""

from __future__ import annotations

_on = False


def turn_on() -> None:
    """Note that the script imported `horovod`."""
    global _on
    _on = True


def is_on() -> bool:
    """Return whether the script imported `horovod`."""
    return _on
