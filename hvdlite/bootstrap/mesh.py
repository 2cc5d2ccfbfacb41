"""One rank's connections to all others, while they are made.

Rank i dials every lower rank and accepts every higher one. Two ranks of one host share one Unix
socket, over which each passes to the other its shared memory segment and its bell (an eventfd that
wakes it). Two ranks of different hosts have two TCP connections, one for control and one for data.

In an elastic job one epoch follows the other, and the ranks do not begin an epoch at the same time.
A peer that is still in another epoch refuses this rank's handshake, so this rank dials again until
the peer has caught up. A peer whose listener has gone has died, so this rank reports it soon: the
registrar then decides who goes on.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdlite.bootstrap import forked
from hvdlite.bootstrap.acceptor import Acceptor
from hvdlite.bootstrap.clock import SAME_CLOCK, ClockOffset, answer_readings, measure_offset
from hvdlite.bootstrap.connection import Connection, Link
from hvdlite.bootstrap.deadline import Deadline, GivenUpError
from hvdlite.bootstrap.handshake import Job, OtherEpochError, RefusedError, Role, ServerHandshake
from hvdlite.bootstrap.introduction import introduce
from hvdlite.bootstrap.offer import Offer
from hvdlite.bootstrap.topology import LauncherNumbers, find_topology
from hvdlite.errors import BootstrapError

_GONE_SECONDS = 0.3  # how long a listener of an elastic job may refuse before its process is dead
_AGAIN_SECONDS = 0.02  # until this rank dials a peer again that refused it
# No process of the peer's host causes these: they come from this kernel, or from a router.
_SILENCE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}


class UnreachableError(BootstrapError):
    """A peer could not be reached, did not connect in time, or left while it connected.

    Attributes:
        rank: the peer's rank in the epoch whose connections were made.
        silent: whether the network did not answer: then either end may be the one that is cut off.
    """

    def __init__(self, message: str, rank: int = -1, silent: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.silent = silent


def check_agreed(settings: Sequence[Mapping[str, str]]) -> None:
    """Check that all ranks have equal settings; else they would cut the same tensors differently.

    Raises:
        BootstrapError: two ranks differ.
    """
    for rank, own in enumerate(settings):
        for name, value in own.items():
            first = settings[0].get(name)
            if value != first:
                raise BootstrapError(
                    f"rank 0 has {name}={first}, rank {rank} has {name}={value}; every rank needs "
                    "the same value"
                )


class Mesh:
    """This rank's connections of the full mesh, while they are made.

    While `_run` runs, two threads use this object: the caller's dials the lower ranks, and another
    one accepts the higher ranks. They touch the links of different ranks. When one of them fails,
    it ends the waits of the other.

    Args:
        offer: this process's listeners.
        rank: this rank.
        peers: by rank, the description of each offer; this rank's own one is among them.
        job: the handshakes carry its epoch.
        create_segment: see `connect.connect`.
        deadline: limits everything; another thread may give it up.
        answer_seconds: see `connect.connect_members`.
    """

    def __init__(
        self,
        offer: Offer,
        rank: int,
        peers: Sequence[Mapping[str, Any]],
        job: Job,
        create_segment: Callable[[int], int],
        deadline: Deadline,
        answer_seconds: float = 0.0,
    ) -> None:
        check_agreed([peer["agreed"] for peer in peers])
        self._offer = offer
        self._rank = rank
        self._peers = peers
        self._job = job
        self._create_segment = create_segment
        self._deadline = Deadline(0, outer=deadline)
        self._answer_seconds = answer_seconds
        self._topology = find_topology(
            [peer["host"] for peer in peers],
            rank,
            [LauncherNumbers(*peer["said"]) for peer in peers],
        )
        self._links = {peer: Link() for peer in range(len(peers)) if peer != rank}
        self._listeners: list[socket.socket] = []
        self._segment = self._bell = -1
        self._failure: BaseException | None = None

    def connect(self, meet: Callable[[Any], list[Any]]) -> Connection:
        """Make all connections, and call `meet`; see `connect.connect_members`."""
        forked.leave_to_parent(self)
        try:
            if self._links:
                # The launcher may take one host with two names for two hosts, and count less.
                host_of = self._topology.host_of
                self._segment = self._create_segment(host_of.count(host_of[self._rank]))
                self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._run()
            # No rank's engine starts before all ranks are connected, so that every rank has taken
            # over its sockets before a peer writes to them.
            clocks = meet(list(self._compare_clocks()))
            first = self._topology.host_of.index(self._topology.host_of[self._rank])
            return self._result(ClockOffset(*clocks[first]))
        except BaseException:
            self._close()
            raise
        finally:
            forked.forget(self)

    def close_in_child(self) -> None:
        """Close the copies of a forked child."""
        for listener in self._listeners:
            listener.close()
        self._close()

    def _run(self) -> None:
        """Accept the higher ranks in a second thread while this one dials the lower ranks."""
        self._listeners = self._offer.listeners()
        ended = threading.Event()

        def accept() -> None:
            try:
                self._accept_all()
            except BaseException as error:
                self._fail(error)
            finally:
                ended.set()

        accepting = threading.Thread(target=accept, name="hvdlite-accept", daemon=True)
        accepting.start()
        try:
            for peer in range(self._rank):
                self._dial(peer)
            ended.wait()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, GivenUpError):
                raise
        finally:
            _outlast(ended)
            accepting.join()
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        """Note the first failure, and end the waits of the other thread."""
        self._failure = self._failure or error
        self._deadline.give_up()

    def _is_local(self, peer: int) -> bool:
        return self._topology.host_of[peer] == self._topology.host_of[self._rank]

    def _dial(self, peer: int) -> None:
        """Connect to a lower rank."""
        local = self._is_local(peer)
        address = self._peers[peer]["unix" if local else "tcp"]
        connection = self._reach(peer, address, Role.CONTROL)
        self._links[peer].passing = connection
        if not local:
            self._promote(peer)
            self._links[peer].data = self._reach(peer, address, Role.DATA)
            return
        try:
            self._deadline.attempt(connection, lambda: self._give_memory(peer))
            self._deadline.attempt(connection, lambda: self._take_memory(peer))
        except TimeoutError:
            raise UnreachableError(f"rank {peer} did not pass its memory in time", peer) from None

    def _reach(self, peer: int, address: str, role: Role) -> socket.socket:
        """Dial a peer and shake hands with it; in an elastic job, dial again as long as it helps.

        Raises:
            UnreachableError: the peer cannot be reached, or does not answer in time.
            BootstrapError: the peer is not what its offer says.
            GivenUpError: the deadline was given up.
        """
        gone_at = math.inf
        behind: OtherEpochError | None = None
        seconds = 0.0 if self._is_local(peer) else self._answer_seconds
        way = (address, self._job, self._rank, role, self._deadline, seconds)
        while True:
            try:
                return introduce(*way)[0]
            except GivenUpError:
                raise
            except OtherEpochError as error:
                if not self._offer.elastic:
                    raise self._blame(peer, error) from error
                gone_at, behind = math.inf, error
            except (OSError, BootstrapError) as error:
                gone_at = min(gone_at, time.monotonic() + self._patience(error))
                if time.monotonic() >= gone_at:
                    # At the deadline, that the peer is in another epoch says more than that it is
                    # late.
                    cause = behind if behind is not None and self._deadline.passed else error
                    raise self._blame(peer, cause) from error
            with contextlib.suppress(TimeoutError):  # The next attempt says what is wrong.
                self._deadline.sleep(_AGAIN_SECONDS)

    def _patience(self, error: Exception) -> float:
        """Return how many seconds an error of the way to a peer may last, because it may pass."""
        if not self._offer.elastic:
            return 0.0
        if isinstance(error, ConnectionRefusedError):
            return _GONE_SECONDS
        return self._answer_seconds if _is_silence(error) else 0.0

    def _blame(self, peer: int, error: Exception) -> BootstrapError:
        """Name the peer in an error of the way to it."""
        if isinstance(error, OSError):
            text = f"rank {self._rank} cannot reach rank {peer}: {error}"
            silent = isinstance(error, TimeoutError) or _is_silence(error)
            return UnreachableError(text, peer, silent and not self._is_local(peer))
        text = f"rank {peer}: {error}"
        stranger = isinstance(error, RefusedError) and not isinstance(error, OtherEpochError)
        return BootstrapError(text) if stranger else UnreachableError(text, peer)

    def _accept_all(self) -> None:
        """Accept until every higher rank is connected, something fails, or the deadline passes."""
        missing = self._missing()
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            acceptors = [
                Acceptor(
                    listener,
                    self._job,
                    len(self._peers),
                    selector,
                    self._welcome,
                    peers_return=self._offer.elastic,
                )
                for listener in self._listeners
            ]
            try:
                while missing:
                    for key, _ in selector.select(self._deadline.check()):
                        handle: Callable[[], None] = key.data
                        handle()
                    for acceptor in acceptors:
                        acceptor.expire()
                    missing = self._missing()
            except TimeoutError:
                raise UnreachableError(
                    f"rank {missing[0]} did not connect to rank {self._rank} in time", missing[0]
                ) from None
            finally:
                for acceptor in acceptors:
                    acceptor.close()

    def _missing(self) -> list[int]:
        """List the higher ranks that are not connected yet."""
        missing = []
        for peer in range(self._rank + 1, len(self._peers)):
            link = self._links[peer]
            if link.control is None or (link.data is None and not self._is_local(peer)):
                missing.append(peer)
        return missing

    def _welcome(self, connection: socket.socket, handshake: ServerHandshake) -> None:
        peer, role = handshake.rank, handshake.role
        link = self._links.get(peer)
        if link is None or peer < self._rank:
            connection.close()
        elif role == Role.DATA and link.data is None:
            link.data = connection
        elif role == Role.CONTROL and link.control is None and link.passing is None:
            link.passing = connection
            self._swap_memory(peer, connection)
        else:
            connection.close()

    def _swap_memory(self, peer: int, connection: socket.socket) -> None:
        """Pass this rank's memory to a higher rank, and take that rank's memory when it arrives."""
        if connection.family != socket.AF_UNIX:
            self._promote(peer)
            return
        connection.setblocking(False)
        self._give_memory(peer)

        def take() -> None:
            with contextlib.suppress(BlockingIOError):
                self._take_memory(peer)
                self._selector.unregister(connection)

        self._selector.register(connection, selectors.EVENT_READ, take)

    def _promote(self, peer: int) -> None:
        link = self._links[peer]
        link.control, link.passing = link.passing, None

    def _give_memory(self, peer: int) -> None:
        connection = self._links[peer].passing
        assert connection is not None
        try:
            socket.send_fds(connection, [b"f"], [self._segment, self._bell])
        except TimeoutError:
            raise
        except OSError as error:
            raise UnreachableError(f"rank {peer} did not take memory: {error}", peer) from error

    def _take_memory(self, peer: int) -> None:
        """Receive a peer's memory and bell, which completes the connection to it."""
        link = self._links[peer]
        assert link.passing is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(link.passing, 1, 2, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, TimeoutError):
            raise
        except OSError as error:
            raise UnreachableError(f"rank {peer} did not pass its memory: {error}", peer) from error
        if data != b"f" or len(descriptors) != 2:
            for fd in descriptors:
                os.close(fd)
            raise UnreachableError(f"rank {peer} left before it passed its memory", peer)
        link.segment, link.bell = descriptors
        self._promote(peer)

    def _compare_clocks(self) -> ClockOffset:
        """Compare clocks over TCP: the first rank of every other host does so with rank 0."""
        rank, host_of = self._rank, self._topology.host_of
        firsts = [host_of.index(host) for host in range(1, max(host_of) + 1)]
        for peer in firsts if rank == 0 else [0] if rank in firsts else []:
            connection = self._links[peer].control
            assert connection is not None
            try:
                if rank != 0:
                    return measure_offset(connection, self._deadline)
                answer_readings(connection, self._deadline)
            except GivenUpError:
                raise
            except (OSError, BootstrapError) as error:
                raise UnreachableError(
                    f"rank {rank} could not compare its clock with rank {peer}'s: {error}", peer
                ) from error
        return SAME_CLOCK

    def _close(self) -> None:
        for link in self._links.values():
            link.close()
        for fd in (self._segment, self._bell):
            if fd >= 0:
                os.close(fd)
        self._segment = self._bell = -1

    def _result(self, clock: ClockOffset) -> Connection:
        topology = self._topology
        return Connection(
            rank=self._rank,
            size=len(self._peers),
            host_of=topology.host_of,
            links=tuple(link.release(peer) for peer, link in self._links.items()),
            segment_fd=self._segment,
            bell_fd=self._bell,
            local_rank=topology.local_rank,
            local_size=topology.local_size,
            cross_rank=topology.cross_rank,
            cross_size=topology.cross_size,
            clock=clock,
        )


def _is_silence(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _SILENCE


def _outlast(ended: threading.Event) -> None:
    """Wait until a thread has ended, even if signal handlers raise meanwhile; then re-raise.

    The caller closes what the thread uses, so it must not go on earlier. `Thread.join` is not
    enough: up to Python 3.12 it regards a thread as ended when a signal handler raises during it.
    """
    interrupt: BaseException | None = None
    while not ended.is_set():
        try:
            ended.wait()
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
