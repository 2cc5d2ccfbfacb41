"""Move the workers' output to the console: whole lines, a prefix before each, no worker blocked.

Words: a *stream* is one worker's stdout or stderr. A *line* ends with a newline or a carriage
return (progress bars). The *rest* is what a stream wrote after its last line end; it is held back
until its line is complete, except on a terminal, where it is shown after a moment, so that a bar
that never ends its line is seen. The *open* stream is the one whose unfinished line the cursor of
the console stands in; another stream then first gets a line of its own.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable

from hvdlite.launch.console import Console

_BLOCK = 256 << 10  # read at once from a stream
_LONGEST_REST = 256 << 10  # a longer line is shown in parts, so that memory stays bounded
_TAIL = 16 << 10  # kept of each stream for the failure report
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


class Stream:
    """One worker's stdout or stderr, with its pipe's read end (owned)."""

    def __init__(self, rank: int, pipe: int, sink: int, file: int | None) -> None:
        """Name the console's descriptor `sink`, and a file for the plain bytes, if any (owned)."""
        os.set_blocking(pipe, False)
        self.rank = rank
        self.pipe = pipe
        self.sink = sink
        self.file = file
        self.cutter = LineCutter()
        self.tail = b""
        self.rest_since = 0.0
        self.at_end = False


class OutputPump:
    """Read all streams and write their lines to the console.

    Owned and called by the supervisor's thread. While the console is behind by its capacity, no
    stream is read: the workers' pipes fill, and memory stays bounded.
    """

    def __init__(
        self, console: Console, selector: selectors.BaseSelector, timestamps: bool
    ) -> None:
        self._console = console
        self._selector = selector
        self._timestamps = timestamps
        self._streams: list[Stream] = []
        self._open: Stream | None = None
        self._paused = False

    def add(self, stream: Stream) -> None:
        """Start reading a stream; the pump owns it from here on."""
        self._streams.append(stream)
        self._selector.register(stream.pipe, selectors.EVENT_READ, self._reader(stream))

    def _reader(self, stream: Stream) -> Callable[[], None]:
        def read() -> None:
            self._read_block(stream)

        return read

    def _prefix(self, stream: Stream) -> bytes:
        if not self._timestamps:
            return b"[%d] " % stream.rank
        now = time.time()
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        return f"{clock}.{int(now * 1000) % 1000:03d} [{stream.rank}] ".encode()

    def _read_block(self, stream: Stream) -> bool:
        """Read once; say whether there was something."""
        if stream.at_end:  # Its event came in the same batch as the end that closed it.
            return False
        try:
            block = os.read(stream.pipe, _BLOCK)
        except BlockingIOError:
            return False
        if not block:
            self._end(stream)
            return False
        if stream.file is not None:
            self._console.write(stream.file, block)
        stream.tail = (stream.tail + block)[-_TAIL:] if len(block) < _TAIL else block[-_TAIL:]
        had_rest = stream.cutter.rest_size > 0
        lines = stream.cutter.feed(block, self._prefix(stream))
        if lines:
            self._show(stream, lines)
        if stream.cutter.rest_size and (lines or not had_rest):
            stream.rest_since = time.monotonic()
        if stream.cutter.rest_size > _LONGEST_REST:
            self._show_rest(stream)
        return True

    def _show(self, stream: Stream, text: bytes) -> None:
        """Write `text`, on a line of its own if the cursor stands in another stream's."""
        if self._open is not None and self._open is not stream:
            self._console.write(self._open.sink, b"\n")
            self._open.cutter.interrupted()
        self._console.write(stream.sink, text)
        self._open = stream if stream.cutter.mid_line else None

    def _show_rest(self, stream: Stream) -> None:
        text = stream.cutter.flush(self._prefix(stream))
        if text:
            self._show(stream, text)

    def show_rests(self, now: float) -> float | None:
        """Show rests that waited long enough (terminals only); return when the next one is due."""
        due = None
        for stream in self._streams:
            if not stream.cutter.rest_size or not self._console.is_terminal(stream.sink):
                continue
            when = stream.rest_since + _REST_SHOWN_AFTER
            if when <= now:
                self._show_rest(stream)
            elif due is None or when < due:
                due = when
        return due

    def throttle(self) -> None:
        """Stop reading while the console is behind, go on when it has caught up."""
        if self._console.full == self._paused:
            return
        self._paused = self._console.full
        for stream in self._streams:
            if stream.at_end:
                continue
            if self._paused:
                self._selector.unregister(stream.pipe)
            else:
                self._selector.register(stream.pipe, selectors.EVENT_READ, self._reader(stream))

    def drain(self, rank: int) -> None:
        """Read what a rank's pipes hold now (at most what fits into a pipe)."""
        for stream in self._streams:
            if stream.rank == rank:
                for _ in range(8):
                    if not self._read_block(stream):
                        break

    def _end(self, stream: Stream) -> None:
        """Finish a stream: show its rest, close its pipe and its file."""
        if stream.at_end:
            return
        stream.at_end = True
        self._show_rest(stream)
        if not self._paused:
            self._selector.unregister(stream.pipe)
        os.close(stream.pipe)
        if stream.file is not None:
            self._console.close_file(stream.file)

    def finish(self) -> None:
        """Read what is left in every pipe, close all, and leave the console at a line's start."""
        for stream in self._streams:
            while not stream.at_end and self._read_block(stream):
                pass
            self._end(stream)
        if self._open is not None:
            self._console.write(self._open.sink, b"\n")
            self._open = None

    def tail_of(self, rank: int, sink: int) -> bytes:
        """Give the last bytes that a rank wrote to the console's descriptor `sink`."""
        return b"".join(s.tail for s in self._streams if s.rank == rank and s.sink == sink)
