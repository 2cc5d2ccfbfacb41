"""Starts in trouble: ranks that are shown out, come late or retry."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults.arrays import works
from faults.ports import free_port
from harness import run_world
from hvdlite import basics
from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.address import address_of, fresh_unix_address, listen
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import HANDSHAKE_SECONDS, Job
from hvdlite.rendezvous.store import Store, StoreClient
from patience import HANG, wait_until

JOB = Job(bytes(range(32)), bytes(range(16)), 0)


def by_hand(port: int) -> Callable[[int], dict[str, str]]:
    """Return the variables of ranks that a user's script starts; each acts as a host, over TCP."""
    return lambda rank: {
        "HVDLITE_JOB_ID": "",
        "HVDLITE_LOCAL_RANK": "",
        "HVDLITE_LOCAL_SIZE": "",
        "HVDLITE_NODE": "",
        "HVDLITE_HOST_ID": f"host{rank}",
        "HVDLITE_RENDEZVOUS": f"127.0.0.1:{port}",
    }


def serve_later(listener: socket.socket, seconds: float) -> Callable[[], None]:
    """Serve a store only after some time, like a stopped process; the result ends the store."""
    stores: list[Store] = []

    def serve() -> None:
        store = Store(JOB, 1, listener)
        store._thread.start()
        stores.append(store)

    timer = threading.Timer(seconds, serve)
    timer.start()

    def end() -> None:
        timer.join()
        stores[0].close()

    return end


def exchange_alone(address: str, seconds: float) -> list[str]:
    with StoreClient(address, JOB, 0, Deadline(seconds)) as client:
        return client.exchange("hello", "me")


@pytest.mark.parametrize("after", [0.0, HANDSHAKE_SECONDS])
def test_rank_dials_again_when_it_was_shown_out(after: float) -> None:
    """A server hangs up before its proof if a rank is slow, or if strangers crowd it out."""
    listener = listen(fresh_unix_address())

    def show_out() -> None:
        for _ in range(1 if after else 3):
            connection, _ = listener.accept()
            with connection:
                time.sleep(after)

    door = threading.Thread(target=show_out)
    results: list[list[str]] = []
    address = address_of(listener)
    rank = threading.Thread(target=lambda: results.append(exchange_alone(address, HANG)))
    for thread in (door, rank):
        thread.start()
    door.join()
    end = serve_later(listener, 0.0)
    rank.join()
    end()
    assert results == [["me"]]


def retry_until_all_are_there(folder: str) -> dict[str, Any]:
    """Let rank 1 start after two failed starts of rank 0; both retry until they succeed."""
    waited = Path(folder) / "waited"
    failures: list[str] = []
    if os.environ["HVDLITE_RANK"] != "0":
        wait_until(waited.exists, "rank 0 has failed twice")
    while not basics.is_initialized():
        try:
            basics.init()
        except BootstrapError as error:
            failures.append(str(error))
        if len(failures) == 2:
            waited.touch()
    return {"failures": failures, "works": basics.is_initialized() and works("at last")}


@pytest.mark.parametrize("launched", [True, False])
def test_ranks_that_try_again_meet_though_one_has_failed_before(
    launched: bool, tmp_path: Path
) -> None:
    own = {} if launched else by_hand(free_port())
    results = run_world(
        2,
        retry_until_all_are_there,
        str(tmp_path),
        env=lambda rank: {
            "HVDLITE_START_TIMEOUT": "1.5",
            **(own(rank) if callable(own) else own),
        },
    )
    assert all(result.value["works"] for result in results), results[0].value
    assert (
        "rank 1 did not call hvd.init() in time, and rank 0 waited"
        in results[0].value["failures"][0]
    )
