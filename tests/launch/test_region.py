"""Rows below the output on a terminal never tear a line of it, and go without a trace."""

from __future__ import annotations

import random

import pytest

from hvdlite.launch.console import Region
from terminal_screen import TerminalScreen

WIDTH = 40


class Shown:
    """A region on a terminal, used as the console uses it."""

    def __init__(self) -> None:
        self.region = Region()
        self.screen = TerminalScreen(WIDTH)

    def output(self, data: bytes, fd: int = 1) -> None:
        self.screen.feed(self.region.erase())
        for _, text in self.region.take(fd, data):
            self.screen.feed(text)

    def draw(self, *rows: bytes) -> None:
        self.region.rows = [("", row.decode()) for row in rows]
        self.screen.feed(self.region.erase() + self.region.draw(WIDTH))

    def close(self) -> None:
        self.draw()
        for _, text in self.region.rest():
            self.screen.feed(text)


def test_rows_stay_below_the_output() -> None:
    shown = Shown()
    shown.draw(b"A", b"B")
    shown.output(b"one\ntwo\n")
    assert shown.screen.text == ["one", "two"]
    shown.draw(b"A", b"B")
    assert shown.screen.text == ["one", "two", "A", "B"]
    shown.draw(b"C")
    assert shown.screen.text == ["one", "two", "C"]
    shown.close()
    assert shown.screen.text == ["one", "two"]


def test_progress_bar_moves_in_one_line() -> None:
    shown = Shown()
    for percent in range(0, 100, 7):
        shown.output(b"\r\x1b[32m[0] %3d %%\x1b[0m " % percent)
        shown.draw(b"A")
        assert shown.screen.text == [f"[0] {percent:3d} %", "A"]
    shown.output(b"\r[0] done \n")
    shown.draw(b"A")
    assert shown.screen.text == ["[0] done", "A"]


@pytest.mark.parametrize("line", [b"x" * 200, "\N{CJK UNIFIED IDEOGRAPH-4E2D}".encode() * 60])
def test_copy_of_a_long_line_fits_and_the_line_is_written_whole(line: bytes) -> None:
    shown = Shown()
    shown.output(line)
    shown.draw(b"A")
    first, second = shown.screen.text
    assert 0 < len(first) < WIDTH and second == "A"
    shown.output(b"\n")
    assert "".join(shown.screen.text) == line.decode()


def test_very_long_line_goes_through_without_rows() -> None:
    shown = Shown()
    for _ in range(30):
        shown.output(b"y" * 1000)
        shown.draw(b"A")
    assert shown.screen.text[-1] == "y" * WIDTH
    shown.output(b"\nz\n")
    shown.draw(b"A")
    assert shown.screen.text[-2:] == ["z", "A"]
    assert "".join(shown.screen.text[:-2]) == "y" * 30_000


def test_rows_are_cut_to_the_terminal() -> None:
    shown = Shown()
    shown.draw(b"A" * WIDTH)
    assert shown.screen.text == ["A" * (WIDTH - 1)]


@pytest.mark.parametrize("seed", range(200))
def test_any_output_at_any_moment_is_that_without_rows(seed: int) -> None:
    draw = random.Random(seed)
    shown, plain = Shown(), TerminalScreen(WIDTH)
    for _ in range(60):
        words = [b"a", b"bc" * draw.randrange(40), b"\n", b"\n", b"\x1b[1mred\x1b[0m"]
        text = b"".join(draw.choices(words, k=draw.randrange(6)))
        shown.output(text, fd=draw.choice((1, 1, 1, 2)))
        plain.feed(text)
        if draw.random() < 0.5:
            shown.draw(*(b"row %d" % n for n in range(draw.randrange(1, 5))))
    shown.close()
    assert shown.screen.text == plain.text
