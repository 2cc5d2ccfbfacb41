"""Process groups end well: when a rank dies, raises, is late, or forgets to destroy them."""

from __future__ import annotations

import datetime
import functools
import gc
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import run_world
from hvdlite.errors import (
    BootstrapError,
    CollectiveTimeoutError,
    DeadlockError,
    HvdliteError,
    RankFailedError,
    cause,
)
from hvdlite.rendezvous.handshake import Job
from hvdlite.torch.distributed import engines
from hvdlite.torch.distributed.store import JobStore, KeyServer
from parallel.deaths import die, seconds_since_death
from patience import HANG, wait_until

PRELOAD = ("torch._dynamo",)
LIMIT = 20.0  # seconds; a rank that is told waits for fractions of one


def train(model: nn.Module, die: Callable[[], None] | None) -> None:
    for step in range(1000):
        if step == 3 and die is not None:
            die()
        model(torch.ones(4, 6)).square().sum().backward()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 2))


def in_ddp(die: Callable[[], None] | None) -> None:
    train(DistributedDataParallel(make_model(), bucket_cap_mb=0.001), die)


def in_receive(die: Callable[[], None] | None) -> None:
    dist.barrier()
    if die is not None:
        die()
    dist.recv(torch.zeros(3), dist.get_world_size() - 1)


PLACES = {place.__name__: place for place in (in_ddp, in_receive)}


def lose_a_rank(place: str, folder: str) -> tuple[str, float]:
    """Kill the last rank; return the error of this one, and how long it took to come."""
    warnings.simplefilter("ignore")
    dist.init_process_group("hvdlite")
    died = f"{folder}/died"
    last = dist.get_rank() == dist.get_world_size() - 1
    try:
        PLACES[place](functools.partial(die, died) if last else None)
    except RuntimeError as error:
        found = cause(error)
        assert isinstance(found, RankFailedError) and found.failed_rank == dist.get_world_size() - 1
        return str(error), seconds_since_death(died)
    raise AssertionError("no error")


@pytest.mark.parametrize("place", PLACES)
def test_a_killed_rank_is_named_by_all_others(place: str, tmp_path: Path) -> None:
    results = run_world(3, lose_a_rank, place, str(tmp_path), expect_failure=True)
    assert [result.returncode for result in results] == [0, 0, -signal.SIGKILL], results
    for result in results[:2]:
        text, seconds = result.value
        assert "rank 2" in text, text
        assert seconds < LIMIT, seconds


def raise_in_one() -> str:
    dist.init_process_group("hvdlite")
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("no such file")
    try:
        dist.all_reduce(torch.ones(3))
    except HvdliteError as error:
        return str(error)
    return ""


def test_the_others_get_the_text_of_an_exception() -> None:
    results = run_world(2, raise_in_one, expect_failure=True)
    assert [result.returncode for result in results] == [0, 1]
    assert "rank 1 raised ValueError: no such file" in results[0].value


def wait_too_long(how: str, told: str) -> tuple[str, int]:
    # The timeout is also that of making the group, so the ranks measure first how long that takes.
    # The first time it takes much longer, since the backend is imported.
    for _ in range(2):
        begun = time.monotonic()
        dist.init_process_group("hvdlite")
        taken = torch.tensor(time.monotonic() - begun)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        dist.destroy_process_group()
    seconds = max(3, math.ceil(8 * float(taken)))  # It may take longer than now.
    dist.init_process_group("hvdlite", timeout=datetime.timedelta(seconds=seconds))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        wait_until(Path(told).exists, "rank 0 has its error", HANG + seconds)
    try:
        if how == "ninth call":  # whose name is in flight
            for _ in range(8):
                dist.all_reduce(torch.ones(3), async_op=True)
        work = dist.all_reduce(tensor, async_op=True)
        if how == "wait":
            work.wait()
    except (CollectiveTimeoutError, RuntimeError) as error:
        return str(error), seconds
    finally:
        Path(told).touch()
    return "", seconds


@pytest.mark.parametrize("how", ["wait", pytest.param("ninth call", marks=pytest.mark.long)])
def test_the_timeout_of_a_group_is_an_error_on_all_ranks(how: str, tmp_path: Path) -> None:
    for result in run_world(2, wait_too_long, how, str(tmp_path / "told")):
        text, seconds = result.value
        assert f"waited {seconds} s" in text, text


def reduce_another_size() -> None:
    """Gloo computes something wrong."""
    dist.all_reduce(torch.ones(3 + dist.get_rank()))


def call_another_operation() -> None:
    tensor = torch.ones(3)
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        dist.all_reduce(tensor, async_op=True).wait()


def differ(call: Callable[[], None]) -> str:
    dist.init_process_group("hvdlite")
    try:
        call()
    except DeadlockError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("call", [reduce_another_size, call_another_operation])
def test_ranks_that_differ_get_an_error_that_names_both(call: Callable[[], None]) -> None:
    for result in run_world(2, differ, call):
        assert "deadlock: " in result.value, result.value
        assert "rank 0 waits for rank 1" in result.value
        assert "rank 1 waits for rank 0 in allreduce" in result.value


def forget(groups: int) -> int:
    dist.init_process_group("hvdlite")
    for _ in range(groups):
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group)
        dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().wait()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3), async_op=True).get_future()  # It is in flight at the exit.
    return dist.get_rank()


def test_groups_that_are_not_destroyed_end_at_exit() -> None:
    results = run_world(2, forget, 3)
    assert [result.returncode for result in results] == [0, 0]
    assert not any(result.stderr for result in results), results


def make_a_group_alone() -> str:
    engines._QUIET_SECONDS = 0.2
    dist.init_process_group("hvdlite")
    if dist.get_rank() == 0:
        with pytest.raises(BootstrapError, match="every member has to call init_process_group or"):
            dist.new_group(timeout=datetime.timedelta(seconds=1))
    return ""


def test_a_member_that_waits_for_another_one_says_so() -> None:
    waiting, away = run_world(2, make_a_group_alone)
    assert "rank 0 makes process group '1', and rank 1 has not come to it for 0.2 s" in (
        waiting.stderr
    )
    assert not away.stderr


@pytest.fixture
def store() -> Iterator[JobStore]:
    job = Job(token=b"t" * 32, job_id=b"j" * 16, epoch=0)
    server = KeyServer.start(1, job)
    store = JobStore(server.address, job, 0, datetime.timedelta(seconds=HANG), server)
    yield store
    store.close()


def test_a_late_answer_of_the_store_is_not_taken_for_the_next_one(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdlite.rendezvous.store._GRACE_SECONDS", 0.05)
    server, gate = store._server, threading.Event()
    answer = server._answer
    monkeypatch.setattr(server, "_answer", lambda *given: gate.wait(HANG) and answer(*given))
    try:
        store.set_timeout(datetime.timedelta(seconds=0.1))
        with pytest.raises(dist.DistStoreError, match="got no answer"):
            store.wait(["never"], datetime.timedelta(seconds=0.1))
        gate.set()
        with pytest.raises(dist.DistStoreError, match="lost the store"):
            store.check(["never"])
    finally:
        gate.set()


def test_what_the_store_cannot_do_for_a_rank_does_not_end_it(store: JobStore) -> None:
    store.multi_set(["text", "more"], ["x" * (1 << 20), "x" * (1 << 20)])
    store.append("more", "x" * (1 << 20))
    with pytest.raises(dist.DistStoreError, match="the value of text is no number"):
        store.add("text", 1)
    with pytest.raises(dist.DistStoreError, match="is too long: at most 4194304 are allowed"):
        store.multi_get(["text", "more"])
    assert store.add("number", -2) == -2


def counts() -> dict[str, int]:
    gc.collect()
    memory = Path("/proc/self/smaps_rollup").read_text().split("Private_Dirty:")[1].split()[0]
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "python": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "KiB": int(memory),
    }


def make_and_destroy(groups: int) -> tuple[dict[str, int], dict[str, int]]:
    dist.init_process_group("hvdlite")

    def use_one() -> None:
        group = dist.new_group()
        dist.all_reduce(torch.ones(1000), group=group)
        dist.all_reduce(torch.ones(1000), group=group, async_op=True).get_future().wait()
        dist.destroy_process_group(group)

    for _ in range(20):
        use_one()
    before = counts()
    for _ in range(groups):
        use_one()
    wait_until(lambda: len(os.listdir("/proc/self/task")) <= before["threads"], "threads end")
    after = counts()
    dist.destroy_process_group()
    return before, after


def test_destroyed_groups_leave_nothing() -> None:
    for result in run_world(2, make_and_destroy, 100):
        before, after = result.value
        grown = after.pop("KiB") - before.pop("KiB")
        assert all(after[what] <= before[what] for what in after), (before, after)
        assert grown < 4096, grown
