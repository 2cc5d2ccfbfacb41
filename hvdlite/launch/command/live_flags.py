"""The flags by which people watch a running job: `--live`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib.util import find_spec

from hvdlite.errors import ArgumentError
from hvdlite.launch.output.console import Console
from hvdlite.launch.view import MakeViewer
from hvdlite.live.viewer import Viewer


def add_live_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the live view."""
    group.add_argument(
        "--live",
        action="store_true",
        help="show below the output what every rank does, and which one holds the others up",
    )


def viewers(options: argparse.Namespace, environment: Mapping[str, str]) -> list[MakeViewer]:
    """Return what makes the viewers that the flags ask for.

    Raises:
        ArgumentError: a package for one of them is missing.
    """
    found: list[MakeViewer] = []
    if options.live:
        _demand_packages("--live", "rich")
        rows = environment.get("TERM", "dumb") != "dumb"
        colour = not environment.get("NO_COLOR")
        found.append(lambda console: _screen(console, rows, colour))
    return found


def _screen(console: Console, rows: bool, colour: bool) -> Viewer:
    from hvdlite.live.screen import Screen  # it imports rich

    return Screen(console, rows, colour)


def _demand_packages(flag: str, *names: str) -> None:
    """Check that the packages of a flag are installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ArgumentError(
            f"{flag} needs the package {', '.join(missing)}: pip install 'hvdlite[live]'"
        )
