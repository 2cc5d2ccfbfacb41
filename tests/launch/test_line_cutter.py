from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.launch.output import LineCutter

PREFIX = b"[3] "
pieces = st.lists(st.text(alphabet="ab\r\n", max_size=6).map(str.encode), max_size=12)


def cut(blocks: list[bytes]) -> bytes:
    cutter = LineCutter()
    shown = b"".join(cutter.feed(block, PREFIX) for block in blocks)
    return shown + cutter.flush(PREFIX)


def test_every_line_has_the_prefix_once() -> None:
    assert cut([b"one\ntwo\n", b"thr", b"ee\nrest"]) == b"[3] one\n[3] two\n[3] three\n[3] rest"


def test_progress_bar_has_the_prefix_once_whenever_it_is_drawn() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"\r 10%", PREFIX) == b""
    assert cutter.flush(PREFIX) == b"[3]  10%"
    assert cutter.feed(b"|###", PREFIX) == b""
    assert cutter.feed(b"\r 20%", PREFIX) == b"|###"
    assert cutter.flush(PREFIX) == b"\r[3]  20%"
    assert cutter.redrawn
    assert cutter.feed(b"\r100%\nnext\n", PREFIX) == b"\r[3] 100%\n[3] next\n"
    assert not cutter.redrawn


def test_carriage_return_alone_shows_no_empty_line() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"Epoch 1\n\r", PREFIX) == b"[3] Epoch 1\n"
    assert cutter.flush(PREFIX) == b""


def test_rest_after_an_interruption_gets_a_prefix_again() -> None:
    cutter = LineCutter()
    cutter.feed(b"half", PREFIX)
    assert cutter.flush(PREFIX) == b"[3] half"
    cutter.interrupted()
    assert cutter.feed(b" line\n", PREFIX) == b"[3]  line\n"


def cut_for_a_file(blocks: list[bytes]) -> bytes:
    cutter = LineCutter(draws=False)
    shown = b"".join(cutter.feed(block, PREFIX) for block in blocks)
    return shown + cutter.flush(PREFIX)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"\r 0%\r 50%\r100%\n", b"[3] 100%\n"),
        (b"\r 0%\r 50%\r     \rdone\nnext\n", b"[3] done\n[3] next\n"),
        (b"0%\r50%\r      \r", b"[3] 50%"),
        (b"one\r\ntwo\r\n", b"[3] one\n[3] two\n"),
        (b"one\n\n0%\r1%", b"[3] one\n[3] \n[3] 1%"),
        (b"\r\x1b[1m1/9\x1b[0m loss 3\b\b\b\r\x1b[32m9/9\x1b[0m loss\n", b"[3] 9/9 loss\n"),
        (b"1/9\b\b\b\r", b"[3] 1/9"),
        (b"\router 0%\n\r 9%\x1b[A\n\r99%\x1b[A\router 50%\n", b"[3] outer 0%\n[3] outer 50%\n"),
        (b"\x1b[32mgreen\x1b[0m\n\r1%\n", b"[3] \x1b[32mgreen\x1b[0m\n[3] 1%\n"),
    ],
)
def test_file_gets_what_a_progress_bar_has_drawn_last(written: bytes, shown: bytes) -> None:
    assert cut_for_a_file([written]) == shown
    assert cut_for_a_file([bytes([one]) for one in written]) == shown


@settings(max_examples=300)
@given(pieces)
def test_how_the_bytes_for_a_file_are_cut_into_blocks_does_not_matter(blocks: list[bytes]) -> None:
    assert cut_for_a_file(blocks) == cut_for_a_file([b"".join(blocks)])


@settings(max_examples=300)
@given(pieces)
def test_how_the_bytes_are_cut_into_blocks_does_not_matter(blocks: list[bytes]) -> None:
    assert cut(blocks) == cut([b"".join(blocks)])


@settings(max_examples=300)
@given(pieces)
def test_no_byte_is_lost_or_invented(blocks: list[bytes]) -> None:
    shown, written = cut(blocks), b"".join(blocks)
    assert shown.replace(PREFIX, b"").replace(b"\r", b"") == written.replace(b"\r", b"")
    last = [line for line in on_screen(written) if line]
    assert [line[len(PREFIX) :] for line in on_screen(shown) if line not in (b"", PREFIX)] == last
    assert all(line.startswith(PREFIX) for line in on_screen(shown) if line)


def on_screen(text: bytes) -> list[bytes]:
    """Return the lines that a terminal shows."""
    lines = []
    for line in text.split(b"\n"):
        seen = b""
        for drawn in line.split(b"\r"):
            seen = drawn + seen[len(drawn) :]
        lines.append(seen)
    return lines
