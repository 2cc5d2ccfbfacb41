"""Read what ranks write, from many pipes at once, and never more than can be passed on."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable

from hvdlite.launch.process.sinks import STDERR

_BLOCK = 256 << 10  # read at once from a stream
_TAIL = 16 << 10  # kept of each stream for the failure report


class Stream:
    """One output of one rank, with its pipe's read end (owned)."""

    def __init__(self, rank: int, pipe: int, sink: int) -> None:
        """Name what the rank writes to: stdout, stderr, or its result."""
        os.set_blocking(pipe, False)
        self.rank = rank
        self.pipe = pipe
        self.sink = sink
        self.tail = b""
        self.at_end = False


class StreamReader:
    """Read all streams; what comes goes to `took`, which a subclass defines, and so is `full`.

    Owned and called by one loop's thread. While `full`, no stream is read: the ranks' pipes fill,
    and memory stays bounded.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._streams: list[Stream] = []
        self._paused = False

    def took(self, stream: Stream, block: bytes) -> None:
        """Pass on what a stream wrote."""
        raise NotImplementedError

    def closed(self, stream: Stream) -> None:
        """Take note that nothing more comes from a stream."""

    @property
    def full(self) -> bool:
        """Say whether reading should stop until what was read has been passed on."""
        raise NotImplementedError

    def open(self, rank: int, pipe: int, sink: int) -> None:
        """Start reading a pipe, which this owns from here on."""
        self.add(Stream(rank, pipe, sink))

    def add(self, stream: Stream) -> None:
        """Start reading a stream."""
        self._streams.append(stream)
        if not self._paused:
            self._selector.register(stream.pipe, selectors.EVENT_READ, self._reader(stream))

    def _reader(self, stream: Stream) -> Callable[[], None]:
        def read() -> None:
            self._read_block(stream)

        return read

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
        stream.tail = (stream.tail + block)[-_TAIL:] if len(block) < _TAIL else block[-_TAIL:]
        self.took(stream, block)
        return True

    def due(self, now: float) -> float | None:
        """Do what time demands; return when to be called next, if ever."""
        return None

    def throttle(self) -> None:
        """Stop reading while full, go on when not."""
        if self.full == self._paused:
            return
        self._paused = self.full
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
        if stream.at_end:
            return
        stream.at_end = True
        self.closed(stream)
        if not self._paused:
            self._selector.unregister(stream.pipe)
        os.close(stream.pipe)

    def finish(self) -> None:
        """Read what is left in every pipe, and close all."""
        for stream in self._streams:
            while not stream.at_end and self._read_block(stream):
                pass
            self._end(stream)

    def last_words(self, rank: int) -> bytes:
        """Give the last bytes that a rank wrote to stderr."""
        return b"".join(s.tail for s in self._streams if s.rank == rank and s.sink == STDERR)
