"""`run_world`: the harness for tests of several processes (tests of hvdlite-run use `launcher`).

`run_world(4, body, 7)` starts four ranks as plain processes with the environment that hvdlite-run
would give them, calls `body(7)` in each, and returns the results:

    def body(count):
        from hvdlite import basics

        basics.init()
        ...
        return basics.rank() * count

    def test_ranks():
        assert [result.value for result in run_world(4, body, 7)] == [0, 7, 14, 21]

`body` is a function at the top of a test file. Every rank imports that file by its path. If the
file has a tuple PRELOAD at its top, the ranks start with these modules imported (see `forkserver`).
A world always ends: at its deadline, and when pytest ends the test, the ranks print their stacks
and are killed with all their children, and the test fails with everything that they wrote. The
test also fails if a world leaves processes or shared memory behind.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

import hvdlite
from forkserver import ForkedRank, fork_rank
from hvdlite.launch.hosts import place_as
from hvdlite.launch.process import (
    Worker,
    job_environment,
    job_mark,
    kill_processes,
    processes_with,
    start_worker,
)
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.store import Store
from patience import HANG

_WORKER_MAIN = Path(__file__).with_name("worker_main.py")
_SHM = Path("/dev/shm")
_DEADLINE = 240.0  # seconds; only a hang meets it, and pytest's limit comes later
_AFTER_FIRST_FAILURE = 15.0  # seconds that the other ranks get after an unexpected failure
_SETTLE = 20.0  # seconds for children and shared memory to disappear
_FOR_STACKS = 10.0  # seconds within which ranks that hang have printed their stacks
_SHOWN = 20_000  # A failure shows so many last characters of a rank's output.

Rank = Worker | ForkedRank
Environment = Mapping[str, str] | Callable[[int], Mapping[str, str]] | None


@dataclass(frozen=True)
class RankResult:
    """How one rank ended."""

    rank: int
    returncode: int  # It is -n if signal n killed the rank, as in `subprocess`.
    stdout: str
    stderr: str
    value: Any  # The body returned it; None if the body did not return.
    seconds: float  # So long it took from the start of the world to the end of the process.


def package_path() -> list[str]:
    """List the folders that a new Python needs on its path to import the same hvdlite."""
    folder = Path(hvdlite.__file__).resolve().parent.parent
    return [] if folder.is_relative_to(sys.prefix) else [str(folder)]


def base_environment() -> dict[str, str]:
    """Return the environment of a user who starts a job, without variables of a job or pytest."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HVDLITE_", "HOROVOD_", "PYTEST_"))
        and not name.endswith("_NUM_THREADS")
        and name not in ("RANK", "WORLD_SIZE")
    }
    # The ranks of many tests do nothing but print, which hvdlite-run would call an error.
    environment["HVDLITE_INDEPENDENT"] = "1"
    path = [*package_path(), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(path)
    return environment


def shm_entries() -> set[str]:
    """List the names in /dev/shm."""
    return {entry.name for entry in _SHM.iterdir()} if _SHM.is_dir() else set()


class World:
    """Running ranks; a context manager for tests that act on the ranks from outside."""

    def __init__(
        self,
        n: int,
        body: Callable[..., Any] | str,
        *arguments: Any,
        timeout: float = _DEADLINE,
        env: Environment = None,
        hosts: Sequence[int] | None = None,
        command: Sequence[str] | None = None,
        preload: Sequence[str] | None = None,
    ) -> None:
        """Start the ranks."""
        # `body` is a function at the top of a module, whose arguments travel pickled, or the source
        # of a script. `timeout` is in seconds; the world counts as hung after it. `env` has
        # variables for all ranks, or returns those of a rank. `hosts` has, by rank, the index of
        # the host that it acts as (HVDLITE_HOST_ID). `command` is a prefix of each rank's command,
        # such as ["ip", "netns", "exec", "a"]. `preload` has the modules with which ranks start,
        # instead of PRELOAD of the test file.
        self._folder = tempfile.TemporaryDirectory(prefix="hvdlite world ")
        self._path = Path(self._folder.name)
        self._shm_before = shm_entries()
        self._timeout = timeout
        of_file = () if isinstance(body, str) else body.__globals__.get("PRELOAD", ())
        self._preload = of_file if preload is None else preload
        self._workers: list[Rank] = []
        self._ended_at: dict[int, float] = {}
        self._left: list[str] = []
        (self._path / "task.pickle").write_bytes(_task(body, arguments))
        job = Job(secrets.token_bytes(32), secrets.token_bytes(16), epoch=0)
        self.job_id = job.job_id.hex()
        self.started_at = time.monotonic()
        self._store = Store.start(n, job)
        try:
            for placement in place_as([0] * n if hosts is None else hosts):
                own = dict(env(placement.rank) if callable(env) else env or {})
                if hosts is not None:
                    own = {"HVDLITE_HOST_ID": f"host{placement.host}", **own}
                environment = {
                    **base_environment(),
                    "OMP_NUM_THREADS": "1",
                    **job_environment(placement, job, self._store.address),
                    **own,
                }
                self._workers.append(self._start(placement.rank, command or (), environment))
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, prefix: Sequence[str], env: dict[str, str]) -> Rank:
        command = [*prefix, sys.executable, str(_WORKER_MAIN), str(self._path)]
        with (
            open(self._path / f"stdout.{rank}", "wb") as stdout,
            open(self._path / f"stderr.{rank}", "wb") as stderr,
        ):
            if self._preload and not prefix:
                return fork_rank(rank, self._preload, self._path, env, (stdout, stderr))
            return start_worker(rank, command, env, stdout=stdout, stderr=stderr)

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [worker.pid for worker in self._workers]

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank's own process (not to its children)."""
        os.kill(self._workers[rank].pid, number)

    def stderr(self, rank: int) -> str:
        """Read what a rank has written to stderr so far."""
        return (self._path / f"stderr.{rank}").read_text(errors="replace")

    def stdout(self, rank: int) -> str:
        """Read what a rank has written to stdout so far."""
        return (self._path / f"stdout.{rank}").read_text(errors="replace")

    def wait_for(self, rank: int, text: str, timeout: float = HANG) -> None:
        """Wait until a rank has written `text` to stdout."""
        deadline = time.monotonic() + timeout
        while True:
            # First: what a rank writes last may come between a look at the text and one at its end.
            running = self._workers[rank].look() is None
            if text in self.stdout(rank):
                return
            if not running or time.monotonic() > deadline:
                raise AssertionError(f"rank {rank} never wrote {text!r}\n{self._all_output()}")
            time.sleep(0.01)

    def wait(self, expect_failure: bool = False) -> list[RankResult]:
        """Wait for all ranks, check that nothing is left, and return their results."""
        # An AssertionError says that the deadline passed, that a rank failed (unless
        # `expect_failure`), or that the world left processes or shared memory behind.
        deadline = self.started_at + self._timeout
        hung = not self._wait_until(deadline, expect_failure)
        if hung:
            self._dump_stacks()
        self._left = [] if hung else self._leftovers()
        results = [self._result(worker) for worker in self._workers]
        self._end_processes()
        failed = [result.rank for result in results if result.returncode != 0]
        if hung:
            raise AssertionError(f"hung or too slow ({self._timeout} s)\n{self._all_output()}")
        if failed and not expect_failure:
            raise AssertionError(f"ranks {failed} failed\n{self._all_output()}")
        if self._left:
            raise AssertionError(f"left behind: {self._left}\n{self._all_output()}")
        return results

    def _wait_until(self, deadline: float, expect_failure: bool) -> bool:
        while len(self._ended_at) < len(self._workers):
            now = time.monotonic()
            if now > deadline:
                return False
            for worker in self._workers:
                ending = worker.look()
                if ending is not None and worker.number not in self._ended_at:
                    self._ended_at[worker.number] = now
                    if not ending.ok and not expect_failure:
                        deadline = min(deadline, now + _AFTER_FIRST_FAILURE)
            time.sleep(0.002)
        return True

    def _dump_stacks(self) -> None:
        """Let the ranks print their stacks, and wait for those that can."""
        hung = [worker for worker in self._workers if worker.look() is None]
        before = {worker.number: len(self.stderr(worker.number)) for worker in hung}
        for worker in hung:
            for number in (signal.SIGCONT, signal.SIGUSR1):
                os.kill(worker.pid, number)
        deadline = time.monotonic() + _FOR_STACKS
        # The main thread's stack comes last, and ends in the module of the rank's program.
        while time.monotonic() < deadline and any(
            worker.look() is None
            and "in <module>" not in self.stderr(worker.number)[before[worker.number] :]
            for worker in hung
        ):
            time.sleep(0.05)

    def _leftovers(self) -> list[str]:
        """List what the ranks left, after a moment in which it may disappear."""
        # A rank that was killed could not end its children, so this kills them first.
        for worker in self._workers:
            if worker.ending is not None and worker.ending.by_signal:
                worker.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + _SETTLE
        while True:
            ours = {*processes_with(job_mark(self.job_id)), *_in_sessions_of(self._workers)}
            left = [f"process {pid}" for pid in sorted(ours)]
            left += [f"/dev/shm/{name}" for name in sorted(self._own_shm_entries())]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.02)

    def _own_shm_entries(self) -> set[str]:
        """Return new names in /dev/shm with "hvdlite" or the process id of a rank in them."""
        marks = ["hvdlite", *map(str, self.pids)]
        return {
            name for name in shm_entries() - self._shm_before if any(mark in name for mark in marks)
        }

    def _result(self, worker: Rank) -> RankResult:
        ending = worker.look()
        code = -signal.SIGKILL if ending is None else ending.status
        if ending is not None and ending.by_signal:
            code = -ending.status
        saved = self._path / f"value.{worker.number}"
        return RankResult(
            rank=worker.number,
            returncode=code,
            stdout=self.stdout(worker.number),
            stderr=self.stderr(worker.number),
            value=pickle.loads(saved.read_bytes()) if saved.exists() else None,
            seconds=self._ended_at.get(worker.number, time.monotonic()) - self.started_at,
        )

    def _all_output(self) -> str:
        parts = []
        for worker in self._workers:
            for name in ("stdout", "stderr"):
                text = (self._path / f"{name}.{worker.number}").read_text(errors="replace")
                if text:
                    state = "running" if worker.ending is None else str(worker.ending)
                    parts.append(f"--- rank {worker.number} ({state}) {name}:\n{text[-_SHOWN:]}")
        return "\n".join(parts)

    def _end_processes(self) -> None:
        for worker in self._workers:
            worker.send_signal(signal.SIGKILL)
        kill_processes(job_mark(self.job_id))

    def close(self) -> None:
        """Kill all processes of the world, and remove its files."""
        self._end_processes()
        for worker in self._workers:
            worker.reap()
        self._workers = []
        self._store.close()
        self._folder.cleanup()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the world; if pytest ends the test, show first what the ranks are doing."""
        if isinstance(error, pytest.fail.Exception):
            self._dump_stacks()
            print(self._all_output(), file=sys.stderr)
        self.close()


def _in_sessions_of(workers: Sequence[Rank]) -> set[int]:
    """List the processes in the ranks' sessions, without ranks that have ended."""
    leaders = {worker.pid for worker in workers}
    ended = {worker.pid for worker in workers if worker.ending is not None}
    found = set()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and int(name) not in ended and os.getsid(int(name)) in leaders:
                found.add(int(name))
        except ProcessLookupError:
            continue
    return found


def _task(body: Callable[..., Any] | str, arguments: Sequence[Any]) -> bytes:
    if isinstance(body, str):
        return pickle.dumps({"source": body, "function": None, "args": b""})
    place_of = (body.__module__, body.__code__.co_filename, body.__qualname__)
    if "<locals>" in body.__qualname__:
        raise TypeError(f"{body.__qualname__} must be at the top of its file")
    arguments_bytes = pickle.dumps(tuple(arguments))
    return pickle.dumps({"source": None, "function": place_of, "args": arguments_bytes})


def run_world(
    n: int,
    body: Callable[..., Any] | str,
    *arguments: Any,
    timeout: float = _DEADLINE,
    env: Environment = None,
    args: Sequence[Any] = (),
    hosts: Sequence[int] | None = None,
    expect_failure: bool = False,
    preload: Sequence[str] | None = None,
) -> list[RankResult]:
    """Run `body(*arguments, *args)` on `n` ranks and return their results; see `World`."""
    how: dict[str, Any] = {"timeout": timeout, "env": env, "hosts": hosts, "preload": preload}
    with World(n, body, *arguments, *args, **how) as world:
        return world.wait(expect_failure)
