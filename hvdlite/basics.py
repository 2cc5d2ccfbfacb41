"""The life of this process's world: `init`, `shutdown`, and who is where.

This module holds the one default engine that the adapters share. `init` connects to the other ranks
when a launcher started this process (hvdlite-run, torchrun), and makes a world of one otherwise.

One lock orders whatever begins or ends a world. It lets its own thread in again, for signal
handlers: `shutdown` in one returns at once, and an `init` that it interrupted then raises.

Example:
    >>> import hvdlite.basics as hvd
    >>> hvd.init()
    >>> hvd.rank(), hvd.size()
    (0, 1)
    >>> hvd.shutdown()
"""

from __future__ import annotations

import atexit
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hvdlite import _core, gpu, operation_names, process_sets
from hvdlite.bootstrap.connect import Connection, connect
from hvdlite.bootstrap.deadline import Deadline
from hvdlite.bootstrap.environment import WorkerEnvironment, detect, timeline_parts
from hvdlite.errors import ArgumentError, BootstrapError, HvdliteError, NotInitializedError
from hvdlite.gather_bytes import gather_bytes
from hvdlite.process_sets import StaticSets
from hvdlite.timeline.recorder import Recorder


@dataclass(frozen=True)
class _World:
    """One initialised world: its engine and this rank's place in it."""

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


_world: _World | None = None
_watchers: list[Callable[[_core.Engine | None], None]] = []
_lock = threading.RLock()
_busy: str | None = None  # the function that begins or ends a world; under the lock
_starting: Deadline | None = None  # of the init() that runs, in whatever thread
_hooks_installed = False
_LOOK_SECONDS = 0.1  # between looks for an init() of another thread to give up
_LONGEST_GATHERING = 20.0  # seconds that ranks on other hosts may take to stop their timelines


def init(comm: Any = None, process_sets: StaticSets = None) -> None:
    """Join the world that the launcher describes, or make a world of one.

    Every rank calls it; it returns when all are connected. Calling it again while initialised does
    nothing; after `shutdown` it joins anew.

    Args:
        comm: None; scripts written for Horovod may say so.
        process_sets: sets of ranks to register, the same ones in the same order on all ranks; see
            `hvdlite.process_sets`. "dynamic" is fine, too: sets can be added at any time.

    Raises:
        BootstrapError: a rank did not arrive in time, was refused, or gave other process sets; the
            message says which. Or `shutdown` was called meanwhile.
        ArgumentError: a process set cannot be, on every rank; or the file that HVDLITE_TIMELINE
            names cannot be written.
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
    connection = connect(worker, _core.create_segment, agreed, deadline)
    recorder = Recorder(
        connection.rank, connection.host_of, connection.clock, worker.job_id, timeline_parts()
    )
    engine = _make_engine(connection, recorder)
    _world = _World(
        engine=engine,
        rank=connection.rank,
        size=connection.size,
        local_rank=connection.local_rank,
        local_size=connection.local_size,
        cross_rank=connection.cross_rank,
        cross_size=connection.cross_size,
        host_of=tuple(connection.host_of),
        recorder=recorder,
        start=deadline,
    )
    try:
        operation_names.restart()
        process_sets.begin(engine, connection.rank, connection.size)
        process_sets.register_static(sets)
        _install_hooks()
        for watcher in _watchers:
            watcher(engine)
        deadline.refuse_if_given_up()
    except BaseException as error:
        _leave_world(_world)
        if isinstance(error, HvdliteError):
            deadline.refuse_if_given_up()  # What shutdown() ended says less.
        raise


def _make_engine(connection: Connection, recorder: Recorder) -> _core.Engine:
    """Start the engine, and the timeline with it where the knobs say so."""
    try:
        knobs = _core.knob_values()
        trace_file = recorder.begin_by_knob(str(knobs["timeline"]))
    except BaseException:
        connection.close()
        raise
    return _core.Engine(
        connection.rank,
        connection.size,
        connection.host_of,
        connection.links,
        connection.segment_fd,
        connection.bell_fd,
        gpu.nccl_folders(),
        trace_file,
        bool(knobs["timeline_mark_cycles"]),
    )


def shutdown() -> None:
    """Leave the world cleanly; what is still in flight gets a moment to end, then fails.

    Does nothing when not initialised. While `init` runs, in this thread below a signal handler or
    in another one, that is given up, and raises BootstrapError.
    """
    start, world = _starting, _world
    _give_up_starting()
    while not _lock.acquire(timeout=_LOOK_SECONDS):
        if _busy == "init" and _starting is not start:
            return  # What ran when this was called has ended; what runs now came later.
    try:
        if _world is not None and (_world is world or _world.start is start):
            _leave_unless_busy(_world)
    finally:
        _lock.release()


def _leave_at_exit() -> None:
    """Leave whatever world there is; no init() of a daemon thread may hold up the end."""
    _give_up_starting()
    while not _lock.acquire(timeout=_LOOK_SECONDS):
        _give_up_starting()
    try:
        if _world is not None:
            _leave_unless_busy(_world)
    finally:
        _lock.release()


def _leave_unless_busy(world: _World) -> None:
    global _busy
    if _busy is not None:
        return  # This is a signal handler, and what it interrupted goes on to its end.
    try:
        _busy = "shutdown"
        _leave_world(world)
    finally:
        _busy = None


def _give_up_starting() -> None:
    """Make an init() raise that runs below this signal handler, or in another thread."""
    start, world = _starting, _world
    if start is not None:
        start.give_up()
        if world is not None:
            world.engine.shutdown()  # It may wait for other ranks to register process sets.


def _leave_world(world: _World) -> None:
    """End a world; all of it, whatever a signal handler raises meanwhile."""
    global _world
    _world = None
    try:
        _stop_timeline(world)
    finally:
        try:
            world.engine.shutdown()
        finally:
            process_sets.end()
            for watcher in _watchers:
                watcher(None)


def watch(watcher: Callable[[_core.Engine | None], None]) -> None:
    """Call `watcher` with the engine now and after every `init`, and with None after `shutdown`.

    For adapters that prepare something in a new world, or whose operations reach the engine without
    passing through Python.
    """
    with _lock:
        _watchers.append(watcher)
        world = _world
        watcher(world.engine if world is not None else None)
        if world is not None and _world is None:
            watcher(None)  # A signal handler has shut down just before.


def is_initialized() -> bool:
    """Say whether `init` was called, and `shutdown` not since."""
    return _world is not None


def engine() -> _core.Engine:
    """Return the engine that the adapters submit to.

    Raises:
        NotInitializedError: there is none.
    """
    return _current().engine


def _current() -> _World:
    if _world is None:
        raise NotInitializedError("hvdlite has not been initialized; call hvd.init() first")
    return _world


def rank() -> int:
    """Return this process's number in the world, from 0."""
    return _current().rank


def size() -> int:
    """Return how many ranks the world has."""
    return _current().size


def local_rank() -> int:
    """Return this process's number among the ranks of its host, from 0."""
    return _current().local_rank


def local_size() -> int:
    """Return how many ranks share this host."""
    return _current().local_size


def cross_rank() -> int:
    """Return the number of this host among the hosts that have a rank of this `local_rank`."""
    return _current().cross_rank


def cross_size() -> int:
    """Return how many hosts have a rank of this `local_rank`."""
    return _current().cross_size


def is_homogeneous() -> bool:
    """Say whether every host has the same number of ranks."""
    hosts = _current().host_of
    return len({hosts.count(host) for host in set(hosts)}) == 1


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Write down what this rank does from now on, until `stop_timeline` or `shutdown`.

    Every rank calls it, with the same path; once all have stopped, their parts are one file there,
    which https://ui.perfetto.dev and chrome://tracing open. Where some rank never stops, or never
    started, hvdlite-run makes the file when the job is over. See docs/timeline.md.

    Args:
        file_path: the file to write.
        mark_cycles: also mark where the engine's rounds begin.

    Raises:
        ArgumentError: a timeline is being written already, or the file cannot be.
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
        world = _current()
        file = world.recorder.begin(file_path)
        try:
            world.engine.start_trace(file, mark_cycles)
            if _world is not world:  # A signal handler has shut down meanwhile.
                world.engine.stop_trace()
                raise NotInitializedError("shutdown() was called while start_timeline() ran")
        except BaseException:
            world.recorder.cancel()
            raise


def stop_timeline() -> None:
    """End this rank's part of the timeline; does nothing when none is being written.

    Where the ranks span several hosts, every rank calls it: their parts travel to rank 0.

    Raises:
        NotInitializedError: `init` was not called.
    """
    with _lock:
        _stop_timeline(_current())


def _stop_timeline(world: _World) -> None:
    world.engine.stop_trace()
    try:
        world.recorder.end(
            lambda data, name: gather_bytes(world.engine, data, name, timeout=_LONGEST_GATHERING)
        )
    except OSError as error:  # TimeoutError is one.
        print(f"hvdlite [{world.rank}] warning: no timeline: {error}", file=sys.stderr)
    except HvdliteError:
        pass  # The world has failed, and says so elsewhere; the part stays where it is.


def _install_hooks() -> None:
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    atexit.register(_leave_at_exit)
    previous = sys.excepthook

    def tell_peers_then_report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        previous(kind, error, trace)
        world = _world
        if world is not None and world.size > 1:
            world.engine.abort(_describe(world.rank, kind, error, trace))

    sys.excepthook = tell_peers_then_report


def _describe(
    this_rank: int, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> str:
    """Say what happened here in one line, for the error that the other ranks raise."""
    frames = traceback.extract_tb(trace)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = str(error).strip().splitlines()
    return f"rank {this_rank} raised {kind.__name__}: {text[0] if text else ''}{where}"[:2000]


def nccl_built() -> bool:
    """Say whether GPU tensors would travel by NCCL here; `hvdlite-run --doctor` says why not."""
    return gpu.works("NCCL") and gpu.works("CUDA driver")


def mpi_built() -> bool:
    """Say whether MPI is used: never; hvdlite brings its own data plane."""
    return False


def gloo_built() -> bool:
    """Say whether collectives run on CPUs without MPI, which is what scripts ask this for: yes."""
    return True


def mpi_enabled() -> bool:
    """Say whether this job runs over MPI: never."""
    return False


def gloo_enabled() -> bool:
    """Say whether this job runs without MPI: always."""
    return True


def mpi_threads_supported() -> bool:
    """Say whether any thread may submit collectives: always (the name is Horovod's)."""
    return True


def cuda_built() -> bool:
    """Say whether CUDA tensors can be reduced here: there is a driver and a device."""
    return gpu.works("CUDA driver")


def rocm_built() -> bool:
    """Say whether ROCm tensors can be reduced: no."""
    return False


def ccl_built() -> bool:
    """Say whether oneCCL is used: never."""
    return False


def ddl_built() -> bool:
    """Say whether IBM DDL is used: never."""
    return False
