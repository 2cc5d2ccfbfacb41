"""Channels that are commands, such as ssh: how they end, and how they are ended."""

from __future__ import annotations

import os

from hvdlite.launch.channels import ProcessChannel


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
