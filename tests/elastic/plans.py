"""Faults that a worker of a test brings upon itself at a named point, and its journal.

A test gives each worker a `Plan` as JSON. The functions of this file run in the workers.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What happens to one worker, once.

    Attributes:
        worker: the number of the worker.
        point: the name of the place in the training loop or in the membership thread.
        at: the step, at points of a step; the epoch, while an epoch forms; else how many times the
            worker has come to the point before.
        how: "kill" (SIGKILL after `delay`), "last" (SIGKILL, once all others of the epoch have
            written "once"), "term" (SIGTERM), "raise" (an exception), "exit" (exit status 0), or
            "soon" (SIGKILL after `delay`, while the worker goes on).
        delay: in seconds.
    """

    worker: int
    point: str
    at: int
    how: str = "kill"
    delay: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What the workers of a job do.

    Attributes:
        folder: of the journals.
        steps: how many steps a core worker makes; how many epochs workers with torch make.
        faults: who dies where.
        hosts: the workers act as so many hosts; 0 leaves them those on which they are.
        commit_every: the steps, or backward passes, between two commits.
        pause: seconds between two steps, or backward passes.
        hold_at: a step at which the workers wait for workers that join; with virtual ranks, each
            multiple of it.
        hold_until: they wait for this epoch; with torch, for so many ranks.
        unredoable_at: a step before which workers do what fewer ranks cannot redo.
        unredoable: what core workers do: "alltoall", "reducescatter", or "broadcast" (from rank 1).
        op: how workers with torch reduce: "average", "sum", "adasum", or "local" (LocalSGD).
        passes: the backward passes of a step.
        compressed: whether gradients travel in bfloat16.
    """

    folder: str
    steps: int
    faults: tuple[Fault, ...] = ()
    hosts: int = 1
    commit_every: int = 4
    pause: float = 0.0
    hold_at: int = -1
    hold_until: int = 0
    unredoable_at: int = -1
    unredoable: str = "alltoall"
    op: str = "average"
    passes: int = 1
    compressed: bool = False

    def as_json(self) -> str:
        """Return the text that `read_plan` reads."""
        return json.dumps(asdict(self))


class PlannedError(Exception):
    """The exception of a fault that raises."""


def this_worker() -> int:
    return int(os.environ["HVDLITE_WORKER"])


def read_plan() -> Plan:
    """Read the plan of this worker, let it act as its host, and show its stacks on SIGUSR1."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    values = json.loads(sys.argv[1])
    faults = tuple(Fault(**fault) for fault in values.pop("faults"))
    plan = Plan(**values, faults=faults)
    if plan.hosts:
        os.environ["HVDLITE_HOST_ID"] = f"host-{this_worker() % plan.hosts}"
    return plan


class Journal:
    """A file to which a worker adds one JSON line in one write, which SIGKILL cannot cut."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        path = self._folder / f"worker.{this_worker()}"
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, kind: str, **facts: Any) -> None:
        """Add a line."""
        line = json.dumps({"kind": kind, "at": time.monotonic(), **facts})
        os.write(self._fd, line.encode() + b"\n")

    def await_others(self, kind: str) -> None:
        """Wait until all other workers of the epoch have written a line of this kind."""
        from hvdlite.rendezvous import epochs

        epoch = epochs.current()
        assert epoch is not None
        for worker in set(epoch.workers) - {epoch.worker}:
            while f'"kind": "{kind}"' not in (self._folder / f"worker.{worker}").read_text():
                time.sleep(0.01)


class Faults:
    """The faults of this worker."""

    def __init__(self, faults: Sequence[Fault], journal: Journal) -> None:
        self._faults = [fault for fault in faults if fault.worker == this_worker()]
        self._journal = journal
        self._visits: dict[str, int] = {}

    def come_to(self, point: str, at: int | None = None) -> None:
        """Suffer what is planned for this point."""
        if at is None:
            at = self._visits.get(point, 0)
            self._visits[point] = at + 1
        for fault in list(self._faults):
            if (fault.point, fault.at) == (point, at):
                self._faults.remove(fault)
                self._suffer(fault)

    def _suffer(self, fault: Fault) -> None:
        self._journal.write("fault", point=fault.point, step=fault.at, how=fault.how)
        if fault.how == "raise":
            raise PlannedError(f"planned {fault.point}")
        if fault.how == "exit":
            raise SystemExit(0)
        if fault.how == "last":
            self._journal.await_others("once")
        if fault.how == "soon":
            threading.Thread(target=_kill_after, args=(fault.delay,), daemon=True).start()
            return
        time.sleep(fault.delay)
        os.kill(os.getpid(), signal.SIGTERM if fault.how == "term" else signal.SIGKILL)
        time.sleep(60)


def _kill_after(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass  # A sleep would be longer than the microseconds that count here.
    os.kill(os.getpid(), signal.SIGKILL)


def watch_membership_thread(faults: Faults) -> None:
    """Add points to the membership thread: while an epoch forms, and behind its last connection."""
    from hvdlite.rendezvous.membership import MembershipThread

    connect, await_go = MembershipThread._connect, MembershipThread._await_go

    def connecting(self: Any, message: Any, members: Any) -> Any:
        faults.come_to(f"forming {message['mode']}", message["epoch"])
        return connect(self, message, members)

    def awaiting(self: Any, epoch: int) -> Any:
        faults.come_to("connected", epoch)
        return await_go(self, epoch)

    MembershipThread._connect, MembershipThread._await_go = connecting, awaiting  # type: ignore[method-assign]


def watch_notices(faults: Faults) -> None:
    """Add a point to `check_host_updates`, between the question and the allreduce."""
    from hvdlite.elastic import state

    maximum = state.maximum

    def asking(*arguments: Any) -> list[int]:
        faults.come_to("check")
        return maximum(*arguments)

    state.maximum = asking
