"""One world of this process: its engine, and the numbers of this rank in it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from hvdlite import _core, gpu, reporting
from hvdlite.errors import ArgumentError
from hvdlite.rendezvous.connect import Connection
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.environment import WorkerEnvironment, timeline_parts
from hvdlite.timeline.recorder import Recorder


class Member(Protocol):
    """This process's membership in an elastic job; see `hvdlite.elastic.membership_thread`."""

    pending: _core.PendingOperations

    def begin(self, deadline: Deadline) -> Connection:
        """Register this worker, and wait for its first world."""

    def attach(self, engine: _core.Engine) -> None:
        """Take note of the engine of the first world."""

    def ask_to_leave(self, why: str) -> None:
        """Ask to leave the job at its next boundary."""

    def break_off(self, what: str) -> None:
        """End without a goodbye, because the script has failed: "raised ValueError: ..."."""

    def leave(self, commits: Mapping[int, int]) -> None:
        """Say goodbye; the engine has been shut down."""


@dataclass(frozen=True)
class World:
    """One initialised world: its engine and the numbers of this rank in it."""

    engine: _core.Engine
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host_of: tuple[int, ...]
    recorder: Recorder
    start: Deadline
    job_id: bytes
    check_finite: int  # This is the knob of the name; reading it takes microseconds.
    epoch: int = 0  # It is the number of this world in an elastic job.
    member: Member | None = None  # Only a worker of an elastic job has one.


def make_world(
    connection: Connection,
    start: Deadline,
    job_id: bytes,
    pending: _core.PendingOperations | None = None,
    epoch: int = 0,
    sets: Mapping[int, Sequence[int]] | None = None,
    timeline: Path | None = None,
    records: bool = True,
) -> World:
    """Start the engine of a world, and the timeline if the knob `timeline` names a file."""
    # This function takes `connection` over. `start` is the deadline of the `init` that made this
    # world, or its first predecessor. The other arguments are those of an elastic job: `epoch` is
    # the number of this world, `sets` has the ranks of its first process sets by id, and `timeline`
    # is the file of a timeline that goes on. Without `records` (a worker that will join) this world
    # has no timeline and no report.
    recorder = Recorder(
        connection.rank,
        connection.host_of,
        connection.clock,
        job_id,
        timeline_parts(),
        None if pending is None else epoch,
    )
    try:
        knobs = _core.knob_values()
        target = str(timeline or knobs["timeline"]) if records else ""
        trace_file = recorder.begin_by_knob(target)
    # The timeline's file cannot be written. Only the first world fails because of it.
    except ArgumentError as error:
        if epoch == 0:
            connection.close()
            raise
        trace_file = -1  # The disk is full, for example, which must not end the training.
        print(f"hvdlite [{connection.rank}] warning: no timeline: {error}", file=sys.stderr)
    except BaseException:
        connection.close()
        raise
    engine = _core.Engine(
        connection.rank,
        connection.size,
        connection.host_of,
        connection.links,
        connection.segment_fd,
        connection.event_fd,
        connection.lifeline_fd,
        gpu.nccl_folders(),
        trace_file,
        bool(knobs["timeline_mark_cycles"]),
        pending,
        epoch,
        list((sets or {}).items()),
        connection.clock.nanoseconds,
        connection.control_tree,
    )
    if records:
        reporting.follow(engine, connection.rank, connection.size, epoch)
    return World(
        engine=engine,
        rank=connection.rank,
        size=connection.size,
        local_rank=connection.local_rank,
        local_size=connection.local_size,
        cross_rank=connection.cross_rank,
        cross_size=connection.cross_size,
        host_of=tuple(connection.host_of),
        recorder=recorder,
        start=start,
        job_id=job_id,
        check_finite=int(knobs["check_finite"]),
        epoch=epoch,
    )


def as_planned(world: World, worker: WorkerEnvironment) -> World:
    """Give a joiner, whose engine has a world of one, the numbers that its launcher has planned."""
    return replace(
        world,
        rank=worker.rank,
        size=worker.size,
        local_rank=worker.local_rank or 0,
        local_size=worker.local_size or 1,
        host_of=(0,) * worker.size,
    )
