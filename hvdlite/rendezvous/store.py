"""The store, where the ranks of a job learn each other's addresses.

The launcher serves it, or rank 0 if the launcher is not hvdlite-run. By an *exchange* every rank
gets the values of all ranks. For services, a rank can also *publish* a value, and others *look it
up*, and wait for it. A value is dropped when its rank disconnects. Values are JSON.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.address import UNIX, fresh_unix_address, is_loopback, listen, split_host
from hvdlite.rendezvous.client import local_host, reach
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.environment import WorkerEnvironment
from hvdlite.rendezvous.handshake import (
    FrameReader,
    FrameWriter,
    Job,
    Role,
    session_keys,
)
from hvdlite.rendezvous.service import BacklogError, Peer, Service

_CALLS = {"addresses": "call hvd.init()", "torch.distributed": "call init_process_group()"}
_GRACE_SECONDS = 2.0  # how long a client waits after its deadline for the store's answer
_REMEDY = "set HVDLITE_RENDEZVOUS for all ranks to an address and a free port of rank 0's host"
_AGAIN_SECONDS = 0.1  # until rank 0 looks its own name up again
_QUIET_SECONDS = 5.0  # how long rank 0 waits for its name before it says so

_Listening = TypeVar("_Listening")


class PublisherGoneError(BootstrapError):
    """The rank that published a value has disconnected."""


@dataclass
class _Exchange:
    deadline: float
    values: dict[int, Any] = field(default_factory=dict)
    waiting: list[Peer] = field(default_factory=list)


@dataclass
class _Published:
    """A value that one rank publishes, or that others wait for."""

    by: Peer | None = None
    value: Any = None
    gone: bool = False  # whether the rank that published it last has disconnected
    waiting: list[tuple[float, Peer]] = field(default_factory=list)  # until when, who


class Store(Service):
    role = Role.STORE
    name = "hvdlite-store"

    def __init__(self, job: Job, size: int, listener: socket.socket) -> None:
        super().__init__(job, size, listener)
        self.met = False  # whether all ranks have once exchanged something
        self._size = size
        self._exchanges: dict[str, _Exchange] = {}
        self._published: dict[str, _Published] = {}

    @classmethod
    def start(cls, size: int, job: Job, address: str | None = None) -> Store:
        """Listen, by default at a fresh Unix socket, and serve until `close` is called."""
        return cls(job, size, listen(address or fresh_unix_address()))._start()

    def _take(self, peer: Peer, body: bytes) -> None:
        operations = {
            "exchange": self._exchange,
            "publish": self._publish,
            "look up": self._look_up,
        }
        message = json.loads(body)
        until = time.monotonic() + message["patience"]
        operations[message["kind"]](peer, message["key"], message["value"], until)

    def _publish(self, peer: Peer, key: str, value: Any, until: float) -> None:
        published = self._published.setdefault(key, _Published())
        published.by, published.value, published.gone = peer, value, False
        waiting, published.waiting = published.waiting, []
        self._answer([peer, *(other for _, other in waiting)], "given", value)

    def _look_up(self, peer: Peer, key: str, value: Any, until: float) -> None:
        published = self._published.setdefault(key, _Published())
        if published.gone:
            self._answer([peer], "gone")
        elif published.by is None:
            published.waiting.append((until, peer))
        else:
            self._answer([peer], "given", published.value)

    def _exchange(self, peer: Peer, key: str, value: Any, until: float) -> None:
        exchange = self._exchanges.setdefault(key, _Exchange(until))
        exchange.values[peer.number] = value
        exchange.waiting.append(peer)
        if len(exchange.values) == self._size:
            self.met = True
            del self._exchanges[key]
            values = [exchange.values[rank] for rank in range(self._size)]
            self._answer(exchange.waiting, "given", values)

    def _answer(self, peers: Iterable[Peer], kind: str, value: Any = None) -> None:
        body = json.dumps({"kind": kind, "value": value}).encode()
        for peer in list(peers):
            if not peer.closed:
                try:
                    self._send(peer, body)
                except BacklogError:
                    self._end(peer)
                except BootstrapError as error:  # It is too long.
                    self._answer([peer], "failed", str(error))

    def _tick(self, asleep: float) -> None:
        for key, exchange in list(self._exchanges.items()):
            if asleep >= exchange.deadline and key in self._exchanges:
                del self._exchanges[key]
                missing = [str(rank) for rank in range(self._size) if rank not in exchange.values]
                there = ", ".join(map(str, sorted(exchange.values)))
                text = (
                    f"rank {', '.join(missing)} did not {_CALLS.get(key, 'connect')} in time, and "
                    f"rank {there} waited for that; if it only begins later, give it "
                    "more time by --start-timeout or HVDLITE_START_TIMEOUT"
                )
                self._answer(exchange.waiting, "failed", text)
        for key, published in list(self._published.items()):
            late = [peer for until, peer in published.waiting if asleep >= until]
            published.waiting = [one for one in published.waiting if asleep < one[0]]
            self._answer(late, "failed", f"no process has published {key} in time")

    def _left(self, peer: Peer) -> None:
        for published in self._published.values():
            published.waiting = [one for one in published.waiting if one[1] is not peer]
            if published.by is peer:
                published.by, published.gone = None, True
        for key, exchange in list(self._exchanges.items()):
            # This rank sent its value and has gone, so its address is dead: the exchange fails.
            if peer in exchange.waiting and key in self._exchanges:
                del self._exchanges[key]
                text = f"rank {peer.number} left while connecting"
                self._answer(exchange.waiting, "failed", text)


class StoreClient(contextlib.AbstractContextManager["StoreClient"]):
    def __init__(self, address: str, job: Job, rank: int, deadline: Deadline) -> None:
        self._deadline = deadline
        self._rank = rank
        self._connection, handshake = reach("the store", address, job, rank, Role.STORE, deadline)
        from_client, from_server = session_keys(job, handshake.transcript)
        self._writer, self._reader = FrameWriter(from_client), FrameReader(from_server)
        # The IP address from which this host reaches the store; None over a Unix socket.
        self.local_host = local_host(self._connection)

    def exchange(self, key: str, value: Any) -> list[Any]:
        """Send a value, and return those of all ranks, in rank order."""
        values: list[Any] = self._ask("exchange", key, value)
        return values

    def publish(self, key: str, value: Any) -> None:
        """Publish a value for as long as this client is connected."""
        self._ask("publish", key, value)

    def look_up(self, key: str) -> Any:
        """Return the value that a rank publishes under a key, and wait until one does."""
        return self._ask("look up", key)

    def _ask(self, kind: str, key: str, value: Any = None) -> Any:
        return self.ask(kind, key, value, max(0.0, self._deadline.seconds_left), self._deadline)

    def ask(self, kind: str, key: str, value: Any, seconds: float, deadline: Deadline) -> Any:
        """Have the store do an operation, and return its answer; only one at a time."""
        # The store waits `seconds` for what the operation needs. Without an answer by the
        # deadline the connection is closed: the late one would be taken for that of the next
        # operation.
        message = {"kind": kind, "key": key, "value": value, "patience": seconds}
        frame = self._writer.wrap(json.dumps(message).encode())
        try:
            with contextlib.ExitStack() as unanswered:
                unanswered.callback(self.close)
                deadline.send(self._connection, frame)
                answer = json.loads(self._receive(deadline))
                unanswered.pop_all()
        except TimeoutError:
            raise BootstrapError(
                f"rank {self._rank} got no answer from the store ({key}); is the launcher stopped?"
            ) from None
        except OSError as error:
            raise BootstrapError(f"rank {self._rank} lost the store: {error}") from error
        if answer["kind"] == "gone":
            raise PublisherGoneError(f"the rank that published {key} has gone")
        if answer["kind"] == "failed":
            raise BootstrapError(answer["value"])
        return answer["value"]

    def _receive(self, deadline: Deadline) -> bytes:
        while True:
            # The store answers at the deadline, and names the missing ranks. So wait a bit longer.
            data = deadline.receive(self._connection, 1 << 16, _GRACE_SECONDS)
            if not data:
                raise BootstrapError(
                    f"rank {self._rank} lost the store while it waited for the other ranks"
                )
            bodies = self._reader.feed(data)
            if bodies:
                return bodies[0]

    def close(self) -> None:
        self._connection.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_store(worker: WorkerEnvironment, job: Job, deadline: Deadline) -> Store:
    """Serve the store at the address that the ranks were told; the caller closes it."""
    # The DNS record of a new pod may come half a minute late, and may be that of its predecessor
    # until then. So rank 0 looks its name up again until the deadline. It never listens at all
    # addresses instead.
    assert worker.rendezvous is not None
    address = bound_to(worker.bind_address, worker.rendezvous)
    store = listen_when_possible(
        lambda: Store.start(worker.size, job, address), address, "rank 0", _REMEDY, deadline
    )
    # The usual reason is an /etc/hosts that maps the host's own name to 127.0.1.1.
    if is_loopback(store.address) and worker.local_size not in (None, worker.size):
        store.close()
        raise BootstrapError(
            f"rank 0 would serve at {address}, which no other host can reach; {_REMEDY}"
        )
    return store


def listen_when_possible(
    listen: Callable[[], _Listening], address: str, who: str, remedy: str, deadline: Deadline
) -> _Listening:
    """Listen at the address of a name that may not be this host's yet; see `serve_store`."""
    notice_at = time.monotonic() + _QUIET_SECONDS
    while True:
        try:
            return listen()
        except OSError as error:
            if deadline.passed or not _may_pass(error, address):
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
            with contextlib.suppress(TimeoutError):  # The last attempt says what is wrong.
                deadline.sleep(_AGAIN_SECONDS)


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
