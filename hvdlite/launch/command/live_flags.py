"""The flags by which people watch a job: while it runs, and when it has ended."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from hvdlite.errors import ArgumentError
from hvdlite.launch.console import Console
from hvdlite.launch.view import MakeViewer
from hvdlite.live.run import Viewer

_LONGEST_END = 1.0  # seconds that the launcher waits for a slow terminal


def viewers(options: argparse.Namespace, environment: Mapping[str, str]) -> list[MakeViewer]:
    """Return what makes the viewers that the flags ask for."""
    # Raises ArgumentError if a package is missing, or a flag cannot be used.
    found: list[MakeViewer] = []
    if options.live:
        if find_spec("rich") is None:
            raise ArgumentError("--live needs the package rich: pip install 'hvdlite[live]'")
        rows = environment.get("TERM", "dumb") != "dumb"
        colour = not environment.get("NO_COLOR")
        found.append(lambda console: _screen(console, rows, colour))
    if options.report is not None:
        found.append(_report(options.report, options.baseline))
    elif options.baseline is not None:
        raise ArgumentError("--baseline is for the report: give --report, too")
    return found


def _report(path: Path, baseline: Path | None) -> MakeViewer:
    from hvdlite.live.record import read_baseline  # ordinary jobs do not need them
    from hvdlite.live.report import Report, check_path

    check_path(path)
    figures = None if baseline is None else read_baseline(baseline)
    return lambda console: Report(path, figures, partial(_say_last, console))


def _say_last(console: Console, text: str) -> None:
    console.say(text)
    console.drained(_LONGEST_END)


def _screen(console: Console, rows: bool, colour: bool) -> Viewer:
    from hvdlite.live.screen import Screen  # it imports rich

    return Screen(console, rows, colour)
