"""Move the workers' output to the console: whole lines, a prefix before each, no worker blocked.

Words: a *stream* is one worker's stdout or stderr. A *line* ends with a newline or a carriage
return (progress bars). The *rest* is what a stream wrote after its last line end; it is held back
until its line is complete, except on a terminal, where it is shown after a moment, so that a bar
that never ends its line is seen. The *open* stream is the one whose unfinished line the cursor of
the console stands in; another stream then first gets a line of its own.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Mapping

from hvdlite.launch.output.console import Console
from hvdlite.launch.output.streams import Stream, StreamReader
from hvdlite.launch.process.sinks import RESULT

_LONGEST_REST = 256 << 10  # a longer line is shown in parts, so that memory stays bounded
_REST_SHOWN_AFTER = 0.1  # seconds, on a terminal


class LineCutter:
    """Cut the bytes of one stream into lines and put a prefix before each.

    Example:
        >>> cutter = LineCutter()
        >>> cutter.feed(b"one\\ntw", b"[0] ")
        b'[0] one\\n'
        >>> cutter.feed(b"o\\n", b"[0] ")
        b'[0] two\\n'
    """

    def __init__(self) -> None:
        self._rest = b""
        self._mid_line = False  # The start of the current line is on the console already.
        self._after_return = False

    @property
    def rest_size(self) -> int:
        """Count the bytes of an unfinished line that are held back."""
        return len(self._rest)

    @property
    def mid_line(self) -> bool:
        """Say whether the console's cursor stands in, or at the start of, this stream's line."""
        return self._mid_line or self._after_return

    def interrupted(self) -> None:
        """Another stream has moved the cursor on; what follows here needs a prefix again."""
        self._mid_line = self._after_return = False

    def feed(self, block: bytes, prefix: bytes) -> bytes:
        """Take what the stream wrote; return the lines that it completed, each with the prefix."""
        text = self._rest + block
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._rest = text[end:]
        if not end:
            return b""
        lines = text[:end].splitlines(keepends=True)
        continued = self._mid_line or (self._after_return and lines[0] == b"\n")
        self._mid_line = False
        self._after_return = lines[-1].endswith(b"\r")
        return (b"" if continued else prefix) + prefix.join(lines)

    def flush(self, prefix: bytes) -> bytes:
        """Give out the rest, although its line is not complete."""
        text, self._rest = self._rest, b""
        if not text:
            return b""
        start = b"" if self._mid_line else prefix
        self._mid_line, self._after_return = True, False
        return start + text


class ShownStream(Stream):
    """A stream whose lines are shown; `file` takes its plain bytes, if any (owned)."""

    def __init__(self, rank: int, pipe: int, sink: int, file: int | None = None) -> None:
        super().__init__(rank, pipe, sink)
        self.file = file
        self.cutter = LineCutter()
        self.rest_since = 0.0


class OutputPump(StreamReader):
    """Read all streams and write their lines to the console."""

    def __init__(
        self, console: Console, selector: selectors.BaseSelector, timestamps: bool
    ) -> None:
        super().__init__(selector)
        self._console = console
        self._timestamps = timestamps
        self._open: ShownStream | None = None
        self._results: dict[int, bytearray] = {}

    @property
    def full(self) -> bool:
        """Say whether the console is behind by its capacity."""
        return self._console.full

    @property
    def results(self) -> Mapping[int, bytes]:
        """By rank, all bytes that it returned."""
        return {rank: bytes(result) for rank, result in self._results.items()}

    def open(self, rank: int, pipe: int, sink: int, file: int | None = None) -> None:
        """Start showing what comes through a pipe (owned), with a copy to `file` (owned)."""
        self.add(
            Stream(rank, pipe, sink) if sink == RESULT else ShownStream(rank, pipe, sink, file)
        )

    def _prefix(self, stream: Stream) -> bytes:
        if not self._timestamps:
            return b"[%d] " % stream.rank
        now = time.time()
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        return f"{clock}.{int(now * 1000) % 1000:03d} [{stream.rank}] ".encode()

    def took(self, stream: Stream, block: bytes) -> None:
        """Show the lines that a block completes."""
        if not isinstance(stream, ShownStream):
            self._results.setdefault(stream.rank, bytearray()).extend(block)
            return
        if stream.file is not None:
            self._console.write(stream.file, block)
        had_rest = stream.cutter.rest_size > 0
        lines = stream.cutter.feed(block, self._prefix(stream))
        if lines:
            self._show(stream, lines)
        if stream.cutter.rest_size and (lines or not had_rest):
            stream.rest_since = time.monotonic()
        if stream.cutter.rest_size > _LONGEST_REST:
            self._show_rest(stream)

    def _show(self, stream: ShownStream, text: bytes) -> None:
        """Write `text`, on a line of its own if the cursor stands in another stream's."""
        if self._open is not None and self._open is not stream:
            self._console.write(self._open.sink, b"\n")
            self._open.cutter.interrupted()
        self._console.write(stream.sink, text)
        self._open = stream if stream.cutter.mid_line else None

    def _show_rest(self, stream: ShownStream) -> None:
        text = stream.cutter.flush(self._prefix(stream))
        if text:
            self._show(stream, text)

    def due(self, now: float) -> float | None:
        """Show rests that waited long enough (terminals only); return when the next one is due."""
        due = None
        for stream in self._streams:
            if not isinstance(stream, ShownStream) or not stream.cutter.rest_size:
                continue
            if not self._console.is_terminal(stream.sink):
                continue
            when = stream.rest_since + _REST_SHOWN_AFTER
            if when <= now:
                self._show_rest(stream)
            elif due is None or when < due:
                due = when
        return due

    def closed(self, stream: Stream) -> None:
        """Show a stream's rest and close its file."""
        if isinstance(stream, ShownStream):
            self._show_rest(stream)
            if stream.file is not None:
                self._console.close_file(stream.file)

    def finish(self) -> None:
        """Read what is left in every pipe, close all, and leave the console at a line's start."""
        super().finish()
        if self._open is not None:
            self._console.write(self._open.sink, b"\n")
            self._open = None
