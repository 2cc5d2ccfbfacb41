"""The launcher's own stdout and stderr: it writes to them without blocking.

The terminal, pipe or file behind them may be slow, stopped or gone. So a thread writes, in order,
from a bounded queue, while the launcher's loop continues to watch the ranks.

On a terminal there may be rows below the output, such as those of `--live`. The same thread erases
and draws them, so that no other write comes in between.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Sequence

from hvdlite.launch.process import STDERR, STDOUT

_CAPACITY = 4 << 20  # queued bytes; while there are more, the console is full
_END = -1  # in place of a descriptor: ends the thread; queued last
_NOTHING = -2  # in place of a descriptor: only the rows below the output have changed
_PACE = 0.05  # seconds from one drawing of these rows until they are erased for more output
_LAST_WORDS = 10.0  # seconds for what was said after the last wait; a busy machine needs a moment
_LONGEST_WITHOUT = 0.25  # seconds that they are missing while much output comes
_LONGEST_REST = 8 << 10  # bytes; the rows disappear while the output stands in a longer line
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?")


class Console(contextlib.AbstractContextManager["Console"]):
    """A queue of bytes for descriptors, and the thread that writes them; a context manager.

    The owner's thread calls the methods; any thread may call `say`, `show` and `write`. `wake_fd`
    becomes readable when the queue has room again, when it is empty, and when a descriptor breaks;
    the owner then calls `woken`, and reads `full` and `broken`.
    """

    def __init__(self) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._terminals = {fd for fd in (STDOUT, STDERR) if os.isatty(fd)}
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, bytes | None]] = deque()  # None closes the descriptor.
        self._bytes = 0
        self._failed: dict[int, OSError] = {}
        self._given_up = False  # the last wait for the queue was in vain
        self._region: Region | None = None
        self._region_fd = STDERR
        self._changes = False  # whether the rows of the region are to be drawn, or erased for good
        self._drawn_at = 0.0
        self._thread = threading.Thread(target=self._run, name="hvdlite-console", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """End the thread once it has written what is queued, and wait for that."""
        # The process ends soon, and would take the launcher's last words with it. It does not wait
        # if the last wait was in vain, because the reader of the output may never read on.
        with self._changed:
            self._queue.append((_END, None))
            self._changed.notify_all()
        if not self._given_up:
            self._thread.join(_LAST_WORDS)

    def is_terminal(self, fd: int) -> bool:
        return fd in self._terminals

    @property
    def full(self) -> bool:
        return self._bytes > _CAPACITY

    @property
    def broken(self) -> bool:
        """Whether the reader of stdout or stderr has gone, as in `hvdlite-run ... | head`."""
        return any(isinstance(self._failed.get(fd), BrokenPipeError) for fd in (STDOUT, STDERR))

    def say(self, text: str) -> None:
        self.write(STDERR, f"hvdlite-run: {text}\n".encode())

    def write(self, fd: int, data: bytes) -> None:
        """Queue bytes without blocking; bytes for a descriptor that has failed are dropped."""
        # So is all else when the reader of stdout or stderr has gone: the job then ends, and what
        # its ranks say of each other's end explains nothing.
        with self._changed:
            ends = self.broken and fd in (STDOUT, STDERR)
            if fd not in self._failed and not ends:
                self._queue.append((fd, data))
                self._bytes += len(data)
                self._changed.notify_all()

    def open_region(self) -> int | None:
        """Keep rows below the output from now on; return the terminal's descriptor, if any.

        If both stdout and stderr are terminals, they have to be the same one.
        """
        if not self._terminals:
            return None
        with self._changed:
            self._region_fd = max(self._terminals)
            self._region = Region()
        return self._region_fd

    def show(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show these rows below the output, in place of those before; none: erase them for good.

        Each is a style, which is the number of an escape code or empty, and a text. No control
        character in it reaches the terminal, and what is too long for it is cut off.
        """
        with self._changed:
            if self._region is not None:
                self._region.rows = rows
                self._changes = True
                self._changed.notify_all()

    def close_file(self, fd: int) -> None:
        """Close a descriptor once everything that was queued before is written."""
        with self._changed:
            self._queue.append((fd, None))
            self._changed.notify_all()

    def woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def drained(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until the queue is written; return whether it is."""
        with self._changed:
            written = self._changed.wait_for(
                lambda: not (self._bytes or self._queue or self._changes), timeout
            )
            self._given_up = not written
        return written

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._changes)
                fd, data = self._queue[0] if self._queue else (_NOTHING, None)
            if fd == _END:
                os.close(self.wake_fd)
                return
            if fd == _NOTHING:
                self._draw()
                continue
            if data is None:
                os.close(fd)
            elif fd not in self._failed:
                self._put(fd, data)
            with self._changed:
                was_full = self.full
                self._queue.popleft()
                self._bytes -= len(data or b"")
                wake = (was_full and not self.full) or not self._queue
                self._changed.notify_all()
            if wake:
                os.eventfd_write(self.wake_fd, 1)

    def _put(self, fd: int, data: bytes) -> None:
        """Write output, which on the region's terminal first erases the region."""
        region = self._region
        if region is None or fd not in self._terminals:
            self._write_all(fd, data)
            return
        if region.drawn:
            time.sleep(max(0.0, self._drawn_at + _PACE - time.monotonic()))
            self._write_all(self._region_fd, region.erase())
        for one, text in region.take(fd, data):
            self._write_all(one, text)
        with self._changed:
            self._changes = True
        if time.monotonic() - self._drawn_at > _LONGEST_WITHOUT:
            self._draw()

    def _draw(self) -> None:
        """Draw the region's rows as they are now, or erase them for good if there are none."""
        region, fd = self._region, self._region_fd
        assert region is not None
        try:
            width = os.get_terminal_size(fd).columns
        except OSError:
            width = 0  # The terminal has gone.
        with self._changed:
            text = region.erase() + region.draw(width)
            rest = [] if region.rows else region.rest()
        for one, data in ((fd, text), *rest):
            if data and one not in self._failed:
                self._write_all(one, data)
        with self._changed:
            self._drawn_at = time.monotonic()
            self._changes = False
            self._changed.notify_all()

    def _write_all(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:  # A process that shares the descriptor made it non-blocking.
                select.select([], [fd], [])
            except OSError as error:
                self._fail(fd, error)
                return

    def _fail(self, fd: int, error: OSError) -> None:
        with self._changed:
            self._failed[fd] = error
        if not isinstance(error, BrokenPipeError) and fd != STDERR:
            what = "standard output" if fd == STDOUT else "a file of --output-filename"
            self.say(f"cannot write {what} any more: {error.strerror}")
        os.eventfd_write(self.wake_fd, 1)


class Region:
    """Rows that stay below the output on a terminal; for the console's thread.

    The rows are drawn below the last line of output. Before more output is written they are erased,
    and afterwards they are drawn again. While the last line of output is not complete, a copy of it
    is the first row; the line itself is written when it is complete.
    """

    def __init__(self) -> None:
        self.rows: Sequence[tuple[str, str]] = ()  # each a style and a text
        self._drawn = 0  # rows that are on the terminal
        self._rest = b""  # the incomplete last line of the output, of which a copy is drawn
        self._rest_fd = 0
        self._in_line = False  # whether the output stands in an incomplete line

    @property
    def drawn(self) -> bool:
        return self._drawn > 0

    def erase(self) -> bytes:
        """Return what erases the rows; then output can be written."""
        drawn, self._drawn = self._drawn, 0
        return b"\r\x1b[%dA\x1b[J" % drawn if drawn else b""

    def take(self, fd: int, data: bytes) -> list[tuple[int, bytes]]:
        """Take output; return what is to be written now, after `erase`, and where."""
        writes = []
        if self._rest and fd != self._rest_fd:
            writes += self.rest()
        text = self._rest + data
        end = text.rfind(b"\n") + 1
        self._in_line = self._in_line and not end
        rest = _visible(text[end:])
        if self._in_line or len(rest) > _LONGEST_REST:
            self._in_line = self._in_line or bool(rest)
            end, rest = len(text), b""
        self._rest, self._rest_fd = rest, fd
        return writes + ([(fd, text[:end])] if end else [])

    def rest(self) -> list[tuple[int, bytes]]:
        """Return the incomplete line, and where it is to be written."""
        rest, self._rest = self._rest, b""
        self._in_line = self._in_line or bool(rest)
        return [(self._rest_fd, rest)] if rest else []

    def draw(self, width: int) -> bytes:
        """Return what draws the rows on a terminal of this width, whose rows are erased."""
        if not self.rows or self._in_line or not width:
            return b""
        rest = [("", self._rest.decode(errors="replace"))] if self._rest else []
        shown = [styled(style, text, width - 1) + b"\n" for style, text in (*rest, *self.rows)]
        self._drawn = len(shown)
        return b"".join(shown)


def _visible(line: bytes) -> bytes:
    """Drop what the line has overwritten of itself, as progress bars do."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


def styled(style: str, line: str, width: int) -> bytes:
    """Return the beginning of a line that fits, in this style, without its control characters."""
    kept, left = [], width
    for char in _ESCAPES.sub("", line).expandtabs():
        if char.isprintable():
            left -= _cells(char)
            if left < 0:
                break
            kept.append(char)
    text = "".join(kept)
    return (f"\x1b[{style}m{text}\x1b[0m" if style else text).encode()


def _cells(char: str) -> int:
    """Return how many columns of a terminal a character takes."""
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
