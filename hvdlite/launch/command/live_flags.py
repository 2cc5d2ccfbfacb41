"""The flags by which people watch a job: while it runs, and when it has ended."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from hvdlite.errors import ArgumentError
from hvdlite.launch.output.console import Console
from hvdlite.launch.view import MakeViewer
from hvdlite.live.listener import Listener, open_listener
from hvdlite.live.viewer import Viewer

_LONGEST_END = 1.0  # seconds that the launcher waits for a slow terminal
# What may follow --live-page. No program has such a name.
IS_ADDRESS = re.compile(r"(.*:)?[0-9]+")


def viewers(options: argparse.Namespace, environment: Mapping[str, str]) -> list[MakeViewer]:
    """Return what makes the viewers that the flags ask for."""
    # Raises ArgumentError if a package for one of them is missing, or a flag cannot be used.
    found: list[MakeViewer] = []
    if options.live:
        _demand_packages("--live", "rich")
        rows = environment.get("TERM", "dumb") != "dumb"
        colour = not environment.get("NO_COLOR")
        found.append(lambda console: _screen(console, rows, colour))
    if options.report is not None:
        found.append(_report(options.report, options.baseline))
    elif options.baseline is not None:
        raise ArgumentError("--baseline is for the report: give --report, too")
    if options.live_page is not None:
        _demand_packages("--live-page", "prometheus_client", "starlette", "uvicorn")
        listener = open_listener(options.live_page, options.live_token_file)
        found.append(lambda console: _page(console, listener))
    elif options.live_token_file is not None:
        raise ArgumentError("--live-token-file belongs to --live-page, which is not given")
    return found


def _report(path: Path, baseline: Path | None) -> MakeViewer:
    _demand_packages("--report", "matplotlib")
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


def _page(console: Console, listener: Listener) -> Viewer:
    from hvdlite.live.page import Page  # it imports a web server

    return Page(listener, console.say)


def _demand_packages(flag: str, *names: str) -> None:
    """Check that the packages of a flag are installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ArgumentError(
            f"{flag} needs the package {', '.join(missing)}: pip install 'hvdlite[live]'"
        )
