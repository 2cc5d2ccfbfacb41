"""Start the ranks of a job on this host, watch them, and end them.

A *worker* is the process of one rank. Every worker leads a session and a process group of its own.
So a signal to the group also reaches the worker's children, and the terminal's Ctrl-C reaches only
the launcher. Until a worker that has ended is reaped, its process id stays in use, so that a signal
to its group cannot reach a foreign process. It is reaped when the job is over; in an elastic job,
which may see many workers, as soon as its group has been killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hvdlite.launch.process import shim
from hvdlite.launch.process.ending import Ending
from hvdlite.launch.process.nameless import nameless_file
from hvdlite.launch.process.placement import Placement
from hvdlite.launch.process.processes import signal_group, signal_processes
from hvdlite.launch.process.sinks import LIVE, RESULT, STDERR, STDOUT
from hvdlite.rendezvous.handshake import Job

_SETSIG = 10  # F_SETSIG; in fcntl only since Python 3.11
_SETPIPE_SIZE = 1031  # F_SETPIPE_SZ; in fcntl only since Python 3.10.5
_PIPE_BYTES = 1 << 20
_LONGEST_DEATH = 1.0  # seconds that a killed process may take to disappear
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
# Of glibc's allocator, which otherwise gives the gradients' memory back to the system in every step
# and takes it again, zeroed page by page. Up to 32 MiB, the most that it accepts, a tensor lies on
# the heap, and the heap's free end is given back from 8 GiB on.
_KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
}


def job_environment(placement: Placement, job: Job, rendezvous: str) -> dict[str, str]:
    """Build the variables that tell a rank its numbers and the address of the store."""
    numbers = {
        "RANK": placement.rank,
        "SIZE": placement.size,
        "LOCAL_RANK": placement.local_rank,
        "LOCAL_SIZE": placement.local_size,
        "CROSS_RANK": placement.cross_rank,
        "CROSS_SIZE": placement.cross_size,
    }
    environment = {f"HVDLITE_{name}": str(value) for name, value in numbers.items()}
    environment["HVDLITE_NODE"] = str(placement.host)
    environment.update({f"HOROVOD_{name}": str(value) for name, value in numbers.items()})
    environment.update(
        HVDLITE_RENDEZVOUS=rendezvous,
        HVDLITE_TOKEN=job.token.hex(),
        HVDLITE_JOB_ID=job.job_id.hex(),
        HVDLITE_EPOCH=str(job.epoch),
        PYTHONUNBUFFERED="1",
    )
    return environment


def inherited_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Build the environment of a rank that inherits that of this process, and gets `more`."""
    return {**os.environ, **more}


def thread_caps(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """Build the variables that limit the thread pools of numeric libraries."""
    # Returns nothing if the user set OMP_NUM_THREADS: then the number of threads is the user's
    # choice, and most libraries follow that variable unless their own is set.
    if "OMP_NUM_THREADS" in environment:
        return {}
    return {name: str(threads) for name in _THREAD_VARIABLES if name not in environment}


def kept_memory(environment: Mapping[str, str]) -> dict[str, str]:
    """Build the variables by which glibc's allocator keeps memory from step to step."""
    # Returns nothing if the user set up the allocator.
    if "GLIBC_TUNABLES" in environment or any(name in environment for name in _KEPT_MEMORY):
        return {}
    return dict(_KEPT_MEMORY)


class Worker:
    """The process of one rank on this host. Used by the loop's thread."""

    def __init__(
        self,
        placement: Placement,
        process: subprocess.Popen[bytes],
        tie: int,
        pipes: Mapping[int, int] | None = None,
        number: int | None = None,
    ) -> None:
        """Take over a process that leads its own group, and its pipes by sink."""
        # `tie` is a descriptor with which the group lives: it is killed when this is closed.
        # `number` is the worker's number in an elastic job; by default the rank.
        self.placement = placement
        self.number = placement.rank if number is None else number
        self._tie = tie
        self._pipes = dict(pipes or {})
        self.pid = process.pid
        self.process = process
        self.pidfd = _watch(process)
        self.ending: Ending | None = None

    @property
    def rank(self) -> int:
        """The rank in the job."""
        return self.placement.rank

    @property
    def host(self) -> str:
        """The name of the host, for messages."""
        return socket.gethostname()

    @property
    def lingers(self) -> bool:
        """False: all processes that it leaves are on this host, where the loop finds them."""
        return False

    def take_pipes(self) -> dict[int, int]:
        """Hand over the read ends of its output, by sink; the caller owns them."""
        pipes, self._pipes = self._pipes, {}
        return pipes

    def look(self) -> Ending | None:
        """Return how the worker ended, None while it runs; this does not reap it."""
        if self.ending is None:
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                by_signal = info.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                self.ending = Ending(info.si_status, by_signal)
        return self.ending

    def send_signal(self, number: int) -> None:
        """Send a signal to the worker; SIGKILL goes to its group, which may outlive it."""
        # The worker may want to finish a step when it is asked to end, and needs its children.
        if number == signal.SIGKILL:
            signal_group(self.pid, number)
        else:
            signal_processes([self.pid], number)

    def reap(self, at_end: bool = False) -> str | None:
        """Kill what is left of the group, and reap the worker; complain if it does not die."""
        self.look()
        self.send_signal(signal.SIGKILL)
        for pipe in (*self.take_pipes().values(), self._tie, self.pidfd):
            os.close(pipe)
        try:
            self.process.wait(_LONGEST_DEATH)
        except subprocess.TimeoutExpired:  # It hangs inside a driver or a dead file system.
            return f"rank {self.number} (pid {self.pid}) cannot be killed"
        return None


def start_worker(
    placement: Placement,
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    stdin: bytes | None = None,
    number: int | None = None,
    live: bool = False,
) -> Worker:
    """Start one rank with exactly this environment; its group dies when this process dies."""
    # `stdout` and `stderr` say where its output goes; by default through pipes of the worker.
    # `stdin` says what the rank reads from its stdin; by default it has none. With `stdin` the rank
    # also gets a pipe for its result, whose descriptor is in HVDLITE_RESULT_FD.
    # `number` is the worker's number in an elastic job; by default the rank.
    # `live` says whether the rank gets a pipe for samples of what it does, in HVDLITE_LIVE_FD.
    # Raises OSError if the process cannot be started.
    pipes: dict[int, int] = {}
    with contextlib.ExitStack() as kept, contextlib.ExitStack() as given:

        def pipe() -> tuple[int, int]:
            read, write = os.pipe2(os.O_CLOEXEC)
            kept.callback(os.close, read)
            given.callback(os.close, write)
            return read, write

        own_tie, tie = os.pipe2(os.O_CLOEXEC)
        kept.callback(os.close, tie)
        given.callback(os.close, own_tie)
        passed = [own_tie]
        source: int | IO[Any] = subprocess.DEVNULL
        if stdin is not None:
            pipes[RESULT], write = pipe()
            source = _file_of(stdin)
            given.callback(os.close, source)
            environment = {**environment, "HVDLITE_RESULT_FD": str(write)}
            passed.append(write)
        if live:
            pipes[LIVE], write = pipe()
            environment = {**environment, "HVDLITE_LIVE_FD": f"{write}:{os.fstat(write).st_ino}"}
            passed.append(write)
        if stdout is None:
            pipes[STDOUT], stdout = pipe()
            _enlarge(stdout)
        if stderr is None:
            pipes[STDERR], stderr = pipe()
            _enlarge(stderr)
        process = subprocess.Popen(
            shim.tied(command),
            env=dict(environment),
            stdin=source,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            pass_fds=passed,
        )
        _kill_at_hangup(own_tie, process.pid)
        worker = Worker(placement, process, tie, pipes, number)
        kept.pop_all()
    return worker


def _kill_at_hangup(pipe: int, group: int) -> None:
    """Have the kernel kill a group when the other end of a pipe is closed."""
    # The signal of asynchronous input, which usually is SIGIO, may be any. Nobody writes to the
    # pipe, so it comes when this process has died. The rank's own end keeps the order alive.
    try:
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -group)
        fcntl.fcntl(pipe, _SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    except OSError:
        pass  # A sandbox knows no such signal: the rank still dies with this process (see shim).


def _watch(process: subprocess.Popen[bytes]) -> int:
    """Return a descriptor that tells of the end of a process; end the process if there is none."""
    try:
        return os.pidfd_open(process.pid)
    except OSError as error:
        process.kill()
        process.wait()
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise OSError(
            f"cannot watch a process: pidfd_open: {error.strerror}; it needs Linux 5.3, and a "
            "container whose seccomp profile lets it pass"
        ) from error


def _file_of(content: bytes) -> int:
    """Make a file without a name, and return its descriptor, positioned at the start."""
    fd = nameless_file("hvdlite-stdin")
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _enlarge(pipe: int) -> None:
    """Give a pipe more room than the usual 64 KiB, if the kernel lets this user."""
    try:
        fcntl.fcntl(pipe, _SETPIPE_SIZE, _PIPE_BYTES)
    except OSError:
        pass


def output_files(folder: Path, rank: int) -> tuple[int, int]:
    """Open `folder/rank.N/stdout` and `stderr` as empty files; the caller owns the descriptors."""
    own = folder / f"rank.{rank}"
    own.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    return os.open(own / "stdout", flags, 0o644), os.open(own / "stderr", flags, 0o644)
