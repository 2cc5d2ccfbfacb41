"""Messages between launcher and agent arrive in any pieces; the user's environment wins."""

from __future__ import annotations

import os
import re

import pytest

from hvdlite.launch.agent import environment_here
from hvdlite.launch.messages import (
    GREETING,
    Frame,
    FrameReader,
    Kind,
    NoFrameError,
    data_frame,
    frame,
)

FRAMES = [
    Frame(Kind.OUT, 3, b"text"),
    Frame(Kind.ERR, 0, b""),
    Frame(Kind.ENDED, 70_000, b"[9, true]"),
    Frame(Kind.OUT, 1, GREETING),
    Frame(Kind.RESULT, 2, bytes(100_000)),
]
STREAM = b"".join(frame(one.kind, one.number, one.body) for one in FRAMES)


@pytest.mark.parametrize("step", [1, 7, 4096, len(STREAM)])
def test_frames_arrive_in_any_pieces(step: int) -> None:
    reader = FrameReader()
    pieces = (STREAM[at : at + step] for at in range(0, len(STREAM), step))
    assert [one for piece in pieces for one in reader.feed(piece)] == FRAMES


@pytest.mark.parametrize("noise", [b"", b"Welcome!\n", b"\0hvdlite-agen", bytes(3 << 20)])
def test_what_a_login_prints_is_skipped(noise: bytes) -> None:
    reader = FrameReader(after_greeting=True)
    stream = noise + GREETING + STREAM
    pieces = [stream[at : at + 4096] for at in range(0, len(stream), 4096)]
    assert [one for piece in pieces for one in reader.feed(piece)] == FRAMES


def test_values_of_a_frame() -> None:
    sent = {"name": "ä\udcff", "numbers": [1, None, True]}
    (received,) = FrameReader().feed(data_frame(Kind.PART, 0, sent))
    assert received.data() == sent


def test_text_that_is_no_unicode_survives_in_the_environment() -> None:
    name = os.fsdecode(b"\xff\xfe")
    (received,) = FrameReader().feed(data_frame(Kind.PART, 0, {"A": name}))
    assert os.fsencode(received.data()["A"]) == b"\xff\xfe"


def test_users_environment_wins_but_a_host_keeps_its_own() -> None:
    own = {"HOME": "/home/there", "PATH": "/bin", "SSH_CONNECTION": "x", "LANG": "C"}
    sent = {"HOME": "/home/here", "PATH": "/mine", "SSH_AUTH_SOCK": "y", "RATE": "1"}
    assert environment_here(own, sent) == {
        "HOME": "/home/there",
        "PATH": "/mine",
        "SSH_CONNECTION": "x",
        "LANG": "C",
        "RATE": "1",
    }


@pytest.mark.parametrize(
    "noise", [b"Hello from the profile\n", bytes(9), b"\n\n\n\n\n\n\n\n\n\n", b"\x06" + b"\xff" * 8]
)
def test_what_is_no_frame_is_refused_and_shown(noise: bytes) -> None:
    """Unknown kinds, and lengths that would make the reader wait for ever, are refused."""
    reader = FrameReader(after_greeting=True, longest=1 << 20)
    (first,) = reader.feed(GREETING + frame(Kind.OUT, 1, b"text"))
    assert first.body == b"text"
    with pytest.raises(NoFrameError, match=re.escape(repr(noise[:9])[1:-1].strip("'"))):
        reader.feed(noise)


def test_values_that_are_none_are_refused() -> None:
    with pytest.raises(NoFrameError, match="no JSON"):
        Frame(Kind.ENDED, 0, b"no JSON").data()
