"""Ranks can meet at any address of a host; an address that is wrong gets a clear message."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous import address as address_module
from hvdlite.rendezvous.address import address_of, dial, listen, listen_on_loopback
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.environment import detect
from patience import HANG

BY_HAND = {"HVDLITE_RANK": "0", "HVDLITE_SIZE": "2", "HVDLITE_TOKEN": "00" * 32}


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as asked:
            asked.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "address",
    [
        "node1",
        "node1:",
        "node1:http",
        ":25999",
        "node1:-5",
        "node1:99999",
        "a..b:5",
        f"{'x' * 70}:5",
    ],
)
@pytest.mark.parametrize("job", [{}, {"HVDLITE_JOB_ID": "00" * 16}])
def test_text_that_is_not_an_address_is_shown(address: str, job: dict[str, str]) -> None:
    with pytest.raises(BootstrapError, match="HVDLITE_RENDEZVOUS cannot be used: .* a port, such"):
        detect({**BY_HAND, **job, "HVDLITE_RENDEZVOUS": address})


def names(monkeypatch: pytest.MonkeyPatch, hosts: dict[str, list[str]]) -> None:
    """Make the resolver return these addresses for these names, in this order."""
    ask = socket.getaddrinfo

    def answer(host: str, port: Any, *args: Any, **kwargs: Any) -> list[Any]:
        found = (ask(one, port, *args, **kwargs) for one in hosts.get(host, [host]))
        return [row for rows in found for row in rows]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("addresses", [["::1"], ["::1", "127.0.0.1"], ["127.0.0.1"]])
def test_ranks_meet_at_a_name_with_any_addresses(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names(monkeypatch, {"node1": addresses})
    with listen("node1:0") as listener:
        port = address_of(listener).rpartition(":")[2]
        with dial(f"node1:{port}", Deadline(HANG)) as there, listener.accept()[0] as here:
            assert there.getpeername()[:2] == here.getsockname()[:2]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_port_can_be_listened_at_again_at_once(host: str) -> None:
    """The side that closes a connection first leaves its port in TIME_WAIT."""
    if host == "[::1]" and not has_ipv6():
        pytest.skip("no IPv6 here")
    with listen(f"{host}:0") as free:
        port = address_of(free).rpartition(":")[2]
    with (
        listen(f"{host}:{port}") as first,
        dial(f"{host}:{port}", Deadline(HANG)),
        first.accept()[0] as served,
    ):
        served.close()
    with (
        listen(f"{host}:{port}"),
        pytest.raises(OSError, match="in use"),
        listen(f"{host}:{port}"),
    ):
        pass


def test_stranger_at_no_port() -> None:
    with listen("127.0.0.1:0") as listener:
        address = address_of(listener)
    with pytest.raises(ConnectionRefusedError):
        dial(address, Deadline(HANG))


def test_host_without_ipv4_on_its_loopback_takes_the_next_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(address_module, "LOOPBACKS", ("203.0.113.1", "127.0.0.1"))
    with listen_on_loopback() as listener:
        dial(address_of(listener), Deadline(HANG)).close()


def test_host_without_a_loopback_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_module, "LOOPBACKS", ("203.0.113.1", "203.0.113.2"))
    with pytest.raises(OSError, match="has neither 203.0.113.1 nor 203.0.113.2: its loopback"):
        listen_on_loopback()
