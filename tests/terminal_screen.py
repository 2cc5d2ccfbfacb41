"""A terminal for tests: it understands the escape codes that hvdlite-run writes, and no others."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\x1b\[(\d*)([AJ])|\x1b\[[\d;]*m|(\r)|(\n)|([^\x00-\x1f\x7f])", re.DOTALL)
_CUT = re.compile(rb"(\x1b|\x1b\[[\d;]*|[\xc0-\xff][\x80-\xbf]*)\Z")


class _Line(list[str]):
    """One line of the terminal; `wraps` tells that its text goes on in the next one."""

    wraps = False


class TerminalScreen:
    """All lines that a terminal of this width has shown, those that scrolled away included."""

    def __init__(self, width: int, height: int = 1000) -> None:
        self.width, self.height = width, height
        self.lines: list[_Line] = [_Line()]
        self.row = self.column = 0
        self._rest = b""
        self.colours = True  # whether colours are allowed

    def feed_any(self, data: bytes) -> None:
        """Show bytes that may end in the middle of a character or an escape code."""
        data = self._rest + data
        end = len(data)
        while _CUT.search(data, max(0, end - 8), end):
            end -= 1
        self._rest = data[end:]
        self.feed(data[:end])

    def feed(self, data: bytes) -> None:
        """Show bytes.

        Raises:
            AssertionError: a code is not known.
        """
        text = data.decode()
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            assert match is not None, f"unknown code: {text[at : at + 20]!r}"
            at = match.end()
            self._apply(match)

    def _apply(self, match: re.Match[str]) -> None:
        if match[2] == "A":
            top = max(0, len(self.lines) - self.height)
            self.row = max(top, self.row - int(match[1] or 1))
        elif match[2] == "J":
            del self.lines[self.row + 1 :]
            del self.lines[self.row][self.column :]
            self.lines[self.row].wraps = False
        elif match[3]:
            self.column = 0
        elif match[4]:
            self.column = 0  # as the terminal's driver has it
            self._down()
        elif match[5]:
            self._put(match[5])
        else:
            assert match[2] in (None, "m") and self.colours, f"unknown code: {match[0]!r}"

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append(_Line())

    def _put(self, char: str) -> None:
        if self.column == self.width:
            self.lines[self.row].wraps = True
            self.column = 0
            self._down()
        line = self.lines[self.row]
        line += " " * (self.column + 1 - len(line))
        line[self.column] = char
        self.column += 1

    @property
    def unwrapped(self) -> list[str]:
        """The lines as they were written, before the terminal has wrapped them."""
        lines = [""]
        for line in self.lines:
            lines[-1] += "".join(line)
            if not line.wraps:
                lines.append("")
        return [line.rstrip() for line in lines[:-1]][: -1 if not self.lines[-1] else None]

    @property
    def text(self) -> list[str]:
        """The lines, without blanks at their ends; the empty line of the cursor is left out."""
        shown = ["".join(line).rstrip() for line in self.lines]
        return shown[:-1] if shown[-1] == "" else shown
