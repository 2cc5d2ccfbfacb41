"""Ranks that wait for each other get an error that names both sides; ranks that are late do not."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from faults.arrays import ones, works
from harness import run_world
from hvdlite import _core, basics
from hvdlite.errors import DeadlockError

PRELOAD = ("numpy", "torch._dynamo")
GRACE = {"HVDLITE_DEADLOCK_GRACE": "1"}
EXACTLY = "call the same operations in the same order on all ranks"


def gather(name: str) -> None:
    array = ones()
    tensor = _core.Tensor(
        name, _core.DTYPES["float32"], list(array.shape), array.ctypes.data, array.ctypes.data
    )
    basics.engine().allgather(name, [tensor], keep=array, blocking=True).wait()


def caught(call: Any, *arguments: Any) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        call(*arguments)
    except DeadlockError as error:
        message = str(error)
    else:
        message = ""
    ended = time.monotonic()
    return {"message": message, "seconds": ended - begun, "ended": ended}


def barrier(name: str) -> None:
    basics.engine().barrier(name, blocking=True).wait()


def place_of(function: Any) -> str:
    """Return the place of the last line of a function."""
    code = function.__code__
    return f"{code.co_filename}:{max(line for *_, line in code.co_lines() if line)}"


def barrier_against_allgather() -> dict[str, Any]:
    basics.init()
    assert works("before")
    said = caught(gather, "rows") if basics.rank() == 1 else caught(barrier, "end of epoch")
    assert works("after")
    return said


def test_a_barrier_against_an_allgather_is_an_error_on_all_ranks() -> None:
    for result in run_world(3, barrier_against_allgather, env=GRACE):
        message = result.value["message"]
        assert "deadlock: " in message
        barred, gathered = (place_of(function) for function in (barrier, gather))
        assert f"rank 0 waits for rank 1 in barrier 'end of epoch' ({barred})" in message
        assert f"rank 1 waits for rank 0 in allgather 'rows' ({gathered})" in message
        assert EXACTLY in message
        assert "also waiting: rank 2 in barrier 'end of epoch'" in message
        assert result.value["seconds"] >= 1.0
        assert "has waited" not in result.stderr


def backward_against_barrier() -> dict[str, Any]:
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    layer = torch.nn.Linear(4, 4)
    adam = torch.optim.Adam(layer.parameters())
    optimizer = hvd.DistributedOptimizer(adam, named_parameters=layer.named_parameters())
    for _ in range(2):
        layer(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if hvd.rank() == 0:
        return caught(hvd.barrier)
    return caught(layer(torch.ones(4)).sum().backward)


def test_a_backward_against_a_barrier_is_an_error_on_both_ranks() -> None:
    for result in run_world(2, backward_against_barrier, env=GRACE):
        message = result.value["message"]
        assert "deadlock: rank" in message
        assert "rank 0 waits for rank 1 in barrier" in message
        assert "rank 1 waits for rank 0 in allreduce" in message


def receive_first() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("hvdlite")
    other = 1 - dist.get_rank()
    said = caught(lambda: dist.recv(torch.zeros(2), other))
    received = torch.zeros(2)
    request = dist.irecv(received, other, tag=1)
    dist.send(torch.ones(2), other, tag=1)
    request.wait()
    assert received.tolist() == [1, 1]
    return said


def test_two_ranks_that_both_receive_first_are_told_what_to_do() -> None:
    for result in run_world(2, receive_first, env=GRACE):
        message = result.value["message"]
        assert "from rank 1 to rank 0" in message
        assert "from rank 0 to rank 1" in message
        assert "submit both transfers before they wait, with dist.isend()" in message


def wait_in_two_threads() -> list[dict[str, Any]]:
    basics.init()
    assert works("before")
    said: list[dict[str, Any]] = []
    suffix = str(basics.rank())
    thread = threading.Thread(target=lambda: said.append(caught(barrier, "second" + suffix)))
    thread.start()
    said.append(caught(barrier, "first" + suffix))
    thread.join()
    assert works("after")
    return said


def test_a_rank_with_two_threads_is_blocked_if_both_wait() -> None:
    for result in run_world(2, wait_in_two_threads, env=GRACE):
        assert len(result.value) == 2
        assert all("deadlock: " in said["message"] for said in result.value)


def come_late(seconds: float) -> bool:
    basics.init()
    assert works("before")
    if basics.rank() == 1:
        time.sleep(seconds)
    barrier("end of epoch")
    gather("rows")
    return works("after")


def submit_in_another_thread(seconds: float) -> bool:
    """Wait in the main threads for what new threads of the other rank submit later."""
    basics.init()
    assert works("before")
    names = ["a", "b"] if basics.rank() == 0 else ["b", "a"]
    in_time = threading.Event()

    def submit() -> None:
        time.sleep(seconds)
        barrier(names[1])
        in_time.set()

    thread = threading.Thread(target=submit)
    thread.start()
    barrier(names[0])
    thread.join()
    return in_time.is_set() and works("after")


def poll_handles(seconds: float) -> bool:
    """Look at an operation again and again, and submit what the other rank waits for."""
    basics.init()
    assert works("before")
    names = ["a", "b"] if basics.rank() == 0 else ["b", "a"]
    first = basics.engine().barrier(names[0])
    until = time.monotonic() + seconds
    while basics.rank() == 0 and time.monotonic() < until:
        assert not first.done()
        time.sleep(0.01)
    if basics.rank() == 1:
        first.wait()
    barrier(names[1])
    first.wait()
    return works("after")


@pytest.mark.parametrize("body", [come_late, submit_in_another_thread, poll_handles])
def test_what_still_comes_is_not_a_deadlock(body: Any) -> None:
    env = {"HVDLITE_DEADLOCK_GRACE": "0.5"}
    assert all(result.value for result in run_world(2, body, args=(1.0,), env=env))


def wait_beside_quiet_threads() -> dict[str, Any]:
    """Wait for each other while threads are there that submit nothing."""
    import multiprocessing
    from concurrent.futures import ThreadPoolExecutor

    basics.init()
    assert works("before")
    queue: Any = multiprocessing.Queue()
    queue.put(1)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(time.time).result()
        said = caught(barrier, "mine" if basics.rank() == 0 else "yours")
    assert queue.get() == 1
    return said


def test_threads_that_submit_nothing_do_not_hide_a_deadlock() -> None:
    for result in run_world(2, wait_beside_quiet_threads, env=GRACE):
        assert "deadlock: " in result.value["message"]


def wait_at_the_end_of_a_backward(called: int) -> dict[str, Any]:
    """Wait in a thread like that of autograd for a GPU, where `called` threads call backward()."""
    import _thread

    from hvdlite.torch.reducer import GradientReducer

    basics.init()
    assert works("before")
    ended = threading.Lock()
    ended.acquire()
    said: list[dict[str, Any]] = []

    def at_end() -> None:
        said.append(caught(barrier, "backward" + str(basics.rank())))
        ended.release()

    # Functions of modules of these names, whose threads Python's `threading` has not started.
    # Autograd calls `_wait` itself.
    end: dict[str, Any] = {"__name__": GradientReducer._wait.__module__, "call": at_end}
    exec("def run(): call()", end)
    inside: dict[str, Any] = {"__name__": "torch.autograd.graph", "wait": time.sleep}
    inside |= {"worked": [], "now": time.monotonic}
    exec("def run():\n    wait(2)\n    worked.append(now())", inside)
    _thread.start_new_thread(end["run"], ())
    for _ in range(called):
        _thread.start_new_thread(inside["run"], ())
    exec("def run(): lock.acquire()", {**inside, "lock": ended}, inside)
    inside["run"]()
    assert works("after")
    return {**said[0], "worked": inside["worked"]}


@pytest.mark.parametrize("called", [0, 1])
def test_the_thread_that_called_a_backward_does_not_count_at_its_end(called: int) -> None:
    for result in run_world(2, wait_at_the_end_of_a_backward, args=(called,), env=GRACE):
        assert "deadlock: " in result.value["message"]
        assert len(result.value["worked"]) == called
        assert all(result.value["ended"] >= worked for worked in result.value["worked"])


def interrupted() -> bool:
    """Wait for each other until a signal handler ends the wait of rank 0 by an exception."""
    import signal

    class Alarm(Exception):
        pass

    def ring(*_: Any) -> None:
        raise Alarm

    basics.init()
    assert works("before")
    names = ["a", "b"] if basics.rank() == 0 else ["b", "a"]
    first = basics.engine().barrier(names[0])
    if basics.rank() == 0:
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 1.8)
        with pytest.raises(Alarm):
            first.wait()
        time.sleep(2)
        basics.engine().barrier(names[1]).wait()
        first.wait()
    else:
        first.wait()
        barrier(names[1])
    return works("after")


def test_a_wait_that_a_signal_ends_is_taken_back() -> None:
    env = {"HVDLITE_DEADLOCK_GRACE": "3"}
    assert all(result.value for result in run_world(2, interrupted, env=env))
