"""`hvdlite-run --check-finite`: which rank has a NaN or an infinity in its own gradients."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable

from hvdlite import _core, basics
from hvdlite.errors import HvdliteError

# An owner has the number of its present step, and that of the last one that was not finite.
_steps: defaultdict[str, list[int]] = defaultdict(lambda: [0, -1])


def level() -> int:
    """Return HVDLITE_CHECK_FINITE: 0 looks at nothing, 1 raises an error, 2 warns."""
    if basics.is_initialized():
        return basics.current_world().check_finite
    return int(_core.knob_values()["check_finite"])  # A graph may be traced before init().


def look(
    owner: str,
    finite: Iterable[tuple[str, bool]],
    step: int = 0,
    received: Callable[[], bool] = lambda: False,
) -> None:
    """Raise or warn if a gradient of a name, before its reduction, is not finite."""
    # Without `step` each call is a step. Of bad steps in a row only the first one warns. `received`
    # says whether parameters are not finite: then an earlier step has brought it, and nobody warns.
    steps = _steps[owner]
    steps[0] = step or steps[0] + 1
    bad = next((name for name, is_finite in finite if not is_finite), None)
    if bad is None:
        return
    goes_on, steps[1] = steps[0] <= steps[1] + 1, steps[0]
    text = f"rank {basics.rank()}: '{bad}' has a NaN or an infinity in step {steps[0]}"
    if received():
        if level() != 1:
            return
        text += ", and so have its parameters: an earlier step or a checkpoint has brought it"
    basics.engine().note("nonfinite", bad, text)
    if level() == 1:
        raise HvdliteError(text)
    if not goes_on:
        print(f"hvdlite [{basics.rank()}] warning: {text}", file=sys.stderr, flush=True)
