"""What workers may send to the registrar: JSON objects of known kinds and types of fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hvdlite.launch.elastic.actions import Message
from hvdlite.rendezvous.registrar_client import MAX_MESSAGE_BYTES

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


def _is_why(value: Any) -> bool:
    return value in ("start", "join", "lost", "boundary")


# A kind has fields; each has its check, and its value where it is absent.
_FIELDS: dict[str, dict[str, tuple[Callable[[Any], bool], Any]]] = {
    "ready": {
        "epoch": (_is_number, _ABSENT),
        "why": (_is_why, _ABSENT),
        "heard": (_is_number, _ABSENT),
        "synced": (_is(bool), _ABSENT),
        "endpoint": (_is(dict), _ABSENT),
        "commits": (_or_none(_is_commits), None),
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
    "bye": {"commits": (_or_none(_is_commits), None)},
    "raised": {"what": (_is(str), _ABSENT)},
    "drain": {"why": (_is(str), _ABSENT)},
    "alive": {},
}
# Where a worker counts no steps, the membership goes by its commits.
_OPTIONAL: dict[str, Callable[[Any], bool]] = {"steps": _is_number}


def parse(body: bytes) -> Message:
    """Return the message in a frame's body, with absent fields filled in."""
    # Raises MalformedError if it is not a message that a worker of hvdlite sends.
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
    for name, check in _OPTIONAL.items():
        if name in message and not check(message[name]):
            raise MalformedError(f"{name} of {kind} is not valid")
    return dict(message)
