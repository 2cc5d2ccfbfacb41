"""Channels are commands, such as ssh, or connections between two nodes.

All bytes arrive, in order, and whatever else happens ends the channel.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from hvdlite.launch import sealed
from hvdlite.launch.channels import ProcessChannel
from hvdlite.launch.sealed import SealedChannel
from hvdlite.rendezvous.handshake import FrameWriter
from patience import wait_until

KEYS = (secrets.token_bytes(32), secrets.token_bytes(32))


def test_channel_of_a_command_tells_how_the_command_ended() -> None:
    channel = ProcessChannel(["sh", "-c", "echo 'no such host' >&2; exit 7"])
    assert os.read(channel.read_fd, 10) == b""
    assert (channel.end(), channel.said()) == (7, "no such host\n")
    assert (channel.end(), channel.said()) == (7, "no such host\n")
    channel.cut()


def test_channel_of_a_command_is_cut_with_its_children() -> None:
    """ssh may have a child that carries the connection (ProxyCommand)."""
    channel = ProcessChannel(["sh", "-c", "sleep 600 & wait"])
    channel.cut()
    assert os.read(channel.read_fd, 10) == b""  # The child held this pipe, too.
    assert channel.end() == -9


def connected() -> tuple[socket.socket, socket.socket]:
    # The kernel would let its own buffers grow to tens of MiB.
    client = socket.socket()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for one in (listener, client):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        client.connect(listener.getsockname())
        return client, listener.accept()[0]


@pytest.fixture
def ends() -> Iterator[list[SealedChannel]]:
    """Give the channel's two ends: the first one says something first."""
    client, server = connected()
    made = [SealedChannel(client, KEYS, 30, b"me"), SealedChannel(server, KEYS[::-1], 30)]
    yield made
    for end in made:
        end.end()


def read_all(end: SealedChannel) -> bytes:
    found = b""
    while data := os.read(end.read_fd, 1 << 16):
        found += data
    return found


def test_bytes_and_introduction_arrive(ends: list[SealedChannel]) -> None:
    first, second = ends
    wait_until(lambda: second.introduction is not None, "the introduction")
    wait_until(lambda: first.introduction is not None, "the other one")
    assert (first.introduction, second.introduction) == (b"", b"me")
    assert second.peer == "127.0.0.1"
    os.write(first.write_fd, b"to the second")
    assert os.read(second.read_fd, 100) == b"to the second"
    os.write(second.write_fd, b"to the first")
    assert os.read(first.read_fd, 100) == b"to the first"


def test_slow_reader_gets_everything(ends: list[SealedChannel]) -> None:
    first, second = ends
    sent = secrets.token_bytes(9 << 20)

    def write() -> None:
        view = memoryview(sent)
        while view:
            view = view[os.write(first.write_fd, view) :]
        first.cut()

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.5)
    assert writer.is_alive(), "the channel takes any number of bytes"
    assert read_all(second) == sent
    writer.join()


def test_what_was_written_before_the_end_arrives(ends: list[SealedChannel]) -> None:
    """Even if this end has not read what the other one has sent."""
    first, second = ends
    os.write(second.write_fd, b"never read")
    wait_until(lambda: select.select([first.read_fd], [], [], 0)[0], "what the other one has sent")
    os.write(first.write_fd, b"the last words")
    first.end()
    assert read_all(second) == b"the last words"
    second.end()
    assert second.ended and second.said() == "it has hung up"


def test_end_of_the_connection_reaches_a_reader(ends: list[SealedChannel]) -> None:
    first, second = ends
    first.cut()
    assert read_all(first) == b""
    assert read_all(second) == b""


def test_silence_ends_the_line() -> None:
    client, server = connected()
    with client:
        channel = SealedChannel(server, KEYS, 1.0)
        assert read_all(channel) == b""
        assert channel.said() == "it has said nothing for 1 s: it is stopped, or cut off"
        channel.end()


def test_tampering_ends_the_line() -> None:
    client, server = connected()
    with client:
        client.sendall(FrameWriter(secrets.token_bytes(32)).wrap(b"me"))
        channel = SealedChannel(server, KEYS[::-1], 30)
        assert read_all(channel) == b""
        assert channel.introduction is None
        assert channel.said() == "a frame was tampered with"
        channel.end()


def test_idle_line_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "_BEAT_SECONDS", 0.1)
    client, server = connected()
    idle = [SealedChannel(client, KEYS, 2.5, b"me"), SealedChannel(server, KEYS[::-1], 2.5)]
    time.sleep(3.0)
    assert not any(end.ended for end in idle)
    for end in idle:
        end.end()
