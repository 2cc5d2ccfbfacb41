"""Serve the store in rank 0's process, for launchers that do not serve one."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import sys
import time

from hvdlite.bootstrap.address import UNIX, is_loopback, split_host
from hvdlite.bootstrap.deadline import Deadline
from hvdlite.bootstrap.environment import WorkerEnvironment
from hvdlite.bootstrap.handshake import Job
from hvdlite.bootstrap.store import Store
from hvdlite.errors import BootstrapError

_REMEDY = "set HVDLITE_RENDEZVOUS for all ranks to an address and a free port of rank 0's host"
_AGAIN_SECONDS = 0.1  # until rank 0 looks its own name up again
_QUIET_SECONDS = 5.0  # how long rank 0 waits for its name before it says so


def serve_store(worker: WorkerEnvironment, job: Job, deadline: Deadline) -> Store:
    """Serve the store at the address that the ranks were told; the caller closes it.

    The DNS record of a new pod may come half a minute late, and may be that of its predecessor
    until then. So rank 0 looks its name up again until the deadline. It never listens at all
    addresses instead.

    Args:
        worker: rank 0's environment.
        job: whose ranks may connect.
        deadline: limits how long rank 0 waits for its own name.

    Raises:
        BootstrapError: rank 0 cannot listen there, or no other host could reach it.
        GivenUpError: the deadline was given up.
    """
    address = _where_to_listen(worker)
    notice_at = time.monotonic() + _QUIET_SECONDS
    while True:
        try:
            store = Store.start(worker.size, job, address)
            break
        except OSError as error:
            if not _may_pass(error, address) or _deadline_passes(deadline):
                reason = error.strerror or error
                raise BootstrapError(
                    f"rank 0 cannot listen at {address}: {reason}; {_REMEDY}"
                ) from error
            if time.monotonic() > notice_at:
                notice_at = float("inf")
                print(
                    f"hvdlite [0] waits until {address} is an address of its host: "
                    f"{error.strerror} (said once)",
                    file=sys.stderr,
                )
    # The usual reason is an /etc/hosts that maps the host's own name to 127.0.1.1.
    if is_loopback(store.address) and worker.local_size not in (None, worker.size):
        store.close()
        raise BootstrapError(
            f"rank 0 would serve at {address}, which no other host can reach; {_REMEDY}"
        )
    return store


def _where_to_listen(worker: WorkerEnvironment) -> str:
    """Return the rendezvous; with HVDLITE_BIND_ADDRESS, that address and the rendezvous's port."""
    address = worker.rendezvous
    assert address is not None
    if worker.bind_address is None or address.startswith(UNIX):
        return address
    port = split_host(address)[1]
    host = worker.bind_address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
