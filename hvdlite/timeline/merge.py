"""Merge the parts that the ranks wrote of a timeline (`hvdlite.timeline.recorder`) into one file.

By hand it is done like this, where nobody else did:

    python -m hvdlite.timeline merge merged.json timeline.json.parts/*/rank.*

Parts and the merged file are in the Trace Event format; https://ui.perfetto.dev and
chrome://tracing open either. In a part, times are those of the rank's own monotonic clock; the
merge adds the offset to rank 0's clock, which the part's header holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from hvdlite.errors import ArgumentError

_HEADER, _END = "hvdlite", "hvdlite_end"
_TIME = '{"ts":'


@dataclass(frozen=True)
class Header:
    """What a part says about itself in its first line.

    Attributes:
        target: the merged file, as an absolute path.
        started: when the part began, in nanoseconds of the rank's monotonic clock.
        offset: what to add to such a time to get one of rank 0's clock; right within `error`.
    """

    rank: int
    size: int
    host: str
    pid: int
    target: str
    started: int
    offset: int
    error: int


def opening_lines(header: Header) -> Iterator[str]:
    """Give the first lines of a part, after the opening bracket."""
    process = header.rank + 1  # as csrc/trace numbers them
    name = f"rank {header.rank} ({header.host})"
    for field, arguments in (
        (_HEADER, asdict(header)),
        ("process_name", {"name": name}),
        ("process_sort_index", {"sort_index": header.rank}),
    ):
        event = {"ph": "M", "pid": process, "tid": 0, "name": field, "args": arguments}
        yield json.dumps(event, separators=(",", ":")) + ",\n"


@dataclass
class _Source:
    """A part that is being merged."""

    path: Path
    header: Header
    complete: bool = False
    dropped: int = 0

    def lines(self, origin: int) -> Iterator[str]:
        """Give its events, their times on rank 0's clock and from `origin` on."""
        shift = self.header.offset - origin
        with open(self.path, encoding="utf-8", errors="replace") as file:
            for line in file:
                event = line.rstrip().rstrip(",")
                if event.startswith(_TIME) and line.endswith("},\n"):
                    yield _moved(event, shift)
                elif event.startswith('{"ph":"M"'):
                    yield from self._metadata(event)

    def _metadata(self, event: str) -> Iterator[str]:
        try:
            fields = json.loads(event)
        except ValueError:
            return  # The line that was being written when the rank was killed.
        if fields["name"] == _END:
            self.complete, self.dropped = True, fields["args"]["dropped"]
        elif fields["name"] != _HEADER:
            yield event

    def summary(self) -> dict[str, Any]:
        """Say what came out of it."""
        return {**asdict(self.header), "complete": self.complete, "dropped": self.dropped}


def _moved(event: str, shift: int) -> str:
    """Move an event by `shift` nanoseconds; its time stands first and has three decimals."""
    end = event.index(",")
    whole, _, decimals = event[len(_TIME) : end].partition(".")
    at = int(whole) * 1000 + int(decimals) + shift
    return f"{_TIME}{at // 1000}.{at % 1000:03d}{event[end:]}"


def read_header(path: Path) -> Header:
    """Read a part's first lines.

    Raises:
        ArgumentError: the file is no part of a timeline.
        OSError: it cannot be read.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        file.readline()
        line = file.readline()
    try:
        event = json.loads(line.rstrip().rstrip(","))
        if event["name"] == _HEADER:
            return Header(**event["args"])
    except (ValueError, KeyError, TypeError):
        pass
    raise ArgumentError(f"{path} is no part of a timeline of hvdlite")


def merge(parts: Sequence[Path], target: Path) -> None:
    """Make one file of the parts of several ranks, complete or cut.

    The file appears whole or not at all.

    Raises:
        ArgumentError: one of the files is no part of a timeline.
        OSError: a file cannot be read or written.
    """
    sources = [_Source(path, read_header(path)) for path in parts]
    sources.sort(key=lambda source: source.header.rank)
    origin = min(source.header.started + source.header.offset for source in sources)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            _write_merged(file, sources, origin)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_merged(file: IO[str], sources: Sequence[_Source], origin: int) -> None:
    file.write('{"displayTimeUnit":"ms","traceEvents":[')
    separator = "\n"
    for source in sources:
        for line in source.lines(origin):
            file.write(separator + line)
            separator = ",\n"
        if not source.complete:
            process = source.header.rank + 1
            note = {"labels": "ends early: the rank was killed, or still runs"}
            event = {"ph": "M", "pid": process, "tid": 0, "name": "process_labels", "args": note}
            file.write(separator + json.dumps(event, separators=(",", ":")))
    summary = {"ranks": [source.summary() for source in sources]}
    file.write(f'\n],"otherData":{json.dumps(summary)}}}\n')


def merge_session(folder: Path) -> None:
    """Merge what lies in one session's folder into its target, and remove the folder.

    Raises:
        OSError: a file cannot be read or written.
    """
    parts = sorted(folder.glob("rank.*"))
    if parts:
        merge(parts, Path(read_header(parts[0]).target))
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # Other sessions are left in it.
        folder.parent.rmdir()


def merge_leftovers(folder: Path) -> None:
    """Merge every session below `folder`; the job that wrote them is over.

    Raises:
        ArgumentError: a part has no header.
        OSError: a file cannot be read or written.
    """
    for session in sorted(folder.glob("*")):
        merge_session(session)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m hvdlite.timeline merge TARGET PARTS...`; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m hvdlite.timeline")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("merge", help="make one timeline of the parts of several ranks")
    command.add_argument("target", type=Path, help="the file to write")
    command.add_argument("parts", type=Path, nargs="+", help="the files of the ranks")
    options = parser.parse_args(arguments)
    try:
        merge(options.parts, options.target)
    except (OSError, ArgumentError) as error:
        print(f"hvdlite.timeline: {error}", file=sys.stderr)
        return 1
    return 0
