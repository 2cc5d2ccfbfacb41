"""Rows that stay below the output on a terminal, such as those of `--live`.

The rows are drawn below the last line of output. Before more output is written they are erased, and
afterwards they are drawn again. While the last line of output is not complete, a copy of it is the
first row; the line itself is written when it is complete.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_LONGEST_REST = 8 << 10  # bytes; the rows disappear while the output stands in a longer line
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?")


class Region:
    """What the console has drawn on its terminal, and has to erase; for the console's thread."""

    def __init__(self) -> None:
        self._rows: Sequence[bytes] = ()
        self._width = 0  # for which the rows were made
        self._drawn = 0  # rows that are on the terminal
        self._rest = b""  # The incomplete last line of the output; a copy is drawn.
        self._rest_fd = 0
        self._in_line = False  # whether the output stands in an incomplete line

    def set(self, rows: Sequence[bytes], width: int) -> None:
        """Take other rows, for `draw`."""
        # Each of `rows` is shorter than the terminal is wide, without a line feed; none: draw
        # nothing.
        self._rows, self._width = rows, width

    @property
    def wanted(self) -> bool:
        """Whether there are rows to draw."""
        return bool(self._rows)

    @property
    def drawn(self) -> bool:
        """Whether there is anything to erase."""
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
        if not self._rows or self._in_line or width < self._width:
            return b""
        shown = [*([_cut(self._rest, width - 1)] if self._rest else []), *self._rows]
        self._drawn = len(shown)
        return b"".join(row + b"\n" for row in shown)


def _visible(line: bytes) -> bytes:
    """Drop what the line has overwritten of itself, as progress bars do."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


def _cut(line: bytes, width: int) -> bytes:
    """Return the beginning of a line that fits, without colours and control characters."""
    kept, left = [], width
    for char in _ESCAPES.sub("", line.decode(errors="replace")).expandtabs():
        if char.isprintable():
            left -= _cells(char)
            if left < 0:
                break
            kept.append(char)
    return "".join(kept).encode()


def _cells(char: str) -> int:
    """Return how many columns of a terminal a character takes."""
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
