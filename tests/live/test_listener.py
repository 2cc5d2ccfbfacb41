"""Where the page listens, its token, and what is printed of both."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hvdlite.errors import ArgumentError
from hvdlite.live.listener import open_listener, read_token

TOKEN = "0123456789abcdef" * 4


def test_a_drawn_token_is_printed_once_with_the_address() -> None:
    first, second = open_listener(), open_listener()
    try:
        assert first.token != second.token
        assert len(first.token) >= 43  # 32 bytes
        assert first.lines() == [f"live page: http://127.0.0.1:{first.port}/?token={first.token}"]
        assert first.token not in repr(first)
    finally:
        first.socket.close()
        second.socket.close()


def test_the_token_of_a_file_is_not_printed(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    with open_listener(token_file=file).socket:
        pass
    listener = open_listener(token_file=file)
    with listener.socket:
        assert listener.token == TOKEN
        (line,) = listener.lines()
        assert TOKEN not in line
        assert str(file) in line


def test_a_token_that_others_can_read_is_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o644)
    listener = open_listener(token_file=file)
    with listener.socket:
        assert f"chmod 600 {file}" in listener.lines()[1]


@pytest.mark.parametrize("text", ["", "short", TOKEN + " x", "\u00fc" * 40, TOKEN * 10])
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ArgumentError, match="openssl rand -hex 32"):
        read_token(file)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"No such file"):
        read_token(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff" * 40)
    with pytest.raises(ArgumentError, match="it is not text"):
        read_token(tmp_path / "binary")


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ArgumentError, match=rf"at 127.0.0.1:{port}: .*; another program listens"
        ):
            open_listener(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("192.0.2.1:0", "it is not an address of this host"),
        ("no.such.host.invalid:0", "cannot listen at"),
        ("9100", "give a host and a port"),
        ("127.0.0.1:70000", "give a host and a port"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(address: str, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        open_listener(address)


def test_an_address_that_others_reach_says_that_there_is_no_tls() -> None:
    listener = open_listener("0.0.0.0:0")
    with listener.socket:
        address, warning = listener.lines()
        assert address.startswith(f"live page: http://{socket.gethostname()}:{listener.port}/")
        assert "no TLS" in warning
        assert f"ssh -L {listener.port}:127.0.0.1:{listener.port}" in warning


def test_ipv6_is_written_with_brackets() -> None:
    try:
        listener = open_listener("[::1]:0")
    except ArgumentError:
        pytest.skip("this machine has no IPv6")
    with listener.socket:
        assert listener.address == f"http://[::1]:{listener.port}/"
        assert len(listener.lines()) == 1
