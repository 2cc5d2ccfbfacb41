"""What the membership is told, and what it answers.

What workers send are JSON objects with a "kind": `ready` says where a worker is and what it has
handed out, `connected` that it has all connections of an epoch, `unreachable` that it cannot make
one, `drain` that it is to leave, `raised` that its script has failed, `bye` that it has finished,
and `alive` nothing. `rendezvous/membership.py` sends them. The handshake and the MAC of each frame
show that they come from a worker of this job and this version, so nothing checks their fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """What the user allows. Times are seconds; 0 means without a limit."""

    np: int  # how many workers the job starts with
    min_np: int  # fewer workers do not leave a boundary
    max_np: int | None = None  # more workers do not join; None without a limit
    elastic_timeout: float = 600.0  # how long a boundary waits for `min_np` workers
    reset_limit: int | None = None  # how many epochs may follow the first one; None without a limit
    heartbeat: float = 3.0  # the workers and the registrar speak four times in this time
    # A worker that says nothing for this long is evicted. It is much longer than the heartbeat,
    # because a thread of the worker may hold Python's lock; silent hosts are found at the
    # heartbeat, by the launcher and by the connections of their workers.
    silence: float = 60.0
    start_timeout: float = 60.0  # how long the first `np` workers may take to become ready


@dataclass(frozen=True)
class Send:
    worker: int
    message: Message


@dataclass(frozen=True)
class Event:
    """Something that the launcher is told."""


@dataclass(frozen=True)
class _AboutWorker(Event):
    worker: int


@dataclass(frozen=True)
class EpochBegun(Event):
    """All workers of an epoch are connected, and are about to be told so."""

    workers: tuple[int, ...]  # its members in the order of their ranks


@dataclass(frozen=True)
class EpochFormed(Event):
    """What the user is to know of an epoch; it may come later, when the reason is known."""

    epoch: int  # its number
    workers: tuple[int, ...]  # its members in the order of their ranks
    line: str  # one line for the user: who went or came and why, and how many ranks go on


@dataclass(frozen=True)
class Evict(_AboutWorker):
    """Kill the process group of this worker now; it is not a member any more."""

    # The registrar ends its connection once it has what was sent to it, as with Refused.

    why: str


class Leaving(_AboutWorker):
    """This worker was asked to leave: it will exit with 0."""


@dataclass(frozen=True)
class Raised(_AboutWorker):
    """The script of this worker has failed: it is not a member any more, and ends by itself."""

    what: str  # what it raised, for sentences


@dataclass(frozen=True)
class Went(_AboutWorker):
    """A worker is not a member any more, and not because it was to leave."""

    at: float  # when the first sign of it came; monotonic


@dataclass(frozen=True)
class Refused(_AboutWorker):
    """A joiner does not fit the job."""

    reason: str


@dataclass(frozen=True)
class Replace(Event):
    """Another worker is to take the place of a first one, killed before the first epoch."""


class Goodbye(_AboutWorker):
    """This worker has finished its work, and only its process is left."""


@dataclass(frozen=True)
class Entered(Event):
    """The workers have entered `hvd.elastic.run`: from now on joiners make sense."""


@dataclass(frozen=True)
class Warn(Event):
    text: str


@dataclass(frozen=True)
class Failed(Event):
    """The job cannot go on; nothing follows this event."""

    reason: str


Action: TypeAlias = Send | Event
