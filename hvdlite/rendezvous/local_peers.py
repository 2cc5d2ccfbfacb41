"""How the ranks of one host get each other's memory, events and lifelines.

A rank needs three descriptors of every other rank of its host: its segment, its event (an
eventfd), and an end of its *lifeline*. This is a pair of connected sockets, of which the rank keeps
one, and all the others share the other one: when the rank leaves or dies, they see it there.

Every rank hands its three descriptors to the first rank of its host, over a Unix socket. When that
rank has all of them, it hands to each rank those of the others. So the n ranks of a host shake
hands n - 1 times, and not n(n-1)/2 times.

What the first rank sends is one or more messages `f` with the descriptors of the others, in the
order of their ranks; or `!`, and as JSON the rank that it misses, and why.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from hvdlite.rendezvous.connection import NOTHING_SHARED, Link, UnreachableError
from hvdlite.rendezvous.deadline import Deadline

_EACH = 3  # descriptors of a rank
_RANKS_AT_ONCE = 80  # in one message; Linux passes at most 253 descriptors
_GIVEN, _MISSED = b"f", b"!"
_CROWDED_SECONDS = 0.001  # until the next attempt while too many descriptors are on their way
_GRACE_SECONDS = 1.0  # how long a rank waits after its deadline for what the first rank says


class LocalPeers:
    """The ranks of this host, while they exchange their descriptors."""

    # `ranks` has the ranks of this host, ascending, with this one.
    # `own` has this rank's segment and event; borrowed.

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        links: Mapping[int, Link],
        own: tuple[int, int],
        selector: selectors.BaseSelector,
        deadline: Deadline,
    ) -> None:
        self._rank = rank
        self._ranks = ranks
        self._links = links
        self._own = own
        self._selector = selector
        self._deadline = deadline
        self._lifeline, self._end = socket.socketpair()
        # At the first rank, by rank, the connections over which descriptors pass.
        self._members: dict[int, socket.socket] = {}
        self._left = len(ranks) - 1  # how many ranks owe this one something

    @property
    def first(self) -> int:
        return self._ranks[0]

    @property
    def complete(self) -> bool:
        """Whether this rank has what it needs, and has given what the others need of it."""
        return self._left == 0

    def missing(self) -> list[int]:
        """At the first rank, list the ranks that have not handed in their descriptors."""
        if self._rank != self.first:
            return []
        return [peer for peer in self._ranks[1:] if self._links[peer].shared == NOTHING_SHARED]

    def release(self) -> int:
        """Give up this rank's end of its lifeline; the others have the other end."""
        self._end.close()
        return self._lifeline.detach()

    def close(self) -> None:
        self._lifeline.close()
        self._end.close()
        for connection in self._members.values():
            connection.close()

    def tell(self, error: UnreachableError) -> None:
        """Say to those who wait for this rank, if it is the first one, which rank is missing."""
        words = json.dumps([error.rank, str(error), error.silent]).encode()
        for connection in self._members.values():
            with contextlib.suppress(OSError):
                connection.sendall(_MISSED + words)

    def hand_in(self, connection: socket.socket) -> None:
        """Give the descriptors of this rank to the first one, and take those of all others."""
        with connection:
            self._send(connection, self.first, [*self._own, self._end.fileno()])
            for some in _in_parts([peer for peer in self._ranks if peer != self._rank]):
                self._receive(connection, self.first, some)
        self._left = 0

    def welcome(self, peer: int, connection: socket.socket) -> None:
        """At the first rank, serve another one, which owes its descriptors."""
        if self._rank != self.first or peer in self._members:
            connection.close()
            return
        self._members[peer] = connection
        self._selector.register(
            connection, selectors.EVENT_READ, lambda: self._take(peer, connection)
        )

    def _take(self, peer: int, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._receive(connection, peer, [peer])
        self._left -= 1
        if self._left == 0:
            for member in list(self._members):
                self._give(member)

    def _give(self, peer: int) -> None:
        own = [*self._own, self._end.fileno()]
        for some in _in_parts([one for one in self._ranks if one != peer]):
            of_each = [own if one == self._rank else self._links[one].shared for one in some]
            self._send(self._members[peer], peer, [fd for each in of_each for fd in each])
        self._members.pop(peer).close()

    def _send(self, connection: socket.socket, peer: int, descriptors: Sequence[int]) -> None:
        send = partial(socket.send_fds, connection, [_GIVEN], list(descriptors))
        while True:
            try:
                self._deadline.attempt(connection, send)
                return
            except TimeoutError:
                raise _late(peer) from None
            except OSError as error:
                # Linux bounds how many descriptors of a user are on their way. The peers are about
                # to receive them.
                if error.errno != errno.ETOOMANYREFS:
                    raise UnreachableError(
                        f"rank {peer} did not take memory: {error}", peer
                    ) from error
            time.sleep(_CROWDED_SECONDS)

    def _receive(self, connection: socket.socket, peer: int, ranks: Sequence[int]) -> None:
        """Receive one message, with the descriptors of these ranks."""
        receive = partial(
            socket.recv_fds, connection, 1, _EACH * len(ranks), socket.MSG_CMSG_CLOEXEC
        )
        try:
            data, descriptors, _, _ = self._deadline.attempt(connection, receive, _GRACE_SECONDS)
            if data == _MISSED:
                raise self._missed(connection)
        except TimeoutError:
            raise _late(peer) from None
        except OSError as error:
            raise UnreachableError(f"rank {peer} did not pass its memory: {error}", peer) from error
        if data != _GIVEN or len(descriptors) != _EACH * len(ranks):
            for fd in descriptors:
                os.close(fd)
            raise UnreachableError(f"rank {peer} left before it passed its memory", peer)
        for number, one in enumerate(ranks):
            self._links[one].shared = descriptors[_EACH * number : _EACH * (number + 1)]

    def _missed(self, connection: socket.socket) -> UnreachableError:
        words = b""
        while more := self._deadline.receive(connection, 1 << 16, _GRACE_SECONDS):
            words += more
        rank, text, silent = json.loads(words)
        return UnreachableError(text, rank, silent)


def _late(peer: int) -> UnreachableError:
    return UnreachableError(f"rank {peer} did not pass its memory in time", peer)


def _in_parts(ranks: Sequence[int]) -> Iterator[Sequence[int]]:
    for begin in range(0, len(ranks), _RANKS_AT_ONCE):
        yield ranks[begin : begin + _RANKS_AT_ONCE]
