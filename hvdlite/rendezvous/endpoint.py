"""A process's endpoint: the listeners at which others connect to it, and what they need to know."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdlite.rendezvous import forked
from hvdlite.rendezvous.address import (
    address_of,
    fresh_unix_address,
    interface_address,
    listen,
    listen_on_loopback,
)
from hvdlite.rendezvous.environment import WorkerEnvironment


class Endpoint:
    """The listeners of this process, for one epoch or for several in a row."""

    # Addresses are abstract Unix sockets, and ports that the kernel chooses. So no files stay
    # behind, and the listeners disappear with the process: forked children close their copies. A
    # peer that dials between two epochs waits in a listener's queue until the next epoch begins
    # here.

    def __init__(
        self, worker: WorkerEnvironment, own_host: str | None, agreed: Mapping[str, str]
    ) -> None:
        """Listen."""
        # `own_host` is the IP address at which other hosts reach this one, unless `worker` has a
        # `bind_address` or names an interface; None if all processes share this host.
        if worker.bind_address is not None:
            own_host = worker.bind_address
        elif worker.interfaces:
            own_host = interface_address(worker.interfaces)
        self.elastic = worker.elastic  # whether the process is a worker of an elastic job
        self._listeners = [listen(fresh_unix_address())]
        try:
            self._listeners.append(listen(f"{own_host}:0") if own_host else listen_on_loopback())
            # This says what others need to connect to this process, and to check that it fits; it
            # can be written as JSON.
            self.description = self._describe(worker, agreed)
        except BaseException:
            self.close()
            raise
        forked.leave_to_parent(self)

    def _describe(self, worker: WorkerEnvironment, agreed: Mapping[str, str]) -> dict[str, Any]:
        # The number of ranks on a host changes from epoch to epoch, so there it is counted.
        local_size = None if worker.elastic else worker.local_size
        said = (worker.local_rank, local_size, worker.node)
        return {
            "host": host_identity(worker.host_id),
            # With HVDLITE_HOST_ID, a rank acts as another host than the one its launcher knows.
            "said": said if worker.host_id is None else (),
            "unix": address_of(self._listeners[0]),
            "tcp": address_of(self._listeners[1]),
            "agreed": dict(agreed),
        }

    def listeners(self) -> list[socket.socket]:
        """Return duplicates of the listeners, for one epoch; the caller owns them."""
        return [listener.dup() for listener in self._listeners]

    def close(self) -> None:
        """Stop listening."""
        for listener in self._listeners:
            listener.close()

    def close_in_child(self) -> None:
        """Close the copies of a forked child."""
        self.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def host_identity(override: str | None) -> str:
    """Return a text that identifies this host; ranks with equal texts share memory."""
    # A host name alone is not enough. The text also depends on the network namespace (containers),
    # the user, and the boot. `override` stands for all of these, so that tests can let one machine
    # act as several hosts.
    if override is not None:
        return "override:" + override
    parts = [socket.gethostname(), str(os.getuid()), str(Path("/proc/self/ns/net").stat().st_ino)]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return hashlib.sha256("|".join(parts).encode()).hexdigest()
