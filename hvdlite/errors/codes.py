"""The stable code of a message, such as HVD012, which leads to its row in docs/troubleshooting.md.

`codes.txt` beside this module has a line for each row of that page: the code, and what the
message says, where … stands for what varies. `make docs` writes the file from the page.

Thread-safety: all functions may be called from any thread.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_CODE = re.compile(r" ?\[HVD\d{3,}\]")


def with_code(message: str) -> str:
    """Return a message with its code at its end, or without a change if no row fits it."""
    # A message may quote others. Their codes go: what this message means is the first question.
    plain = _CODE.sub("", message)
    code = find_code(plain)
    return message if code is None else f"{plain} [{code}]"


def find_code(message: str) -> str | None:
    """Return the code of the row whose words are in a message, or None."""
    # The rows with the most words come first.
    for code, parts in _rows():
        if _fits(parts, message):
            return code
    return None


def split_pattern(pattern: str) -> tuple[str, ...]:
    """Return the fixed words of a row's pattern, which has … for what varies, in order."""
    return tuple(part for part in (part.strip(" '") for part in pattern.split("…")) if part)


@cache
def _rows() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return each code with its fixed words, those with the most letters first."""
    text = Path(__file__).with_name("codes.txt").read_text(encoding="utf-8")
    lines = (line.partition(" ") for line in text.splitlines())
    rows = ((code, split_pattern(pattern)) for code, _, pattern in lines)
    return tuple(sorted(rows, key=lambda row: -sum(map(len, row[1]))))


def _fits(parts: tuple[str, ...], message: str) -> bool:
    """Return whether a message has all parts, in this order."""
    end = 0
    for part in parts:
        begin = message.find(part, end)
        if begin < 0:
            return False
        end = begin + len(part)
    return True
