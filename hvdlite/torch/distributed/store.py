"""torch.distributed's store, over the authenticated connections of hvdlite's own.

Rank 0 serves it as torch's TCPStore is served, but only to processes that know the job's secret:
within a host on a Unix socket, between hosts on a TCP port behind the handshake. The values that
torch puts there name addresses and decide how groups are made.
"""

# ruff: noqa: D102 (the methods of `JobStore` are those of `torch.distributed.Store`)

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import distributed

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous import forked
from hvdlite.rendezvous.address import UNIX, split_host
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.peer import Peer
from hvdlite.rendezvous.store import Store, StoreClient


class KeyServer(Store):
    """The service; values are base64 texts, as messages are JSON."""

    def __init__(self, job: Job, size: int, listener: socket.socket) -> None:
        super().__init__(job, size, listener)
        self._listener = listener
        self._values: dict[str, str] = {}
        self._waiting: list[tuple[float, Peer, list[str]]] = []
        self._operations |= {
            "set": self._set,
            "append": self._append,
            "add": self._add,
            "compare": self._compare,
            "delete": self._delete,
            "check": self._check,
            "count": self._count,
            "get": self._get,
        }
        forked.leave_to_parent(self)

    def close_in_child(self) -> None:
        """Close the child's copies, so that the other ranks notice the death of the parent."""
        self._listener.close()
        for peer in self._peers:
            peer.connection.close()

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = _text(value)

    def _set(self, peer: Peer, key: str, value: Any, until: float) -> None:
        self._values |= value
        self._answer([peer], "given")
        self._look(time.monotonic())

    def _append(self, peer: Peer, key: str, value: Any, until: float) -> None:
        self._put(key, _bytes(self._values.get(key, "")) + _bytes(value))
        self._answer([peer], "given")
        self._look(time.monotonic())

    def _add(self, peer: Peer, key: str, value: Any, until: float) -> None:
        total = int(_bytes(self._values[key]) if key in self._values else b"0") + int(value)
        self._put(key, str(total).encode())
        self._answer([peer], "given", total)
        self._look(time.monotonic())

    def _compare(self, peer: Peer, key: str, value: Any, until: float) -> None:
        expected, desired = value
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self._values[key] = desired
        self._answer([peer], "given", self._values.get(key, expected))
        self._look(time.monotonic())

    def _delete(self, peer: Peer, key: str, value: Any, until: float) -> None:
        self._answer([peer], "given", self._values.pop(key, None) is not None)

    def _check(self, peer: Peer, key: str, value: Any, until: float) -> None:
        self._answer([peer], "given", all(one in self._values for one in value))

    def _count(self, peer: Peer, key: str, value: Any, until: float) -> None:
        self._answer([peer], "given", len(self._values))

    def _get(self, peer: Peer, key: str, value: Any, until: float) -> None:
        self._waiting.append((until, peer, value))
        self._look(time.monotonic())

    def _look(self, now: float) -> None:
        """Answer those whose keys are there, and those who have waited for long enough."""
        waiting, self._waiting = self._waiting, []
        for until, peer, keys in waiting:
            missing = [key for key in keys if key not in self._values]
            if not missing:
                self._answer([peer], "given", [self._values[key] for key in keys])
            elif now >= until:
                self._answer([peer], "failed", f"no rank has set {', '.join(missing)} in time")
            else:
                self._waiting.append((until, peer, keys))

    def _tick(self, asleep: float) -> None:
        super()._tick(asleep)
        self._look(asleep)

    def _left(self, peer: Peer) -> None:
        super()._left(peer)
        self._waiting = [one for one in self._waiting if one[1] is not peer]


class JobStore(distributed.Store):  # type: ignore[misc]
    """One rank's face of the store, as torch.distributed uses it. Any thread may call it."""

    # Operations of one rank follow each other, as those of a TCPStore do. torch calls some methods
    # by the names that they have in C++.

    def __init__(
        self, address: str, job: Job, rank: int, timeout: timedelta, server: KeyServer | None
    ) -> None:
        """Connect; `server` is kept, on the rank that serves."""
        super().__init__()
        self.set_timeout(timeout)
        if not address.startswith(UNIX):
            self.host, self.port = split_host(address)
        self._server = server
        self._client = StoreClient(address, job, rank, Deadline(timeout.total_seconds()))
        self._lock = threading.Lock()
        forked.leave_to_parent(self)

    def close_in_child(self) -> None:
        """Close the child's copy of the connection."""
        self._client.close()

    def close(self) -> None:
        """Disconnect, and stop serving."""
        self._client.close()
        if self._server is not None:
            self._server.close()

    def _ask(self, kind: str, key: str = "", value: Any = None, seconds: float = 60.0) -> Any:
        try:
            with self._lock:
                return self._client.ask(kind, key, value, Deadline(seconds))
        except BootstrapError as error:
            raise distributed.DistStoreError(
                f"torch.distributed's store, which rank 0 serves: {error}"
            ) from None

    def set(self, key: str, value: Any) -> None:
        self._ask("set", value={key: _text(value)})

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._ask("set", value=dict(zip(keys, map(_text, values), strict=True)))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [_bytes(one) for one in self._wait(keys, self.timeout)]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, self.timeout if timeout is None else timeout)

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> list[str]:
        values: list[str] = self._ask("get", value=list(keys), seconds=timeout.total_seconds())
        return values

    def append(self, key: str, value: Any) -> None:
        self._ask("append", key, _text(value))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return _bytes(self._ask("compare", key, [_text(expected), _text(desired)]))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", value=list(keys)))

    def deleteKey(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def getNumKeys(self) -> int:
        return int(self._ask("count"))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> JobStore:
        return self


def _text(value: Any) -> str:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
