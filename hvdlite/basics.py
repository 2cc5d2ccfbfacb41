"""The life of this process's world: `init`, `shutdown`, and the numbers of this rank and its host.

This module holds the one engine that all adapters share. When a launcher (hvdlite-run, torchrun)
started this process, `init` connects it to the other ranks. Otherwise `init` makes a world of one.

One lock serialises the functions that begin or end a world. The lock is re-entrant because signal
handlers run in the thread that they interrupt: `shutdown` in a handler returns at once, and the
`init` that the handler interrupted then raises.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hvdlite import _core, ops, process_sets
from hvdlite.errors import (
    ArgumentError,
    BootstrapError,
    HvdliteError,
    NotInitializedError,
    as_shown,
    in_library,
)
from hvdlite.live import observed
from hvdlite.ops import gather_bytes
from hvdlite.process_sets import ProcessSet, StaticSets
from hvdlite.rendezvous.connection import Connection, Topology
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.environment import WorkerEnvironment, detect, timeline_parts
from hvdlite.rendezvous.mesh import connect
from hvdlite.timeline.recorder import Gather, Recorder

__all__ = [
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

if TYPE_CHECKING:
    from hvdlite.rendezvous.membership import MembershipThread

_world: World | None = None
_succession = threading.Lock()  # It is held while one world replaces another.
_left_elastic = False  # An elastic job takes nobody back who has left it.
_watchers: list[Callable[[_core.Engine | None], None]] = []
_tellers: list[Callable[[BaseException], None]] = []
_lock = threading.RLock()
# This is the name of the running function that begins or ends a world; `_lock` guards it.
_busy: str | None = None
_starting: Deadline | None = None  # The init() that runs, in any thread, has this deadline.
_LOOK_SECONDS = 0.1  # shutdown() checks so often whether another thread's init() has given up.
_LONGEST_GATHERING = 20.0  # seconds that ranks on other hosts may take to stop their timelines


def init(comm: Any = None, process_sets: StaticSets = None) -> None:
    """Connect to the world that the launcher describes, or make a world of one.

    Every rank calls `init`, and it returns when all ranks are connected. A second call does nothing
    while the world exists. After `shutdown`, `init` makes a new world.

    Args:
        comm: only None is accepted; the parameter exists for scripts written for Horovod.
        process_sets: the process sets to register, the same ones in the same order on all ranks;
            see `hvdlite.process_sets`. Horovod's "dynamic" means the same as None here: process
            sets can be added at any time.

    Raises:
        BootstrapError: a rank did not arrive in time, was refused, or gave other process sets (the
            message says which rank); or `shutdown` was called before all ranks were connected.
        ArgumentError: `comm` is not None; a process set is invalid, on every rank; or the file that
            HVDLITE_TIMELINE names cannot be written.
    """
    if comm is not None:
        raise ArgumentError(
            f"init(comm={comm!r}): the world is what the launcher started; for parts of it use "
            "init(process_sets=[...])"
        )
    global _busy, _starting
    with _lock:
        if _busy is not None:
            raise BootstrapError(
                f"init() was called by a signal handler while {_busy}() runs in the same thread; "
                "call it again when that has returned"
            )
        if _world is not None:
            return
        try:
            _busy = "init"
            worker = detect()
            _starting = Deadline(worker.start_timeout)
            _join_world(worker, _starting, process_sets)
        finally:
            _busy = _starting = None


def _join_world(worker: WorkerEnvironment, deadline: Deadline, static: StaticSets) -> None:
    global _world
    sets = process_sets.static_sets(static)
    agreed = {**_core.agreed_knobs(), "process_sets": str([one.ranks for one in sets])}
    if worker.elastic:
        _world = world = _begin_elastic(worker, deadline, agreed, sets)
    else:
        connection = connect(worker, _core.create_segment, agreed, deadline)
        _world = world = make_world(connection, deadline, worker.job_id)
    engine = world.engine
    try:
        ops.return_to_names({})  # A new world begins, so all counts do.
        if world.member is not None:
            # A worker that will join makes its optimizers for process sets that it gets by then.
            planned = process_sets.static_ranks(world.size)
            process_sets.begin(engine, world.rank, world.size, planned)
            world.member.attach(engine)
            if not worker.joiner:
                process_sets.check_static(world.size)
        else:
            process_sets.begin(engine, world.rank, world.size, {})
            process_sets.register_static(sets)
        _install_hooks()
        for watcher in _watchers:
            watcher(engine)
        deadline.refuse_if_given_up()
    except BaseException as error:
        _leave_world(_world)
        if isinstance(error, HvdliteError):
            # If shutdown() caused the error, say that: the error itself says less.
            deadline.refuse_if_given_up()
        raise


def _begin_elastic(
    worker: WorkerEnvironment,
    deadline: Deadline,
    agreed: Mapping[str, str],
    sets: Sequence[ProcessSet],
) -> World:
    from hvdlite.rendezvous.membership import MembershipThread  # Ordinary jobs do not need it.

    if _left_elastic:
        raise ArgumentError(
            "init() was called after shutdown() in an elastic job, which this process has left for "
            "good; leave shutdown() out: hvd.elastic.run forms new worlds by itself"
        )
    member = MembershipThread(worker, agreed, follow, process_sets.drop_broken)
    process_sets.keep_static(sets)
    connection = member.begin(deadline)
    try:
        if worker.joiner:
            world = make_world(connection, deadline, worker.job_id, member.pending, records=False)
            # Its engine has a world of one; the script sees the numbers that the launcher planned.
            return replace(
                world,
                rank=worker.rank,
                size=worker.size,
                local_rank=worker.local_rank or 0,
                local_size=worker.local_size or 1,
                host_of=(0,) * worker.size,
                member=member,
            )
        static = process_sets.static_ranks(connection.size)
        world = make_world(connection, deadline, worker.job_id, member.pending, sets=static)
        return replace(world, member=member)
    except BaseException:
        member.leave({})
        raise


def follow(
    connection: Connection,
    epoch: int,
    pending: _core.PendingOperations,
    rank_of: Sequence[int],
    resumes: bool,
) -> _core.Engine | None:
    """Replace an elastic job's world by the next one; None if this process has left the job."""
    # The membership thread calls this function, which takes `connection` over. `epoch` is the
    # number of the next world. `pending` has the operations that go on in it. `rank_of` gives, by
    # rank of the present world, the next rank of that worker, or -1. With `resumes` the next world
    # begins in the middle of things, and not at a boundary.
    global _world
    with _succession:
        if _world is None:
            connection.close()
            return None
        size = connection.size
        static = process_sets.static_ranks(size)
        sets = dict(pending.process_sets(rank_of)) if resumes else static
        timeline = _world.recorder.target
        _end_timeline(_world, None)
        world = make_world(connection, _world.start, _world.job_id, pending, epoch, sets, timeline)
        engine = world.engine
        # Before an addition that goes on can end.
        process_sets.begin(engine, world.rank, size, sets, resumes)
        pending.resume(engine, rank_of)
        # A GPU was chosen by the local rank, so it stays as long as the process lives.
        _world = replace(world, local_rank=_world.local_rank, member=_world.member)
        for watcher in list(_watchers):
            watcher(engine)
        return engine


@dataclass(frozen=True, kw_only=True)
class World(Topology):
    engine: _core.Engine
    recorder: Recorder
    start: Deadline
    job_id: bytes
    check_finite: int  # the knob; reading it takes microseconds
    epoch: int = 0  # of an elastic job
    member: MembershipThread | None = None  # in an elastic job


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
        nccl_folders(),
        trace_file,
        bool(knobs["timeline_mark_cycles"]),
        pending,
        epoch,
        list((sets or {}).items()),
        connection.clock.nanoseconds,
        connection.control_tree,
    )
    if records:
        observed.follow(engine, connection.rank, connection.size, epoch)
    return World(
        **connection.numbers(),
        engine=engine,
        recorder=recorder,
        start=start,
        job_id=job_id,
        check_finite=int(knobs["check_finite"]),
        epoch=epoch,
    )


def nccl_folders() -> list[str]:
    """List the folders in which wheels have installed NCCL, in the order of the import path."""
    # The core looks for NCCL in this order: a copy that the framework has loaded, the file that
    # HVDLITE_NCCL_LIBRARY names, these folders, the system.
    folders = [Path(entry) / "nvidia" / "nccl" / "lib" for entry in sys.path if entry]
    return [str(folder) for folder in folders if (folder / "libnccl.so.2").exists()]


def in_elastic_job() -> bool:
    return _world is not None and _world.member is not None


def shutdown() -> None:
    """Leave the world cleanly; operations in flight get a moment to end, and then fail.

    Without a world, `shutdown` does nothing. An `init` that is running (in another thread, or in
    this one, interrupted by the signal handler that calls this) raises BootstrapError.
    """
    start, world = _starting, _world
    _give_up_starting()
    while not _lock.acquire(timeout=_LOOK_SECONDS):
        if _busy == "init" and _starting is not start:
            return  # The init() that ran at the call has ended; the one that runs now began later.
    try:
        if _world is not None and (_world is world or _world.start is start):
            _leave_unless_busy(_world)
    finally:
        _lock.release()


def _leave_at_exit() -> None:
    """Leave the world, if there is one, and end the init() of any daemon thread."""
    _give_up_starting()
    while not _lock.acquire(timeout=_LOOK_SECONDS):
        _give_up_starting()
    try:
        if _world is not None:
            _leave_unless_busy(_world)
    finally:
        _lock.release()


def _leave_unless_busy(world: World) -> None:
    global _busy
    if _busy is not None:
        return  # This is a signal handler; the function that it interrupted ends the world.
    try:
        _busy = "shutdown"
        _warn_of_ranks_alone(world)
        _leave_world(world)
    finally:
        _busy = None


def _warn_of_ranks_alone(world: World) -> None:
    """Say that ranks trained alone, where a script ends well that never combined their tensors."""
    if world.rank > 0 or world.size == 1:
        return
    failed = sys.exc_info()[0] is not None or hasattr(sys, "last_value")
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    # Process groups have engines of their own. Functions that Ray calls, say, may train nothing.
    if failed or _tellers or world.member is not None or in_library(script):
        return
    if not world.engine.counters()["exchanges"] and not _trains_nothing():
        print(
            "hvdlite [0] warning: no gradient was averaged: if the script trains a model, each of "
            f"the {world.size} ranks trained its own; give the optimizer to "
            "hvd.DistributedOptimizer, or a model of Keras to hvd.distribute",
            file=sys.stderr,
        )


def _trains_nothing() -> bool:
    """Return whether the script has made no optimizer of PyTorch, and uses no other framework."""
    kinds = [sys.modules["torch.optim"].Optimizer] if "torch.optim" in sys.modules else []
    for kind in kinds:
        kinds += kind.__subclasses__()
    # The first optimizer of a class wraps its step(), and hvdlite's classes come with that.
    made = any(hasattr(one.step, "hooked") for one in kinds if "hvdlite" not in one.__module__)
    return not made and not sys.modules.keys() & {"keras", "tensorflow"}


def _give_up_starting() -> None:
    """Make a running init() raise, in another thread or interrupted by this signal handler."""
    start, world = _starting, _world
    if start is not None:
        start.give_up()
        if world is not None:
            # That init() may be waiting for other ranks to register process sets.
            world.engine.shutdown()


def _leave_world(world: World) -> None:
    """End a world completely, even if a signal handler raises meanwhile."""
    global _world, _left_elastic
    with _succession:
        world = _world or world  # Another world may have followed.
        _world = None
    try:
        observed.end()
        _stop_timeline(world)
    finally:
        try:
            world.engine.shutdown()
            if world.member is not None:
                _left_elastic = True
                world.member.leave(world.engine.commit_counts())
        finally:
            process_sets.end()
            for watcher in _watchers:
                watcher(None)


def watch(watcher: Callable[[_core.Engine | None], None]) -> None:
    """Call `watcher` with the engine now and after every `init`, and with None after `shutdown`."""
    # Adapters use this function to prepare something in a new world, or to hand the engine to
    # operations that reach it without Python.
    with _lock:
        _watchers.append(watcher)
        world = _world
        watcher(world.engine if world is not None else None)
        if world is not None and _world is None:
            watcher(None)  # A signal handler called shutdown() during the call above.


def is_initialized() -> bool:
    """Return whether this process has a world: it called `init`, and not `shutdown` after it."""
    return _world is not None


def engine() -> _core.Engine:
    """Return the engine that the adapters submit to; raise NotInitializedError without one."""
    return current_world().engine


def current_world() -> World:
    """Return the present world, all of it at one moment; raise NotInitializedError without one."""
    if _world is None:
        raise NotInitializedError("hvdlite has not been initialized; call hvd.init() first")
    return _world


def rank() -> int:
    """Return this process's number in the world, from 0."""
    return current_world().rank


def size() -> int:
    """Return how many ranks the world has."""
    return current_world().size


def local_rank() -> int:
    """Return this process's number among the ranks of its host, from 0."""
    return current_world().local_rank


def local_size() -> int:
    """Return how many ranks share this host."""
    return current_world().local_size


def cross_rank() -> int:
    """Return the number of this host among the hosts that have a rank of this `local_rank`."""
    return current_world().cross_rank


def cross_size() -> int:
    """Return how many hosts have a rank of this `local_rank`."""
    return current_world().cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks."""
    hosts = current_world().host_of
    return len({hosts.count(host) for host in set(hosts)}) == 1


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Record what this rank does, until `stop_timeline` or `shutdown`.

    Every rank calls it with the same path. When all ranks have stopped, their parts are merged into
    that file, which https://ui.perfetto.dev and chrome://tracing open. If some rank never started
    or never stopped, hvdlite-run merges the parts when the job is over. See docs/timeline.md.

    Args:
        file_path: the file to write.
        mark_cycles: also mark where the engine's rounds begin.

    Raises:
        ArgumentError: a timeline is being written already, or the file cannot be written.
        NotInitializedError: `init` was not called.

    Example:
        >>> import json, os, tempfile
        >>> init()
        >>> path = os.path.join(tempfile.mkdtemp(), "timeline.json")
        >>> start_timeline(path)
        >>> engine().barrier("all").wait()
        >>> stop_timeline()
        >>> "all" in {event.get("name") for event in json.load(open(path))["traceEvents"]}
        True
    """
    with _lock:
        world = current_world()
        file = world.recorder.begin(file_path)
        try:
            world.engine.start_trace(file, mark_cycles)
            if _world is not world:  # A signal handler called shutdown() meanwhile.
                world.engine.stop_trace()
                raise NotInitializedError("shutdown() was called while start_timeline() ran")
        except BaseException:
            world.recorder.cancel()
            raise


def stop_timeline() -> None:
    """End this rank's part of the timeline; do nothing when no timeline is being written.

    If the ranks span several hosts, every rank must call it, because the parts travel to rank 0 by
    a collective.

    Raises:
        NotInitializedError: `init` was not called.
    """
    with _lock:
        _stop_timeline(current_world())


def _stop_timeline(world: World) -> None:
    _end_timeline(
        world,
        lambda data, name: gather_bytes(world.engine, data, name, timeout=_LONGEST_GATHERING)[0],
    )


def _end_timeline(world: World, gather: Gather | None) -> None:
    world.engine.stop_trace()
    try:
        world.recorder.end(gather)
    except OSError as error:  # TimeoutError is one.
        print(f"hvdlite [{world.rank}] warning: no timeline: {error}", file=sys.stderr)
    except HvdliteError:
        pass  # The world has failed, which is reported elsewhere; the part stays in its folder.


@functools.cache
def _install_hooks() -> None:
    atexit.register(_leave_at_exit)
    previous = sys.excepthook

    def report_then_tell_peers(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        error = as_shown(error)
        previous(type(error), error, error.__traceback__)
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C may reach a rank that is ending.
            tell_peers(error)

    sys.excepthook = report_then_tell_peers


def tell_peers(error: BaseException) -> None:
    """End the world, because the training function has raised `error`: all other ranks name it."""
    # A script that ends with an exception in its main thread ends the world without this call.
    # Integrations that call a user's function in another thread call this function, and then raise
    # the exception again. Without a world, or in a world of one, it does nothing.
    for tell in list(_tellers):
        tell(error)
    world = _world
    if world is not None and world.size > 1:
        what = describe_error(error)
        if world.member is not None:
            world.member.break_off(what)
        world.engine.abort(f"rank {world.rank} {what}")


def tell_also(tell: Callable[[BaseException], None]) -> None:
    """Have `tell` called, too, when an exception ends the script, and by `tell_peers`."""
    # Adapters that have engines besides the one of `init` end those engines in `tell`.
    _tellers.append(tell)
    _install_hooks()


def describe_error(error: BaseException) -> str:
    """Describe this rank's exception in one line, for the error that the other ranks raise."""
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = [one for one in frames if not in_library(one.filename)] or frames
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = str(error).strip().splitlines()
    said = f": {text[0]}" if text else ""
    return f"raised {type(error).__name__}{said}{where}"[:2000]
