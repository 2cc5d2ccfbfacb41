"""Serve the store in rank 0's process, for launchers that do not serve one."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.address import UNIX, is_loopback, split_host
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.environment import WorkerEnvironment
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.store import Store

_REMEDY = "set HVDLITE_RENDEZVOUS for all ranks to an address and a free port of rank 0's host"
_AGAIN_SECONDS = 0.1  # until rank 0 looks its own name up again
_QUIET_SECONDS = 5.0  # how long rank 0 waits for its name before it says so

_Listening = TypeVar("_Listening")


def serve_store(worker: WorkerEnvironment, job: Job, deadline: Deadline) -> Store:
    """Serve the store at the address that the ranks were told; the caller closes it."""
    # The DNS record of a new pod may come half a minute late, and may be that of its predecessor
    # until then. So rank 0 looks its name up again until the deadline. It never listens at all
    # addresses instead.
    # `worker` is rank 0's environment.
    # `deadline` limits how long rank 0 waits for its own name.
    # Raises BootstrapError if rank 0 cannot listen there, or no other host could reach it.
    # Raises GivenUpError if the deadline was given up.
    assert worker.rendezvous is not None
    address = bound_to(worker.bind_address, worker.rendezvous)
    store = listen_patiently(
        lambda: Store.start(worker.size, job, address), address, "rank 0", _REMEDY, deadline
    )
    # The usual reason is an /etc/hosts that maps the host's own name to 127.0.1.1.
    if is_loopback(store.address) and worker.local_size not in (None, worker.size):
        store.close()
        raise BootstrapError(
            f"rank 0 would serve at {address}, which no other host can reach; {_REMEDY}"
        )
    return store


def listen_patiently(
    listen: Callable[[], _Listening], address: str, who: str, remedy: str, deadline: Deadline
) -> _Listening:
    """Listen at the address of a name that may not be this host's yet; see `serve_store`."""
    # `remedy` says what to do if it cannot be listened at.
    # Raises BootstrapError if this host cannot listen there.
    # Raises GivenUpError if the deadline was given up.
    notice_at = time.monotonic() + _QUIET_SECONDS
    while True:
        try:
            return listen()
        except OSError as error:
            if not _may_pass(error, address) or _deadline_passes(deadline):
                reason = error.strerror or error
                raise BootstrapError(f"{who} cannot listen at {address}: {reason}; {remedy}") from (
                    error
                )
            if time.monotonic() > notice_at:
                notice_at = float("inf")
                print(
                    f"hvdlite: {who} waits until {address} is an address of its host: "
                    f"{error.strerror} (said once)",
                    file=sys.stderr,
                )


def bound_to(bind_address: str | None, address: str) -> str:
    """Return the address; with HVDLITE_BIND_ADDRESS, that one and the port of the address."""
    if bind_address is None or address.startswith(UNIX):
        return address
    port = split_host(address)[1]
    return f"[{bind_address}]:{port}" if ":" in bind_address else f"{bind_address}:{port}"


def _may_pass(error: OSError, address: str) -> bool:
    """Return whether a later look-up of the host's name may find an address of this host."""
    if isinstance(error, socket.gaierror):
        return True
    if error.errno != errno.EADDRNOTAVAIL or address.startswith(UNIX):
        return False
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(split_host(address)[0].partition("%")[0])
        return False
    return True


def _deadline_passes(deadline: Deadline) -> bool:
    try:
        deadline.sleep(_AGAIN_SECONDS)
    except TimeoutError:
        return True
    return False
