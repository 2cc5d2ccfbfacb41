"""What workers may send to the registrar: JSON objects of known kinds and types of fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from hvdlite.rendezvous.client import MAX_MESSAGE_BYTES

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
    """Send this message to this worker."""

    worker: int
    message: Message


@dataclass(frozen=True)
class _AboutWorker:
    worker: int


class Close(_AboutWorker):
    """End the connection of this worker once it has what was sent to it."""


@dataclass(frozen=True)
class EpochBegun:
    """All workers of an epoch are connected, and are about to be told so."""

    workers: tuple[int, ...]  # its members in the order of their ranks


@dataclass(frozen=True)
class EpochFormed:
    """What the user is to know of an epoch; it may come later, when the reason is known."""

    epoch: int  # its number
    workers: tuple[int, ...]  # its members in the order of their ranks
    line: str  # one line for the user: who went or came and why, and how many ranks go on


@dataclass(frozen=True)
class Evict:
    """Kill the process group of this worker now; it is not a member any more."""

    worker: int
    why: str


class Leaving(_AboutWorker):
    """This worker was asked to leave: it will exit with 0."""


@dataclass(frozen=True)
class Raised:
    """The script of this worker has failed: it is not a member any more, and ends by itself."""

    worker: int
    what: str  # what it raised, for sentences


@dataclass(frozen=True)
class Went:
    """A worker is not a member any more, and not because it was to leave."""

    worker: int
    at: float  # when the first sign of it came; monotonic


@dataclass(frozen=True)
class Refused:
    """A joiner does not fit the job."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Replace:
    """Another worker is to take the place of a first one, killed before the first epoch."""


class Goodbye(_AboutWorker):
    """This worker has finished its work, and only its process is left."""


@dataclass(frozen=True)
class Entered:
    """The workers have entered `hvd.elastic.run`: from now on joiners make sense."""


@dataclass(frozen=True)
class Warn:
    text: str


@dataclass(frozen=True)
class Failed:
    """The job cannot go on; nothing follows this event."""

    reason: str


Event: TypeAlias = (
    EpochBegun
    | EpochFormed
    | Evict
    | Leaving
    | Raised
    | Went
    | Refused
    | Replace
    | Goodbye
    | Entered
    | Warn
    | Failed
)
Action: TypeAlias = Send | Close | Event


_ABSENT = object()


class MalformedError(ValueError):
    """A message is not what a worker of hvdlite sends; the text says in what way."""


def _is_number(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**64


def _is_commits(value: Any) -> bool:
    # The keys of a JSON object are texts.
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


# By kind the fields, each with its check and its value where it is absent.
_FIELDS: dict[str, dict[str, tuple[Callable[[Any], bool], Any]]] = {
    "ready": {
        "epoch": (_is_number, _ABSENT),
        "why": (lambda value: value in ("start", "join", "lost", "boundary"), _ABSENT),
        "heard": (_is_number, _ABSENT),
        "synced": (_is(bool), _ABSENT),
        "endpoint": (_is(dict), _ABSENT),
        "commits": (_or_none(_is_commits), None),
        "steps": (_or_none(_is_number), None),  # None where a worker counts no steps
        "stuck": (_or_none(_is(str)), None),
        "suspect": (_or_none(_is_number), None),
        "reason": (_is(str), ""),
        "restored": (_is(bool), False),
    },
    "connected": {"epoch": (_is_number, _ABSENT), "clock": (lambda _: True, _ABSENT)},
    "unreachable": {
        "epoch": (_is_number, _ABSENT),
        "worker": (_is_number, _ABSENT),
        "reason": (_is(str), ""),
        "silent": (_is(bool), False),
    },
    "bye": {"commits": (_or_none(_is_commits), None), "steps": (_or_none(_is_number), None)},
    "raised": {"what": (_is(str), _ABSENT)},
    "drain": {"why": (_is(str), _ABSENT)},
    "alive": {},
}


def parse(body: bytes) -> Message:
    """Return the message in a frame's body, with absent fields filled in; or a MalformedError."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise MalformedError(f"it has {len(body)} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise MalformedError("it is not JSON") from None
    kind = message.get("kind") if isinstance(message, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise MalformedError("it is not of a known kind")
    for name, (check, default) in _FIELDS[kind].items():
        value = message.setdefault(name, default)
        if value is _ABSENT or not check(value):
            raise MalformedError(f"{name} of {kind} is not valid")
    return dict(message)
