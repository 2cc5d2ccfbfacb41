"""Which other hosts take part when a job starts: all that come while others do.

A host that a script or a cluster's software lists may be dead, or busy. The job does not wait for
it much longer than for the others, if these are enough.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from hvdlite.launch.remote.channels import AbsentError, RemoteLauncher
from hvdlite.launch.remote.host import RemoteHost, connect_deadline
from hvdlite.launch.remote.messages import Kind, frame

ALIVE_SECONDS = 3.0  # between messages that tell an agent that the launcher is alive
_PATIENCE = 5.0  # seconds after enough hosts have come; as many as these took, if that is longer


def await_hosts(
    hosts: Sequence[RemoteHost],
    enough: Callable[[Collection[str]], bool],
    remote_launcher: RemoteLauncher,
    interrupted_fd: int,
    come: Callable[[RemoteHost], bool] = lambda host: bool(host.hello),
    what: str = "answered",
) -> dict[str, str]:
    """Receive from the agents until all have come, or enough and the rest is late."""
    # The threads of `hosts` do not run yet.
    # `enough` returns whether the job can start with the hosts of these names.
    # `remote_launcher` says how long a host may take, and a byte at `interrupted_fd` ends the wait.
    # `come` returns whether a host has come as far as it should; by default, has said hello.
    # Returns, by name, why each host cannot be reached. Those that are late may still come.
    # Raises AbsentError if without a host there are not enough, and it cannot be reached, or takes
    # too long.
    # Raises LaunchError if the job cannot run on a host, or one has another version of hvdlite.
    # Raises KeyboardInterrupt after such a byte.
    begun = time.monotonic()
    deadline = connect_deadline(remote_launcher)
    leave_at: float | None = None
    left = {host.name: host for host in hosts}
    missed: dict[str, str] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(interrupted_fd, selectors.EVENT_READ, None)
        for host in hosts:
            selector.register(host.fileno(), selectors.EVENT_READ, host)
        while waiting := [name for name, host in left.items() if not come(host)]:
            now = time.monotonic()
            if leave_at is None and enough([name for name in left if name not in waiting]):
                leave_at = min(deadline, now + max(_PATIENCE, now - begun))
            if leave_at is not None and now >= leave_at:
                break
            if now >= deadline:
                raise AbsentError(f"host {', '.join(waiting)} has not {what} in time")
            until = deadline if leave_at is None else leave_at
            keep_alive(left.values())
            for key, _ in selector.select(min(until - now, ALIVE_SECONDS)):
                if key.data is None:
                    raise KeyboardInterrupt
                try:
                    key.data.receive()
                except AbsentError as error:
                    selector.unregister(key.data.fileno())
                    del left[key.data.name]
                    missed[key.data.name] = str(error)
                    if not enough(list(left)):
                        raise
    return missed


def keep_alive(hosts: Iterable[RemoteHost]) -> None:
    """Tell agents that have answered that the launcher is alive, while it waits for others."""
    for host in hosts:
        if host.hello:
            host.send(frame(Kind.ALIVE))
