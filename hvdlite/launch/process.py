"""Start the ranks of a job on this host, watch them, and end them.

A *worker* is the process of one rank. Every worker leads a session and a process group of its own.
So a signal to the group also reaches the worker's children, and the terminal's Ctrl-C reaches only
the launcher. Until a worker that has ended is reaped, its process id stays in use, so that a signal
to its group cannot reach a foreign process. It is reaped when the job is over; in an elastic job,
which may see many workers, as soon as its group has been killed. A rank's child may have a session
of its own, but it inherits the rank's variables, by which all processes of a job are found.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from hvdlite.launch import shim
from hvdlite.launch.hosts import Placement
from hvdlite.rendezvous.environment import EXIT_STOPPED, FIRST_PORT, PORTS
from hvdlite.rendezvous.handshake import Job

STDOUT = 1  # STDOUT and STDERR are also descriptors of the launcher.
STDERR = 2
RESULT = 3  # This one and the next one are not descriptors.
LIVE = 4  # samples of the rank for a view of the job; see `hvdlite.launch.output`
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
_GIVE_UP_AFTER = 5.0  # seconds for which new processes are killed
_LONGEST_EXEC = 1.0  # seconds that a look at all processes waits for those that are inside exec
_KERNEL_THREAD = 0x200000  # PF_KTHREAD in the flags of /proc/PID/stat
# Where hvdlite-run chose the address: the ranks then meet by hvdlite's store (`hvdlite_autoload`).
_OURS = "HVDLITE_TORCH_MASTER"


@dataclass(frozen=True)
class Ending:
    status: int  # the exit status, or the number of the signal that killed the process
    by_signal: bool  # whether a signal killed the process
    # If the launcher knows more than the status: what happened, such as a lost connection.
    why: str = ""
    oom_killed: bool = False  # whether the out-of-memory killer killed a process on its host

    @property
    def ok(self) -> bool:
        """Whether the rank has done all of its work."""
        return self.status == 0 and not self.by_signal

    @property
    def stopped(self) -> bool:
        """Whether the rank ended because it was asked to stop, and wants to be run again."""
        return self.status == EXIT_STOPPED and not self.by_signal

    @property
    def well(self) -> bool:
        """Whether the rank has not failed: it is done, or has stopped because it was asked to."""
        return self.ok or self.stopped

    @property
    def code(self) -> int:
        """The exit status that a shell would report: 128 + n for signal n."""
        return 128 + self.status if self.by_signal else self.status

    def __str__(self) -> str:
        if self.why:
            return self.why
        if not self.by_signal:
            return f"exit status {self.status}"
        try:
            return f"killed by {signal.Signals(self.status).name}"
        except ValueError:
            return f"killed by signal {self.status}"


class Worker:
    """The process of one rank on this host. Used by the loop's thread."""

    lingers = False  # all processes that it leaves are on this host, where the loop finds them

    def __init__(
        self,
        number: int,
        process: subprocess.Popen[bytes],
        tie: int,
        pipes: Mapping[int, int],
    ) -> None:
        """Take over a process that leads its own group, and its pipes by sink.

        The group lives as long as the descriptor `tie`: it is killed when this is closed.
        """
        self.number = number  # the rank; in an elastic job, the number of the worker
        self._tie = tie
        self._pipes = dict(pipes)
        self.pid = process.pid
        self.process = process
        self.pidfd = _watch(process)
        self.ending: Ending | None = None

    @property
    def host(self) -> str:
        return socket.gethostname()

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
    number: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    stdin: bytes | None = None,
    live: bool = False,
) -> Worker:
    """Start one rank with exactly this environment; its group dies when this process dies.

    Its output goes through pipes of the worker, or to `stdout` and `stderr`. With `stdin`, the
    bytes that it reads there, the rank also gets a pipe for its result, whose descriptor is in
    HVDLITE_RESULT_FD. With `live` it gets one for samples of what it does, in HVDLITE_LIVE_FD.
    """
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
            source = nameless_file("hvdlite-stdin")
            given.callback(os.close, source)
            with open(source, "wb", closefd=False) as file:
                file.write(stdin)
            os.lseek(source, 0, os.SEEK_SET)
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
        worker = Worker(number, process, tie, pipes)
        kept.pop_all()
    return worker


def _kill_at_hangup(pipe: int, group: int) -> None:
    """Have the kernel kill a group when the other end of a pipe is closed."""
    # The signal of asynchronous input, which usually is SIGIO, may be any. Nobody writes to the
    # pipe, so it comes when this process has died. The rank's own end keeps the order alive.
    # Where a sandbox knows no such signal, the rank still dies with this process (see shim).
    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -group)
        fcntl.fcntl(pipe, _SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)


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


def _enlarge(pipe: int) -> None:
    """Give a pipe more room than the usual 64 KiB, if the kernel lets this user."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, _SETPIPE_SIZE, _PIPE_BYTES)


def nameless_file(name: str) -> int:
    """Make an empty file without a name, and return its descriptor, which exec closes."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def output_files(folder: str | Path, rank: int) -> tuple[int, int]:
    """Open `folder/rank.N/stdout` and `stderr` as empty files; the caller owns the descriptors."""
    own = Path(folder, f"rank.{rank}")
    own.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    return os.open(own / "stdout", flags, 0o644), os.open(own / "stderr", flags, 0o644)


def job_environment(placement: Placement, job: Job, rendezvous: str) -> dict[str, str]:
    """Build the variables that tell a rank its numbers and the address of the store."""
    numbers = {name.upper(): str(value) for name, value in asdict(placement).items()}
    node = numbers.pop("HOST")
    return {
        **{f"HVDLITE_{name}": value for name, value in numbers.items()},
        **{f"HOROVOD_{name}": value for name, value in numbers.items()},
        "HVDLITE_NODE": node,
        "HVDLITE_RENDEZVOUS": rendezvous,
        "HVDLITE_TOKEN": job.token.hex(),
        "HVDLITE_JOB_ID": job.job_id.hex(),
        "HVDLITE_EPOCH": str(job.epoch),
        "PYTHONUNBUFFERED": "1",
    }


def inherited_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Build the environment of a rank that inherits that of this process, and gets `more`."""
    return {**os.environ, **more}


def thread_caps(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """Build the variables that limit the thread pools of numeric libraries."""
    # With OMP_NUM_THREADS the number is the user's choice, and most libraries follow that variable.
    if "OMP_NUM_THREADS" in environment:
        return {}
    return {name: str(threads) for name in _THREAD_VARIABLES if name not in environment}


def kept_memory(environment: Mapping[str, str]) -> dict[str, str]:
    """Build the variables by which glibc's allocator keeps memory, unless the user set it up."""
    if "GLIBC_TUNABLES" in environment or any(name in environment for name in _KEPT_MEMORY):
        return {}
    return dict(_KEPT_MEMORY)


def torchrun_environment(placement: Placement, job_id: bytes) -> dict[str, str]:
    """Build the variables that tell torch.distributed, and the trainers above it, their ranks.

    Accelerate, transformers, Lightning and ignite read what torchrun sets. Without these variables
    they take a rank of several for the only process, and train alone. RANK and its like are set in
    any case, since one value for all ranks cannot be right; MASTER_ADDR and MASTER_PORT (see
    `torch_master`) are the user's, if both are there. Elastic jobs and jobs with parameter servers
    have no such variables: their ranks change, and torch.distributed's do not.
    """
    return {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_size),
        "GROUP_RANK": str(placement.host),
        "TORCHELASTIC_RUN_ID": f"hvdlite-{job_id.hex()}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def torch_master(
    environment: Mapping[str, str], host: str, here: bool, job_id: bytes
) -> dict[str, str]:
    """Choose where rank 0 serves torch.distributed's store on its host; return it as variables.

    `here` says whether that is this host, whose free ports are known.
    """
    names = ("MASTER_ADDR", "MASTER_PORT")
    if all(environment.get(name) for name in names):
        return {name: environment[name] for name in names}
    drawn = int.from_bytes(job_id[:4], "little")
    ports = [FIRST_PORT + (drawn + step) % PORTS for step in range(PORTS)]
    port = next((port for port in ports if not here or _is_free(host, port)), ports[0])
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port), _OURS: f"{host}:{port}"}


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError:
        return False
    return True


def without_outer_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a user's variables without those that an outer hvdlite-run has set for torch."""
    if _OURS not in environment:
        return dict(environment)
    numbers = torchrun_environment(Placement(0, 1, 0, 1, 0, 1, 0), b"")
    theirs = {*numbers, "MASTER_ADDR", "MASTER_PORT", _OURS}
    return {name: value for name, value in environment.items() if name not in theirs}


def processes_with(*variables: str) -> list[int]:
    """List the live processes that were started with all `variables` ("NAME=value") set."""
    # Zombies are not listed, because they have no environment. Processes of other users are not
    # listed either.
    wanted = {variable.encode() for variable in variables}
    # Nor are any where this process can open no more files: a job that runs does not end for that.
    give_up = time.monotonic() + _LONGEST_EXEC
    found: list[int] = []
    try:
        names = os.listdir("/proc")
    except OSError:
        return found
    for name in names:
        if not name.isdigit():
            continue
        try:
            found_there = _environment(name, give_up)
        except OSError:
            continue  # The process has ended, or belongs to another user.
        if wanted.issubset(found_there):
            found.append(int(name))
    return found


def _environment(pid: str, give_up: float) -> list[bytes]:
    """Return the variables of a process; wait until `give_up` if it is inside exec."""
    text = _read(pid, "environ")
    if not text:
        while _is_in_exec(pid) and time.monotonic() < give_up:
            time.sleep(0.001)
        text = _read(pid, "environ")
    return text.split(b"\0")


def _is_in_exec(pid: str) -> bool:
    """Return whether a process has left its old program, and its new one has no environment yet."""
    # `subprocess.Popen` returns before that: it waits until exec closes a pipe, which comes
    # earlier.
    fields = _read(pid, "stat").rpartition(b")")[2].split()  # The name may contain anything.
    state, flags, environment_ends = fields[0], int(fields[6]), fields[48]
    has_program = state not in (b"Z", b"X") and not flags & _KERNEL_THREAD
    return has_program and environment_ends == b"0"


def _read(pid: str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def job_mark(job_id: str) -> str:
    """Return the variable that every process of a job has."""
    return f"HVDLITE_JOB_ID={job_id}"


def kill_processes(*variables: str) -> None:
    """Kill the processes that `processes_with` lists, and those that they start meanwhile."""
    give_up = time.monotonic() + _GIVE_UP_AFTER
    killed: set[int] = set()
    while time.monotonic() < give_up:
        found = [pid for pid in processes_with(*variables) if pid not in killed]
        if not found:
            break
        signal_processes(found, signal.SIGKILL)
        killed.update(found)


def signal_processes(processes: list[int], number: int) -> None:
    """Send a signal to processes that may have ended."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group that may be empty."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
