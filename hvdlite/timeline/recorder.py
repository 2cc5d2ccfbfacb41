"""The files of timelines: every rank writes a part, and the parts are merged into one file.

A *session* lasts from `start_timeline` to `stop_timeline` or `shutdown`. A rank's *part* is
`rank.N.part` in the session's folder while it is being written, and `rank.N.json` once it is
complete. The rank that completes the last part of a session merges all parts. If the ranks span
several hosts, rank 0 merges, and the parts of other hosts travel to it by a collective, unless the
world has failed. Parts that are left are merged by hvdlite-run when the job is over, or by hand
(`hvdlite.timeline.__main__`). Times in a part are those of the rank's monotonic clock; the merge
adds the offset to rank 0's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeAlias

from hvdlite.errors import ArgumentError, ForkedError
from hvdlite.rendezvous.connection import ClockOffset

_HEADER, _END = "hvdlite", "hvdlite_end"  # the names of the first and the last event of a part
_TIME = '{"ts":'
Gather: TypeAlias = Callable[[bytes, str], Sequence[bytes | memoryview]]

_sessions = 0  # that this process has begun, and every other rank, since each begins the same ones


class Recorder:
    """Begins and ends this rank's parts of one world's timelines, one at a time.

    `host_of` has, by rank, the index of its host, and `clock` is the offset of this host's clock to
    rank 0's. `job_id` distinguishes the parts of this job from those that another job left.
    hvdlite-run merges the parts in `folder`, which is None without hvdlite-run. `epoch` is None
    outside elastic jobs, whose workers have not begun equally many sessions. It is not thread-safe:
    `hvdlite.basics` calls it under its lock.
    """

    def __init__(
        self,
        rank: int,
        host_of: Sequence[int],
        clock: ClockOffset,
        job_id: bytes,
        folder: Path | None,
        epoch: int | None = None,
    ) -> None:
        self.target: Path | None = None  # as the user has named it; None while no part is written
        # What the headers of all parts have in common.
        self._header = Header(
            rank=rank,
            size=len(host_of),
            host=socket.gethostname(),
            pid=os.getpid(),
            target="",
            started=0,
            offset=clock.nanoseconds,
            error=clock.error,
        )
        self._remote = [other for other, host in enumerate(host_of) if host != host_of[0]]
        self._job = job_id.hex()[:8]
        self._folder = folder
        self._epoch = epoch
        self._part: _Part | None = None

    def begin_by_knob(self, path: str) -> int:
        """Begin this rank's part if the knob `timeline` names a file; otherwise return -1."""
        # Horovod's scripts set "DYNAMIC" to allow start_timeline(), which is always allowed here.
        if path in ("", "DYNAMIC"):
            return -1
        target = Path(path)
        # A later world of this process gets a file of its own: the number of sessions so far stands
        # before the suffix of its name.
        if _sessions > 0 and self._epoch is None:
            target = target.with_stem(f"{target.stem}.{_sessions}")
        return self.begin(target)

    def begin(self, path: str | Path) -> int:
        """Begin this rank's part; return the descriptor for its events, which the caller owns."""
        global _sessions
        if os.getpid() != self._header.pid:
            raise ForkedError("a timeline is for the process that called hvd.init(), not its child")
        if self._part is not None:
            raise ArgumentError(
                "a timeline is being written already; call hvd.stop_timeline() first"
            )
        asked = target = Path(path).absolute()
        if self._epoch:
            target = asked.with_stem(f"{asked.stem}.epoch{self._epoch}")
        _check_writable(target)
        folder = self._folder or target.with_name(target.name + ".parts")
        session = f"{_sessions}" if self._epoch is None else f"{asked.stem}.epoch{self._epoch}"
        header = replace(self._header, target=str(target), started=time.monotonic_ns())
        part = _Part(folder / f"{self._job}.{session}", header)
        try:
            fd = part.open()
        except OSError as error:
            with contextlib.suppress(OSError):
                part.remove()
            raise ArgumentError(
                f"the timeline {target} cannot be written: {part.folder}: {error.strerror}"
            ) from error
        self._part, self.target = part, asked
        _sessions += 1
        return fd

    def cancel(self) -> None:
        """Remove the part that has begun, before any event was written."""
        part = self._take_part()
        if part is not None:
            part.remove()

    def _take_part(self) -> _Part | None:
        part, self._part, self.target = self._part, None, None
        return part

    def end(self, gather: Gather | None) -> None:
        """Complete this rank's part, and merge the session if this was its last part.

        If the ranks span several hosts, every rank must call it. `gather` is an allgather for them:
        it takes the bytes of this rank and the name of the collective. It is None if the world is
        over: then the parts stay in their folders, as they do if it raises. A child of fork(),
        whose parent writes the part, does nothing.
        """
        part = self._take_part()
        if part is None or os.getpid() != self._header.pid:
            return
        part.unfinished.rename(part.complete(self._header.rank))
        if self._remote:
            if gather is not None:
                self._end_across_hosts(part, gather)
        elif all(part.complete(rank).exists() for rank in range(self._header.size)):
            try:
                taken = part.take_over()
            except FileNotFoundError:
                return  # Another rank completed its part at the same time, and merges.
            merge_session(taken)

    def _end_across_hosts(self, part: _Part, gather: Gather) -> None:
        own = self._header.rank
        sent = b""
        if own in self._remote:
            sent = zlib.compress(part.complete(own).read_bytes(), 1)
        parts = gather(sent, f"#timeline.{part.folder.name}")
        if own == 0:
            # Rank 0 renames the folder first. If the hosts share it, other ranks remove their parts
            # from it meanwhile.
            taken = part.take_over()
            for rank in self._remote:
                (taken / part.complete(rank).name).write_bytes(zlib.decompress(parts[rank]))
            merge_session(taken)
        elif own in self._remote:
            part.remove()


@dataclass(frozen=True)
class _Part:
    """This rank's part of one session, in the session's folder."""

    folder: Path
    header: Header

    @property
    def unfinished(self) -> Path:
        return self.folder / f"rank.{self.header.rank}.part"

    def complete(self, rank: int) -> Path:
        return self.folder / f"rank.{rank}.json"

    def open(self) -> int:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # An earlier job with the same id may have left a complete part.
        self.complete(self.header.rank).unlink(missing_ok=True)
        self.unfinished.write_text("[\n" + "".join(opening_lines(self.header)), encoding="utf-8")
        return os.open(self.unfinished, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def remove(self) -> None:
        self.unfinished.unlink(missing_ok=True)
        self.complete(self.header.rank).unlink(missing_ok=True)
        for folder in (self.folder, self.folder.parent):
            with contextlib.suppress(OSError):  # It has other parts, or does not exist.
                folder.rmdir()

    def take_over(self) -> Path:
        """Rename the folder, so that no other rank merges the session; return its new name."""
        return self.folder.rename(self.folder.with_name(self.folder.name + ".merging"))


def _check_writable(target: Path) -> None:
    reason = "it is not a regular file"
    if not target.exists() or target.is_file():
        try:
            with open(target, "ab"):
                return
        except OSError as error:
            reason = str(error.strerror)
    raise ArgumentError(f"the timeline {target} cannot be written: {reason}")


@dataclass(frozen=True)
class Header:
    """The description of a part, which stands in its first lines."""

    rank: int
    size: int
    host: str
    pid: int
    target: str  # the absolute path of the merged file
    started: int  # the beginning of the part, in nanoseconds of the rank's monotonic clock
    offset: int  # in nanoseconds, from the rank's clock to rank 0's
    error: int  # the largest one of `offset`, in nanoseconds


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
    dropped: int = 0  # events that the rank dropped because its ring was full

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
    """Merge the parts of several ranks into the file `target`, which is replaced in one step.

    A part may end early. A file that is not a part raises ArgumentError.
    """
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
    """Merge every session below `folder`, after their job; raise the first error at the end."""
    errors: list[OSError | ArgumentError] = []
    for session in sorted(folder.glob("*")):
        try:
            merge_session(session)
        except (OSError, ArgumentError) as error:
            errors.append(error)
    if errors:
        raise errors[0]
