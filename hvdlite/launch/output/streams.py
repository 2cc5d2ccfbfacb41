"""Read the output of the ranks from many pipes, and only as much as can be passed on.

Pipes with samples for a view (sink LIVE) are read at a fixed pace instead, whatever comes: nothing
waits for a rank that floods its pipe, and the samples do not wait for a slow console.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable

from hvdlite.launch.process.sinks import LIVE, STDERR

_BLOCK = 256 << 10  # bytes read at once from a stream
_LIVE_BLOCK = 64 << 10  # the same of samples
_LIVE_SECONDS = 0.25  # between two looks at the samples
_TAIL = 16 << 10  # last bytes of each stream that are kept for the failure report


class Stream:
    """One output of one rank, which an elastic job names by the number of its worker."""

    def __init__(self, rank: int, pipe: int, sink: int) -> None:
        """Take over the read end of a pipe."""
        os.set_blocking(pipe, False)
        self.rank = rank
        self.pipe = pipe  # the read end of its pipe, which the stream owns
        self.sink = sink  # STDOUT, STDERR, RESULT or LIVE
        self.tail = b""  # the last bytes that were read
        self.at_end = False  # whether the pipe has ended and is closed


class StreamReader:
    """Reads all streams of one loop, which owns it and whose thread calls it."""

    # A subclass defines `took`, which gets the bytes, and `full`. While `full`, no stream is read.
    # So the ranks' pipes fill, and the memory of this process stays bounded.

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._streams: list[Stream] = []
        self._paused = False
        self._live_at = 0.0  # monotonic time of the next look at the samples

    def took(self, stream: Stream, block: bytes) -> None:
        """Pass on a block of bytes that a stream wrote."""
        raise NotImplementedError

    def closed(self, stream: Stream) -> None:
        """Handle the end of a stream."""

    @property
    def full(self) -> bool:
        """Whether reading should pause until the bytes that were read have been passed on."""
        raise NotImplementedError

    def open(self, rank: int, pipe: int, sink: int) -> None:
        """Start reading a pipe, which this object owns from now on."""
        self.add(Stream(rank, pipe, sink))

    def add(self, stream: Stream) -> None:
        """Start reading a stream."""
        self._streams.append(stream)
        if self._is_watched(stream):
            self._selector.register(stream.pipe, selectors.EVENT_READ, self._reader(stream))

    def _is_watched(self, stream: Stream) -> bool:
        """Return whether the selector has the stream's pipe."""
        return not self._paused and stream.sink != LIVE

    def _reader(self, stream: Stream) -> Callable[[], None]:
        def read() -> None:
            self._read_block(stream)

        return read

    def _read_block(self, stream: Stream) -> bool:
        """Read at most one block; return whether there were bytes."""
        if stream.at_end:  # The selector returned this event together with the one that closed it.
            return False
        try:
            block = os.read(stream.pipe, _LIVE_BLOCK if stream.sink == LIVE else _BLOCK)
        except BlockingIOError:
            return False
        if not block:
            self._end(stream)
            return False
        stream.tail = (stream.tail + block)[-_TAIL:] if len(block) < _TAIL else block[-_TAIL:]
        self.took(stream, block)
        return True

    def due(self, now: float) -> float | None:
        """Do what is due at the time `now`; return when to call this again, or None for never."""
        live = [one for one in self._streams if one.sink == LIVE and not one.at_end]
        if not live:
            return None
        if now >= self._live_at:
            self._live_at = time.monotonic() + _LIVE_SECONDS
            for stream in live:
                self._read_block(stream)
        return self._live_at

    def throttle(self) -> None:
        """Pause reading if `full`, and resume it if not."""
        if self.full == self._paused:
            return
        self._paused = self.full
        for stream in self._streams:
            if stream.at_end or stream.sink == LIVE:
                continue
            if self._paused:
                self._selector.unregister(stream.pipe)
            else:
                self._selector.register(stream.pipe, selectors.EVENT_READ, self._reader(stream))

    def drain(self, rank: int) -> None:
        """Read what a rank's pipes hold now, at most eight blocks from each."""
        for stream in self._streams:
            if stream.rank == rank:
                for _ in range(8):
                    if not self._read_block(stream):
                        break

    def _end(self, stream: Stream) -> None:
        if stream.at_end:
            return
        stream.at_end = True
        self.closed(stream)
        if self._is_watched(stream):
            self._selector.unregister(stream.pipe)
        os.close(stream.pipe)

    def finish(self) -> None:
        """Read what is left in every pipe, and close all pipes."""
        for stream in self._streams:
            while not stream.at_end and self._read_block(stream):
                pass
            self._end(stream)

    def release(self, rank: int) -> None:
        """Read what is left in the pipes of a rank whose processes have ended, and forget them."""
        for stream in [stream for stream in self._streams if stream.rank == rank]:
            while not stream.at_end and self._read_block(stream):
                pass
            self._end(stream)
            self._streams.remove(stream)

    def last_words(self, rank: int) -> bytes:
        """Return the last bytes that a rank wrote to stderr."""
        return b"".join(s.tail for s in self._streams if s.rank == rank and s.sink == STDERR)
