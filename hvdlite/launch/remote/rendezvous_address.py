"""Where the ranks of several hosts meet."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from hvdlite.launch.remote.channels import LaunchError
from hvdlite.launch.remote.host import RemoteHost
from hvdlite.rendezvous.address import interface_address, interface_addresses


def rendezvous_address(hosts: Sequence[RemoteHost], interfaces: Sequence[str]) -> str | None:
    """Choose the address of the store: the one from which this host reaches the other hosts."""
    # Returns "host:0", or None for a fresh Unix socket when there is no other host.
    # Raises LaunchError if this host reaches the others from different addresses, and `interfaces`
    # is empty.
    if not hosts:
        return None
    if interfaces:
        return f"{interface_address(interfaces)}:0"
    routes = {host.name: route_to(host.address()) for host in hosts}
    addresses = set(routes.values())
    if len(addresses) > 1:
        names = {address: name for name, address in interface_addresses().items()}
        ways = ", ".join(
            f"{host} by {address} ({names.get(address, '?')})" for host, address in routes.items()
        )
        raise LaunchError(
            f"the hosts are reached by different network interfaces: {ways}; choose one that all "
            "hosts share with --network-interfaces"
        )
    return f"{addresses.pop()}:0"


def route_to(address: str) -> str:
    """Return this host's address on the route to another one; connecting UDP sends no packet."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect((address, 9))
        return str(asked.getsockname()[0])
