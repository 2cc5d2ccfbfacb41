"""The store over real sockets, with threads as ranks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.address import dial
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.store import PublisherGoneError, Store, StoreClient
from patience import HANG, Stopwatch, wait_until

TOKEN, JOB_ID = secrets.token_bytes(32), secrets.token_bytes(16)
JOB = Job(TOKEN, JOB_ID, 0)


def in_threads(size: int, body: Callable[[int], object]) -> list[object]:
    """Run body(rank) in a thread for each rank; return the results, or exceptions, by rank."""
    results: list[object] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive()
    return results


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_missing_rank_is_named_by_all_others() -> None:
    with Store.start(3, JOB) as store:

        def exchange(rank: int, key: str, seconds: float) -> object:
            with StoreClient(store.address, JOB, rank, deadline=Deadline(seconds)) as client:
                return client.exchange(key, "x")

        begun = time.monotonic()
        in_threads(3, lambda rank: exchange(rank, "all of them", HANG))
        ample = 0.2 + 20 * (time.monotonic() - begun)
        results = in_threads(2, lambda rank: exchange(rank, "hello", ample))
    for result in results:
        assert isinstance(result, BootstrapError)
        assert "rank 2 did not connect in time, and rank 0, 1 waited for that" in str(result)


def waiting_at(store: Store, key: str) -> int:
    exchange = store._exchanges.get(key)
    return 0 if exchange is None else len(exchange.waiting)


def test_rank_that_leaves_while_connecting_is_named_at_once() -> None:
    with Store.start(3, JOB) as store:
        left: list[Stopwatch] = []
        with StoreClient(store.address, JOB, 0, deadline=Deadline(600)) as first:
            leaver = StoreClient(store.address, JOB, 1, deadline=Deadline(HANG))
            key = "hello"
            message = {"kind": "exchange", "key": key, "value": "", "patience": 600.0}
            leaver._connection.sendall(leaver._writer.wrap(json.dumps(message).encode()))

            def leave() -> None:
                wait_until(lambda: waiting_at(store, key) == 2, "both ranks wait")
                left.append(Stopwatch())
                leaver.close()

            leaving = threading.Thread(target=leave)
            leaving.start()
            with pytest.raises(BootstrapError, match="rank 1 left while connecting"):
                first.exchange("hello", "")
            assert left[0].seconds() < 5
            leaving.join()


def test_look_up_of_what_a_rank_published_that_has_gone_ends_at_once() -> None:
    with Store.start(2, JOB) as store:
        with StoreClient(store.address, JOB, 0, deadline=Deadline(HANG)) as server:
            server.publish("address", "here")
            with StoreClient(store.address, JOB, 1, deadline=Deadline(HANG)) as client:
                assert client.look_up("address") == "here"
        wait_until(lambda: not store._peers, "the store has seen that both have gone")
        with StoreClient(store.address, JOB, 1, deadline=Deadline(HANG)) as late:
            with pytest.raises(PublisherGoneError, match="published address has gone"):
                late.look_up("address")
            with StoreClient(store.address, JOB, 0, deadline=Deadline(HANG)) as server:
                server.publish("address", "there")
                assert late.look_up("address") == "there"


def test_strangers_are_refused_and_do_not_delay_ranks() -> None:
    before = open_descriptors()
    with Store.start(1, JOB) as store:
        idle = [dial(store.address, Deadline(HANG)) for _ in range(300)]
        for _ in range(200):
            with (
                contextlib.suppress(OSError),
                dial(store.address, Deadline(HANG)) as stranger,
            ):
                stranger.sendall(os.urandom(200))
        watch = Stopwatch()
        with StoreClient(store.address, JOB, 0, deadline=Deadline(HANG)) as client:
            assert client.exchange("hello", "me") == ["me"]
        assert watch.seconds() < 1.0
        other = Job(secrets.token_bytes(32), JOB_ID, 0)
        with pytest.raises(BootstrapError):
            StoreClient(store.address, other, 0, deadline=Deadline(HANG))
        for connection in idle:
            with connection:
                connection.settimeout(HANG)
                assert connection.recv(1) == b"", "a silent stranger is shown out"
    assert open_descriptors() <= before  # A former test may have closed some meanwhile.


def test_store_that_closes_ends_the_waits_of_its_clients() -> None:
    store = Store.start(2, JOB)
    with StoreClient(store.address, JOB, 0, deadline=Deadline(HANG)) as client:
        threading.Timer(0.2, store.close).start()
        with pytest.raises(BootstrapError, match="lost the store"):
            client.exchange("hello", "")
    store.close()
