"""The exchange of bytes over plain TCP sockets, as the yardstick of what a link carries.

Every rank has some connections to every other rank. All bytes move at the same time, in both
directions, by one thread that waits for all connections: nothing is added up, and nothing is copied
but by the kernel.
"""

from __future__ import annotations

import selectors
import socket
from typing import Protocol

START_SECONDS = 60.0
IDLE_SECONDS = 60.0
EVENTS = (selectors.EVENT_READ, selectors.EVENT_WRITE)


class Store(Protocol):
    """What of torch.distributed.Store the ranks meet through."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


class PlainSockets:
    """This rank's connections to all other ranks."""

    def __init__(self, store: Store, address: str, rank: int, ranks: int, most: int) -> None:
        self._rank = rank
        self._sockets: dict[int, list[socket.socket]] = {peer: [] for peer in range(ranks)}
        with socket.create_server((address, 0), backlog=ranks * most) as listener:
            listener.settimeout(START_SECONDS)
            store.set(f"plain/{rank}", f"{address}:{listener.getsockname()[1]}")
            for peer in range(rank):
                host, _, port = store.get(f"plain/{peer}").decode().rpartition(":")
                for _ in range(most):
                    connection = socket.create_connection((host, int(port)), START_SECONDS)
                    connection.sendall(bytes([rank]))
                    self._add(peer, connection)
            for _ in range((ranks - 1 - rank) * most):
                connection, _ = listener.accept()
                connection.settimeout(START_SECONDS)
                self._add(connection.recv(1)[0], connection)

    def _add(self, peer: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._sockets[peer].append(connection)

    def exchange(self, outgoing: memoryview, incoming: memoryview, connections: int) -> None:
        """Send `outgoing` to every other rank and fill `incoming` from all."""
        # Every rank gets the same bytes. `incoming` has as many bytes for each rank, by rank; this
        # rank's own part stays as it is. Each of the connections between two ranks carries an equal
        # part.
        share = -(-len(outgoing) // connections)
        left = 0
        with selectors.DefaultSelector() as selector:
            for peer, sockets in self._sockets.items():
                theirs = incoming[peer * len(outgoing) : (peer + 1) * len(outgoing)]
                for i, one in enumerate(sockets[:connections]):
                    part = slice(i * share, (i + 1) * share)
                    spans = [theirs[part], outgoing[part]]
                    if not len(spans[0]):
                        continue
                    selector.register(one, EVENTS[0] | EVENTS[1], spans)
                    left += 1
            while left > 0:
                ready = selector.select(IDLE_SECONDS)
                if not ready:
                    raise TimeoutError("plain sockets: no byte moved for a minute")
                for key, events in ready:
                    assert isinstance(key.fileobj, socket.socket)
                    moved(key.fileobj, events, key.data)
                    wanted = sum(
                        event for event, span in zip(EVENTS, key.data, strict=True) if len(span)
                    )
                    if wanted == 0:
                        selector.unregister(key.fileobj)
                        left -= 1
                    elif wanted != key.events:
                        selector.modify(key.fileobj, wanted, key.data)


def moved(connection: socket.socket, events: int, spans: list[memoryview]) -> None:
    """Read and write what can be moved now; `spans` become what is left."""
    try:
        if events & EVENTS[0] and len(spans[0]):
            count = connection.recv_into(spans[0])
            if count == 0:
                raise ConnectionError("plain sockets: a rank has closed its connection")
            spans[0] = spans[0][count:]
        if events & EVENTS[1] and len(spans[1]):
            spans[1] = spans[1][connection.send(spans[1]) :]
    except BlockingIOError:
        pass  # The kernel changed its mind after it reported the event.
