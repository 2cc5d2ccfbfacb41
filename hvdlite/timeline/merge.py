"""Merge the parts of a timeline, which `hvdlite.timeline.recorder` wrote, into one file.

If neither the ranks nor hvdlite-run merged them, this command does:

    python -m hvdlite.timeline merge merged.json timeline.json.parts/*/rank.*

The parts and the merged file are in the Trace Event format, which https://ui.perfetto.dev and
chrome://tracing open. Times in a part are those of the rank's monotonic clock. The header of the
part has the offset to rank 0's clock, which the merge adds.
"""

from __future__ import annotations

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
    """The description of a part, which stands in its first lines."""

    rank: int
    size: int
    host: str
    pid: int
    target: str  # The merged file has this absolute path.
    started: int  # The part began at this nanosecond of the rank's monotonic clock.
    offset: int  # The rank's clock plus so many nanoseconds is rank 0's clock.
    error: int  # The largest error of `offset` is in nanoseconds.


def opening_lines(header: Header) -> Iterator[str]:
    """Give the first lines of a part, after the opening bracket."""
    process = header.rank + 1  # csrc/trace numbers the ranks' events in the same way.
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
    complete: bool = False  # `lines` sets it if the part has its last line.
    dropped: int = 0  # The rank dropped so many events because its ring was full.

    def lines(self, origin: int) -> Iterator[str]:
        """Give the events, with times on rank 0's clock that count from `origin` (nanoseconds)."""
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
            return  # The rank was killed while it wrote this line.
        if fields["name"] == _END:
            self.complete, self.dropped = True, fields["args"]["dropped"]
        elif fields["name"] != _HEADER:
            yield event

    def summary(self) -> dict[str, Any]:
        """Return the header and what `lines` found, for the merged file."""
        return {**asdict(self.header), "complete": self.complete, "dropped": self.dropped}


def _moved(event: str, shift: int) -> str:
    """Move an event by `shift` nanoseconds; its time, in us with three decimals, stands first."""
    end = event.index(",")
    whole, _, decimals = event[len(_TIME) : end].partition(".")
    at = int(whole) * 1000 + int(decimals) + shift
    return f"{_TIME}{at // 1000}.{at % 1000:03d}{event[end:]}"


def read_header(path: Path) -> Header:
    """Read the header of a part; raise ArgumentError if the file is not one."""
    with open(path, encoding="utf-8", errors="replace") as file:
        file.readline()
        line = file.readline()
    try:
        event = json.loads(line.rstrip().rstrip(","))
        if event["name"] == _HEADER:
            return Header(**event["args"])
    except (ValueError, KeyError, TypeError):
        pass
    raise ArgumentError(f"{path} is not a part of a timeline of hvdlite")


def merge(parts: Sequence[Path], target: Path) -> None:
    """Merge the parts of several ranks into the file `target`; a part may end early."""
    # `target` is replaced in one step, so it is never incomplete. A file that is not a part raises
    # ArgumentError.
    sources = [_Source(path, read_header(path)) for path in parts]
    sources.sort(key=lambda source: source.header.rank)
    origin = min(source.header.started + source.header.offset for source in sources)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            _write_merged(file, sources, origin)
        unfinished.replace(target)
    except OSError as error:  # That of a full disk does not name a file.
        raise OSError(error.errno, error.strerror, error.filename or str(target)) from error
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
    """Merge the parts in one session's folder into their target, and remove the folder."""
    parts = sorted(folder.glob("rank.*"))
    if parts:
        merge(parts, Path(read_header(parts[0]).target))
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # It fails if other sessions are left in the folder.
        folder.parent.rmdir()


def merge_leftovers(folder: Path) -> None:
    """Merge every session below `folder` that can be; the job that wrote them must be over."""
    errors: list[OSError | ArgumentError] = []
    for session in sorted(folder.glob("*")):
        try:
            merge_session(session)
        except (OSError, ArgumentError) as error:
            errors.append(error)
    # The first OSError, or ArgumentError for a part without a header, is raised at the end.
    if errors:
        raise errors[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m hvdlite.timeline merge TARGET PARTS...`; return its exit status."""
    import argparse  # Ranks import this module, and do not use it.

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
