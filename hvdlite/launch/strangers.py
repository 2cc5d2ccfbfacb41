"""Whether a job that ended well was one at all: ranks that never met have each trained alone."""

from __future__ import annotations

from hvdlite.launch.console import Console
from hvdlite.launch.description import Description

_TEXT = (
    "hvd.init() was never called: {0} independent copies of the program ran, and trained {0} times "
    "what they train; call hvd.init() or dist.init_process_group() in the script, or give "
    "--independent if the ranks need nothing of each other"
)


def status_of_strangers(what: Description, met: bool, console: Console) -> int:
    """Return the status of a job without a failure: 1 if its ranks should have met, and did not."""
    # `hvdlite.run` returns the results of a function, which may well train nothing.
    if met or what.ranks == 1 or what.independent or what.stdin is not None:
        return 0
    console.say(_TEXT.format(what.ranks))
    return 1
