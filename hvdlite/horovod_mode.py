"""Whether this rank's script was written for Horovod, and runs under `hvdlite-run --compat`.

It decides the few things in which a script of ours has it better than one that counts on Horovod.
"""

from __future__ import annotations

_on = False


def turn_on() -> None:
    """Say that the script imported `horovod`."""
    global _on
    _on = True


def is_on() -> bool:
    """Say whether the script imported `horovod`."""
    return _on
