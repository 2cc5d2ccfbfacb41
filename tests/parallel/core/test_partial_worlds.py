"""Worlds of some ranks, each with an engine of its own, beside the world of `init`."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from harness import run_world
from hvdlite import _core, basics
from hvdlite.gather_bytes import gather_bytes
from hvdlite.rendezvous.assignments import (
    JOB_ID_BYTES,
    TOKEN_BYTES,
    Place,
    assignment_for,
    start_store,
)
from hvdlite.rendezvous.connect import connect
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.world import make_world
from patience import wait_until

PRELOAD = ("numpy",)

NP = 3
TURNS = 5


class Meeting:
    """Where some ranks of the world meet; made by all ranks, the store by the first member."""

    def __init__(self, members: Sequence[int], name: str) -> None:
        self.members = list(members)
        self._places = [Place("here", "127.0.0.1")] * len(members)
        self._own = basics.rank()
        self._store = None
        told: dict[str, str] = {}
        if self._own == members[0]:
            token, job_id = secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(JOB_ID_BYTES)
            self._store = start_store(self._places, token, job_id, epoch=0)
            told = {"token": token.hex(), "job": job_id.hex(), "store": self._store.address}
        blocks = gather_bytes(basics.engine(), json.dumps(told).encode(), name)
        self._told: dict[str, str] = json.loads(bytes(blocks[members[0]]))

    def connect(self) -> _core.Engine:
        """Return this member's engine of the new world."""
        told = self._told
        token, job_id = bytes.fromhex(told["token"]), bytes.fromhex(told["job"])
        rank = self.members.index(self._own)
        assignment = assignment_for(self._places, rank, told["store"], token, job_id, epoch=0)
        connection = connect(assignment, _core.create_segment)
        if self._store is not None:
            self._store.close()
        return make_world(connection, Deadline(0), job_id).engine

    def works(self, engine: _core.Engine, name: str) -> bool:
        """Sum the members' ranks in the first world."""
        array = np.full(5000, self._own + 1, dtype="float32")
        address = array.ctypes.data
        tensor = _core.Tensor(name, _core.DTYPES["float32"], array.shape, address, address)
        engine.allreduce(name, [tensor], _core.REDUCE_OPS["sum"], keep=array).wait()
        return bool((array == sum(self.members) + len(self.members)).all())


def two_at_once() -> dict[str, bool]:
    """Rank 1 connects to both worlds at the same time, and uses both beside the first one."""
    basics.init()
    meetings = [Meeting(members, f"meeting of {members}") for members in ([0, 1], [1, 2])]
    mine = [meeting for meeting in meetings if basics.rank() in meeting.members]
    engines: dict[int, _core.Engine] = {}

    def join(index: int) -> None:
        engines[index] = mine[index].connect()

    threads = [threading.Thread(target=join, args=(index,)) for index in range(len(mine))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = Meeting(range(NP), "meeting of all")  # Any collective: the first world still works.
    results = {str(whole.members): whole.works(basics.engine(), "first world")}
    for turn in range(TURNS):
        for index, meeting in enumerate(mine):
            right = meeting.works(engines[index], f"turn {turn}")
            results[str(meeting.members)] = results.get(str(meeting.members), True) and right
    for engine in engines.values():
        engine.shutdown()
    whole.connect().shutdown()
    return results


def test_two_worlds_of_some_ranks_at_once() -> None:
    first, second, third = (result.value for result in run_world(NP, two_at_once))
    assert first == {"[0, 1, 2]": True, "[0, 1]": True}
    assert second == {"[0, 1, 2]": True, "[0, 1]": True, "[1, 2]": True}
    assert third == {"[0, 1, 2]": True, "[1, 2]": True}


def one_after_another() -> dict[str, Any]:
    """The members have made different numbers of worlds before each of these."""

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    threads_before = threads()
    basics.init()
    results = []
    before = len(os.listdir("/proc/self/fd"))
    for turn, members in enumerate([[0, 2], [0, 1], [2, 0], [1, 2], [0, 2]]):
        meeting = Meeting(members, f"meeting {turn}")
        if basics.rank() in members:
            engine = meeting.connect()
            results.append(meeting.works(engine, "sum"))
            engine.shutdown()
            del engine
    left = len(os.listdir("/proc/self/fd")) - before
    # The kernel ends a thread a little after it was joined. The first world's engine has one.
    wait_until(lambda: threads() <= threads_before + 1, "the threads end")
    return {"right": results, "left": left, "threads": threads() - threads_before}


def test_worlds_of_some_ranks_one_after_another() -> None:
    found = [result.value for result in run_world(NP, one_after_another)]
    assert [len(value["right"]) for value in found] == [4, 2, 4]
    assert all(all(value["right"]) for value in found)
    assert [value["left"] for value in found] == [0, 0, 0]
    assert [value["threads"] for value in found] == [1, 1, 1]
