"""Move the output of the ranks to the console, in whole lines with a prefix before each.

A *stream* is one output of one rank. A *line* ends with a newline, or where a carriage return has
it drawn again, as progress bars do. The *rest* is what a stream wrote after the end of its last
line. The rest is held back until its line is complete. On a terminal it is shown after a moment, so
that the user sees a progress bar that never ends its line. The *open* stream is the one in whose
unfinished line the cursor of the console stands. Before another stream is shown, the console begins
a new line. Where there is no terminal, and for other ranks while a progress bar of a lower rank is
open, a line shows what a progress bar has drawn last in it.

Streams are read only as fast as their bytes can be passed on.
"""

from __future__ import annotations

import os
import re
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from hvdlite.launch.console import Console
from hvdlite.launch.messages import watch_for
from hvdlite.launch.process import LIVE, RESULT, STDERR
from hvdlite.live.run import About, End, Run, Viewer
from hvdlite.live.sample import Event, Sample

_BLOCK = 256 << 10  # bytes read at once from a stream
_LONGEST_LINE = 256 << 10  # bytes; a sample of rank 0 takes some 70 for each rank
_TAIL = 16 << 10  # last bytes of each stream that are kept for the failure report
_LONGEST_REST = 256 << 10  # a longer line is shown in parts, so that memory stays bounded
_REST_SHOWN_AFTER = 0.1  # seconds, on a terminal
_STATE_SHOWN_AFTER = 10.0  # seconds, of a progress bar elsewhere
_ESCAPES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")  # colors, and moves of the cursor
_SAME_ROW = re.compile(rb"(?:\x1b\[A)+\n+")  # up and down again: bars of tqdm below another


MakeViewer: TypeAlias = Callable[[Console], Viewer]


class Stream:
    """One output of one rank, which an elastic job names by the number of its worker."""

    def __init__(self, rank: int, pipe: int | None, sink: int) -> None:
        if pipe is not None:
            os.set_blocking(pipe, False)
        self.rank = rank
        self.pipe = pipe  # the read end of its pipe, which the stream owns; None on other hosts
        self.sink = sink  # STDOUT, STDERR, RESULT or LIVE
        self.tail = b""  # the last bytes that were read
        self.at_end = False  # whether the pipe has ended and is closed


class StreamReader:
    """Reads all streams of one loop, which owns it and whose thread calls it.

    A subclass defines `took`, which gets the bytes, and `full`. While `full`, no stream is read. So
    the ranks' pipes fill, and the memory of this process stays bounded.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._streams: dict[tuple[int, int], Stream] = {}  # by rank and sink
        self._paused = False

    def took(self, stream: Stream, block: bytes) -> None:
        raise NotImplementedError

    def closed(self, stream: Stream) -> None:
        """Handle the end of a stream."""

    @property
    def full(self) -> bool:
        """Whether reading should pause until the bytes that were read have been passed on."""
        raise NotImplementedError

    def open(self, rank: int, pipe: int | None, sink: int) -> None:
        """Start reading a pipe, which this object owns from now on; without one see `feed`."""
        self.add(Stream(rank, pipe, sink))

    def add(self, stream: Stream) -> None:
        self._streams[stream.rank, stream.sink] = stream
        self._watch(stream)

    def _watch(self, stream: Stream) -> None:
        """Have the selector watch the stream's pipe, or not any more while reading pauses."""
        if stream.pipe is not None:
            reads = not (self._paused or stream.at_end)
            read = partial(self._read_block, stream)
            watch_for(self._selector, stream.pipe, selectors.EVENT_READ if reads else 0, read)

    def feed(self, rank: int, sink: int, block: bytes) -> None:
        """Take what a rank on another host has written."""
        self._take(self._streams[rank, sink], block)

    def _read_block(self, stream: Stream) -> bool:
        """Read at most one block; return whether there were bytes."""
        # The selector may have returned this event together with the one that closed the pipe.
        if stream.at_end or stream.pipe is None:
            return False
        try:
            block = os.read(stream.pipe, _BLOCK)
        except BlockingIOError:
            return False
        if not block:
            self._end(stream)
            return False
        self._take(stream, block)
        return True

    def _take(self, stream: Stream, block: bytes) -> None:
        stream.tail = (stream.tail + block)[-_TAIL:] if len(block) < _TAIL else block[-_TAIL:]
        self.took(stream, block)

    def due(self, now: float) -> float | None:
        """Do what is due at the time `now`; return when to call this again, or None for never."""
        return None

    def throttle(self) -> None:
        """Pause reading if `full`, and resume it if not."""
        if self.full == self._paused:
            return
        self._paused = self.full
        for stream in self._streams.values():
            if not stream.at_end:
                self._watch(stream)

    def drain(self, rank: int) -> None:
        """Read what a rank's pipes hold now, at most eight blocks from each."""
        for stream in self._of(rank):
            for _ in range(8):
                if not self._read_block(stream):
                    break

    def _end(self, stream: Stream) -> None:
        if stream.at_end:
            return
        stream.at_end = True
        self.closed(stream)
        self._watch(stream)
        if stream.pipe is not None:
            os.close(stream.pipe)

    def finish(self) -> None:
        """Read what is left in every pipe, and close all pipes."""
        for stream in self._streams.values():
            self._finish(stream)

    def release(self, rank: int) -> None:
        """Read what is left in the pipes of a rank whose processes have ended, and forget them."""
        for stream in self._of(rank):
            self._finish(stream)
            del self._streams[rank, stream.sink]

    def _finish(self, stream: Stream) -> None:
        while not stream.at_end and self._read_block(stream):
            pass
        self._end(stream)

    def last_words(self, rank: int) -> bytes:
        """Return the last bytes that a rank wrote to stderr."""
        return b"".join(one.tail for one in self._of(rank) if one.sink == STDERR)

    def _of(self, rank: int) -> list[Stream]:
        return [stream for stream in self._streams.values() if stream.rank == rank]


class OutputPump(StreamReader):
    """Reads all streams and writes their lines to the console. It borrows all it is given.

    `timestamps` says whether the time stands before each line, and `label` names a rank, or now a
    worker, there.
    """

    def __init__(
        self,
        console: Console,
        selector: selectors.BaseSelector,
        timestamps: bool,
        view: View | None = None,
        label: Callable[[int], str] = str,
    ) -> None:
        super().__init__(selector)
        self._view = view
        self._console = console
        self._timestamps = timestamps
        self._label = label
        self._open: ShownStream | None = None
        self._results: dict[int, bytearray] = {}

    @property
    def full(self) -> bool:
        return self._console.full

    @property
    def results(self) -> Mapping[int, bytes]:
        return {rank: bytes(result) for rank, result in self._results.items()}

    def open(self, rank: int, pipe: int | None, sink: int, file: int | None = None) -> None:
        """Show, from now on, what comes through a pipe; `file` gets a copy. Both are owned here."""
        if sink in (RESULT, LIVE):
            self.add(Stream(rank, pipe, sink))
        else:
            self.add(ShownStream(rank, pipe, sink, file))

    def _prefix(self, stream: Stream) -> bytes:
        if not self._timestamps:
            return f"[{self._label(stream.rank)}] ".encode()
        now = time.time()
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        return f"{clock}.{int(now * 1000) % 1000:03d} [{self._label(stream.rank)}] ".encode()

    def took(self, stream: Stream, block: bytes) -> None:
        if stream.sink == LIVE:
            if self._view is not None:
                self._view.took(stream.rank, block)
            return
        if not isinstance(stream, ShownStream):
            self._results.setdefault(stream.rank, bytearray()).extend(block)
            return
        if stream.file is not None:
            self._console.write(stream.file, block)
        had_rest = bool(stream.cutter.rest)
        stream.cutter.draws = self._may_draw(stream)
        lines = stream.cutter.feed(block, self._prefix(stream))
        if lines:
            self._show(stream, lines)
        if stream.cutter.rest and (lines or not had_rest):
            stream.rest_since = time.monotonic()
        if len(stream.cutter.rest) > _LONGEST_REST:
            self._show_rest(stream)

    def _may_draw(self, stream: ShownStream) -> bool:
        """Whether a progress bar of the stream is drawn as it moves."""
        bar = self._open is not None and self._open.cutter.redrawn
        first = self._open is None or not bar or stream.rank <= self._open.rank
        return first and self._console.is_terminal(stream.sink)

    def _show(self, stream: ShownStream, text: bytes) -> None:
        """Write `text`; begin a new line if the cursor stands in a line of another stream."""
        if self._open is not None and self._open is not stream:
            self._console.write(self._open.sink, b"\r" if self._open.cutter.blank else b"\n")
            self._open.cutter.interrupted()
        self._console.write(stream.sink, text)
        self._open = stream if stream.cutter.mid_line else None

    def _show_rest(self, stream: ShownStream) -> None:
        text = stream.cutter.flush(self._prefix(stream))
        if text:
            self._show(stream, text)

    def due(self, now: float) -> float | None:
        """Show rests that have waited long enough; return when the next is due."""
        due: float | None = None
        for stream in self._streams.values():
            if not isinstance(stream, ShownStream) or not stream.cutter.rest.strip(b"\r"):
                continue
            on_terminal = self._console.is_terminal(stream.sink)
            stream.cutter.draws = self._may_draw(stream)
            # Elsewhere only a progress bar is shown early; on a terminal not another rank's bar.
            if not stream.cutter.draws and on_terminal == (b"\r" in stream.cutter.rest):
                continue
            when = stream.rest_since + (_REST_SHOWN_AFTER if on_terminal else _STATE_SHOWN_AFTER)
            if when <= now and not on_terminal:
                self._show(stream, stream.cutter.feed(b"\n", self._prefix(stream)))
            elif when <= now:
                self._show_rest(stream)
            elif due is None or when < due:
                due = when
        return due

    def closed(self, stream: Stream) -> None:
        if stream.sink == LIVE and self._view is not None:
            self._view.closed(stream.rank)
        if isinstance(stream, ShownStream):
            self._show_rest(stream)
            stream.cutter.redrawn = False  # Progress bars of other ranks may be drawn now.
            if stream.file is not None:
                self._console.close_file(stream.file)

    def finish(self) -> None:
        super().finish()
        if self._open is not None:
            self._console.write(self._open.sink, b"\n")
            self._open = None


class ShownStream(Stream):
    """A stream whose lines are shown; `file`, which it owns, gets a copy of its bytes."""

    def __init__(self, rank: int, pipe: int | None, sink: int, file: int | None) -> None:
        super().__init__(rank, pipe, sink)
        self.file = file
        self.cutter = LineCutter()
        self.rest_since = 0.0


class LineCutter:
    """Cut the bytes of one stream into lines and put a prefix before each."""

    def __init__(self, draws: bool = True) -> None:
        self.draws = draws  # whether each state of a progress bar is shown, or its last one
        self.rest = b""  # of an unfinished line, which is held back
        self.mid_line = False  # whether the console's cursor stands in a line of this stream
        self.redrawn = False  # whether that line is a progress bar
        self.blank = False  # whether it was drawn over with blanks

    def interrupted(self) -> None:
        """Note that another stream moved the cursor, so that what follows here needs a prefix."""
        self.mid_line = self.redrawn = False

    def feed(self, block: bytes, prefix: bytes) -> bytes:
        """Take bytes of the stream; return the lines that they complete, each with the prefix."""
        text = self.rest + block
        if self.draws and b"\r" in text:
            text = re.sub(rb"\r+(?=[\r\n])", b"", text)
        if self.draws:
            end = max(text.rfind(b"\n") + 1, text.rfind(b"\r"))
        else:
            if b"\x1b[A" in text:
                text = _SAME_ROW.sub(b"\r", text)
            text = last_states(text)
            end = text.rfind(b"\n") + 1
        self.rest = text[end:]
        return self._with(prefix, text[:end])

    def _with(self, prefix: bytes, text: bytes) -> bytes:
        if text and b"\r" not in text:  # which is fast
            lines = text.splitlines(keepends=True)
            start = b"" if self.mid_line else prefix
            self.blank, self.mid_line = False, not text.endswith(b"\n")
            self.redrawn = self.redrawn and self.mid_line and len(lines) == 1
            return start + prefix.join(lines)
        shown = []
        for line in re.findall(rb"\r?[^\r\n]*\n|\r?[^\r\n]+|\r", text):
            again = line.startswith(b"\r")
            if again and self.mid_line:
                shown.append(b"\r")
            if again or not self.mid_line:
                shown.append(prefix)
            shown.append(line[again:])
            self.blank = again and not line.strip()
            self.mid_line = not line.endswith(b"\n")
            self.redrawn = self.mid_line and (again or self.redrawn)
        return b"".join(shown)

    def flush(self, prefix: bytes) -> bytes:
        """Return the rest, with the prefix if it begins a line, although its line is incomplete."""
        text, self.rest = self.rest, b""
        if not self.draws:
            text = last_states(text + b"\n")[:-1]
        return self._with(prefix, text.rstrip(b"\r"))


def last_states(text: bytes) -> bytes:
    """Leave in each line what was drawn last, as far as it is not blank; the last line goes on."""
    if b"\r" not in text:
        return text
    *lines, rest = (line.split(b"\r") for line in text.split(b"\n"))
    ends = [_last_state(line) for line in lines]
    begun = [_last_state(rest[:-1]), rest[-1]] if len(rest) > 1 else rest
    return b"\n".join([*ends, b"\r".join(begun)])


def _last_state(states: list[bytes]) -> bytes:
    """Return what a line shows in the end: a progress bar without its colors."""
    if len(states) == 1:
        return states[0]
    plain = (_ESCAPES.sub(b"", state).rstrip(b"\b") for state in reversed(states))
    return next((state for state in plain if state.strip()), b"")


class View:
    """A view of one job, which collects the ranks' samples for its viewers.

    The launcher's thread calls its methods. Each of `makers` makes a viewer, which may write to the
    borrowed console. What a rank writes is not trusted to be a sample, and what fails in a viewer
    does not reach the job.
    """

    def __init__(self, makers: Sequence[MakeViewer], console: Console) -> None:
        self.run = Run()  # what is known of the job; viewers read it
        self._console = console
        self._viewers: list[Viewer] = []
        self._rests: dict[int, bytes] = {}  # by pipe, the beginning of a line
        self._ahead = 0.0  # seconds that rank 0's clock is ahead
        for make in makers:
            self._guard(lambda make=make: self._viewers.append(make(console)))

    def start(self, about: About) -> None:
        """Start the viewers, before the ranks."""
        self._viewers = [one for one in self._viewers if self._guard(one.start, self.run, about)]

    def stop(self, end: End) -> None:
        """Stop the viewers, when the ranks have ended and the launcher has shown why."""
        viewers, self._viewers = self._viewers, []
        for viewer in viewers:
            self._guard(viewer.stop, end)

    def took(self, number: int, block: bytes) -> None:
        """Take bytes that came through the pipe of a rank, or of a worker of an elastic job."""
        *lines, rest = (self._rests.get(number, b"") + block).split(b"\n")
        self._rests[number] = rest[:_LONGEST_LINE]  # The memory of an endless line is bounded.
        now = time.monotonic()
        for line in lines:
            try:
                sample = Sample.parse(line)
                self.run.add(sample, now)
            except Exception:  # A rank can write anything, and the launcher goes on.
                self.run.lost += 1
            else:
                self._ahead = sample.time - now

    def closed(self, number: int) -> None:
        self._rests.pop(number, None)

    def note(self, text: str) -> None:
        """Add an event that the launcher has seen, such as the death of a worker."""
        self.run.note(Event(time.monotonic() + self._ahead, "worker", -1, "", text))

    def _guard(self, call: Callable[..., None], *arguments: object) -> bool:
        try:
            call(*arguments)
        except Exception as error:
            self._console.say(f"no live view: {type(error).__name__}: {error}")
            return False
        return True
