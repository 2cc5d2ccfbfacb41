"""Read this rank's numbers, and the address of the store, from the process's environment.

Besides hvdlite_autoload, this is the only module of a rank's Python code that reads environment
variables. (The core reads its knobs in csrc/base/config.cc, the launcher what hvdlite/launch says.)
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdlite.errors import ArgumentError, BootstrapError
from hvdlite.rendezvous.handshake import EPOCHS, JOB_ID_BYTES, TOKEN_BYTES
from hvdlite.rendezvous.launchers import (
    LauncherEnvironment,
    Variables,
    detect_launcher,
    refuse_other_kind,
    refuse_to_be_alone,
    service_numbers,
)

EXIT_STOPPED = 75
"""The exit status of a rank that was asked to stop, has saved, and wants to be run again.

It is EX_TEMPFAIL of sysexits.h.
"""

_TOKEN = "HVDLITE_TOKEN"
FIRST_PORT, PORTS = 20000, 10000  # below the range from which the kernel chooses ports itself

_GUARD = (
    'In the script, put all that is not a definition under `if __name__ == "__main__":`, so that '
    "it does not run in the worker processes of a DataLoader"
)

_imitates_horovod = False
_kept_token: str | None = None
_given: WorkerEnvironment | None = None
_live_pipe: tuple[int, int] | None = None  # its descriptor, and the process that may write to it


@dataclass(frozen=True)
class WorkerEnvironment:
    """What this process knows of its job before it connects to the other ranks."""

    # The default is a world of one.

    rank: int = 0
    size: int = 1
    # The launcher's numbers of this rank within its host, of the host's ranks, and of the host;
    # None if it does not tell.
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    # The address of the store, or of an elastic job's registrar: "unix:NAME" or "host:port".
    rendezvous: str | None = None
    token: bytes = field(default=b"", repr=False)  # the job's secret, 32 bytes
    job_id: bytes = bytes(JOB_ID_BYTES)  # the public number of the job, 16 bytes
    epoch: int = 0  # HVDLITE_EPOCH: ranks of different starts of a job refuse each other
    host_id: str | None = None  # the host's identity, so that one machine can act as several
    # The network interfaces at which other hosts reach this one; if empty, that of the route to the
    # store. Or the IP address at which this process listens for them.
    interfaces: tuple[str, ...] = ()
    bind_address: str | None = None
    launcher: str = "none"  # the name of the launcher, for messages
    serves_store: bool = False  # its launcher does not: rank 0 under torchrun, mpirun, srun
    start_timeout: float = 60.0  # seconds that the ranks have to find each other; 0 means no limit
    elastic: bool = False  # rank and size are then those that the launcher planned
    elastic_worker: int = 0  # the number of this worker, which is never used again
    # This worker was started after the first ones: in an elastic job after the first epoch was
    # formed, in one with parameter servers for a worker that died.
    joiner: bool = False
    servers: int = 0  # how many of the first ranks are parameter servers
    # The number of this process in a job with parameter servers: its rank, or one never used before
    # if it was started for a worker that died.
    process: int = 0
    # Seconds without a word after which a worker of an elastic job counts as dead.
    heartbeat: float = 3.0


def take_token() -> None:
    """Move the job's secret from the environment, which children inherit, into this module."""
    global _kept_token
    _kept_token = os.environ.pop(_TOKEN, None) or _kept_token


def take_live_pipe() -> None:
    """Keep the pipe for this rank's samples from its children: those of exec and those of fork."""
    # HVDLITE_LIVE_FD is "descriptor:inode". A program between the launcher and this one may have
    # closed the descriptor, and its number may then stand for anything.
    global _live_pipe
    descriptor, _, inode = os.environ.pop("HVDLITE_LIVE_FD", "").partition(":")
    if not (descriptor.isdecimal() and inode.isdecimal()):
        return
    try:
        found = os.fstat(int(descriptor))
        if found.st_ino == int(inode) and stat.S_ISFIFO(found.st_mode):
            os.set_inheritable(int(descriptor), False)
            _live_pipe = int(descriptor), os.getpid()
    except OSError:
        pass  # It was closed.


def live_pipe() -> int | None:
    """Return the pipe to which this process writes samples of itself; None if nobody wants them."""
    return _live_pipe[0] if _live_pipe is not None and _live_pipe[1] == os.getpid() else None


def report_file() -> Path | None:
    path = os.environ.get("HVDLITE_REPORT")
    if path and "HVDLITE_JOB_ID" in os.environ:
        raise ArgumentError(
            f"HVDLITE_REPORT is for other launchers; give hvdlite-run --report {path}, which knows "
            "all processes"
        )
    return Path(path) if path else None


def host_name() -> str:
    """Return the name of this host: that by which the launcher reaches it, or its own."""
    return os.environ.get("HVDLITE_HOSTNAME") or socket.gethostname()


def assign_rank(worker: WorkerEnvironment | None) -> None:
    """Have `detect` take this assignment instead of a launcher's variables; None: no more."""
    # For programs that call a training function in a process that no launcher has started as a
    # rank. No variable is set, so the programs that this process starts do not inherit it.
    global _given
    _given = None if worker is None else with_own_settings(worker)


def with_own_settings(worker: WorkerEnvironment) -> WorkerEnvironment:
    """Complete an assignment by what this process's variables say of its host and its timeout."""
    # The variables count where the assignment has the default.
    variables = Variables(os.environ)
    patient = worker.start_timeout == WorkerEnvironment.start_timeout
    return replace(
        worker,
        host_id=worker.host_id or variables.get("HVDLITE_HOST_ID"),
        interfaces=worker.interfaces or _interfaces(variables),
        bind_address=worker.bind_address or _bind_address(variables),
        start_timeout=_start_timeout(variables) if patient else worker.start_timeout,
    )


def allow_pickle() -> bool:
    return os.environ.get("HVDLITE_ALLOW_PICKLE", "1") != "0"


def checks_nan() -> bool:
    return os.environ.get("TORCH_DIST_NAN_CHECK") == "1"


def timeline_parts() -> Path | None:
    """Return the folder whose parts of timelines hvdlite-run merges; None without hvdlite-run."""
    folder = os.environ.get("HVDLITE_TIMELINE_PARTS")
    return Path(folder) if folder else None


def detect(
    environment: Mapping[str, str] | None = None, with_servers: bool = False
) -> WorkerEnvironment:
    """Recognise hvdlite-run or another launcher; without a launcher, return a world of one."""
    # `environment` has the variables to read; by default those of this process, unless
    # `assign_rank` has given it one. `with_servers` says whether the script asks for parameter
    # servers, or for a world of ranks.
    given = _given if environment is None else None
    variables = Variables(os.environ if environment is None else environment)
    found = _recognise(variables, with_servers) if given is None else given
    refuse_other_kind(found.servers, found.rank, with_servers)
    return found


def _recognise(variables: Variables, with_servers: bool) -> WorkerEnvironment:
    if "HVDLITE_RANK" in variables or "HVDLITE_SIZE" in variables:
        if "HVDLITE_JOB_ID" in variables or variables.number("HVDLITE_SIZE") <= 1:
            return _from_hvdlite_run(variables)
        variables.text("HVDLITE_RENDEZVOUS")  # Rank 0 serves the store there.
        return _from_launcher(variables, _own_numbers(variables, "a script of your own"))
    found = detect_launcher(variables, with_servers)
    if found is not None:
        return _from_launcher(variables, found)
    refuse_to_be_alone(variables)
    return WorkerEnvironment(host_id=variables.get("HVDLITE_HOST_ID"))


def surroundings() -> WorkerEnvironment:
    """Return what holds for every world that this process can be in, with or without a launcher."""
    # That is the token, which may be empty, and what `with_own_settings` reads.
    if _given is not None and _given.token:
        token = _given.token
    else:
        text = os.environ.get(_TOKEN) or _kept_token
        token = Variables({}).secret(_TOKEN, text, TOKEN_BYTES) if text else b""
    own = WorkerEnvironment(token=token, host_id=None if _given is None else _given.host_id)
    return with_own_settings(own)


def _from_hvdlite_run(variables: Variables) -> WorkerEnvironment:
    worker = _alone(variables, _own_numbers(variables, "hvdlite-run"))
    elastic = variables.flag("HVDLITE_ELASTIC")
    if worker.size == 1 and not elastic:
        return worker
    rank = worker.rank
    worker = replace(worker, **service_numbers(variables, rank, worker.size))
    _refuse_second_run(rank)
    token = variables.get(_TOKEN) or _kept_token
    variables.text("HVDLITE_RENDEZVOUS")
    if token is None:
        raise BootstrapError(
            f"{_TOKEN} is missing: this process is a child of rank {rank}, and the children of a "
            f"rank do not get the secret of its job; call hvd.init() in the rank alone. {_GUARD}"
        )
    if elastic:
        worker = replace(
            worker,
            elastic=True,
            elastic_worker=variables.number("HVDLITE_WORKER"),
            joiner=variables.flag("HVDLITE_JOINER"),
            heartbeat=variables.seconds("HVDLITE_ELASTIC_HEARTBEAT", worker.heartbeat),
        )
    return replace(
        worker,
        rendezvous=variables.address("HVDLITE_RENDEZVOUS"),
        token=variables.secret(_TOKEN, token, TOKEN_BYTES),
        job_id=variables.secret("HVDLITE_JOB_ID", variables.get("HVDLITE_JOB_ID"), JOB_ID_BYTES),
        epoch=_epoch(variables),
        start_timeout=_start_timeout(variables),
    )


def _refuse_second_run(rank: int) -> None:
    """Raise in a child of multiprocessing that runs the script of its parent again."""
    # While such a child imports the script, multiprocessing marks the process as `_inheriting`.
    process = sys.modules.get("multiprocessing.process")  # Such a child has imported it.
    if process is not None and getattr(process.current_process(), "_inheriting", False):
        raise BootstrapError(
            f"this process is a child of rank {rank} that runs the script again "
            f"(multiprocessing does, and a DataLoader with workers). {_GUARD}"
        )


def _own_numbers(variables: Variables, launcher: str) -> LauncherEnvironment:
    """Read the variables that hvdlite-run sets, or a user's own script instead of it."""
    size = variables.number("HVDLITE_SIZE")
    return LauncherEnvironment(
        launcher=launcher,
        names=("HVDLITE_RANK", "HVDLITE_SIZE"),
        # HVDLITE_SIZE=1 alone insists on a world of one, whatever other variables say.
        rank=variables.number("HVDLITE_RANK", 0 if size == 1 else None),
        size=size,
        job="",
        local_rank=variables.optional_number("HVDLITE_LOCAL_RANK"),
        local_size=variables.optional_number("HVDLITE_LOCAL_SIZE"),
        node=variables.optional_number("HVDLITE_NODE"),
    )


def _alone(variables: Variables, found: LauncherEnvironment) -> WorkerEnvironment:
    """Return what a rank knows that does not have to meet others."""
    return WorkerEnvironment(
        rank=found.rank,
        size=found.size,
        local_rank=found.local_rank,
        local_size=found.local_size,
        node=found.node,
        host_id=variables.get("HVDLITE_HOST_ID"),
        interfaces=_interfaces(variables),
        launcher=found.launcher,
    )


def _interfaces(variables: Variables) -> tuple[str, ...]:
    own, horovods = "HVDLITE_NETWORK_INTERFACES", "HOROVOD_GLOO_IFACE"
    names = (variables.get(own) or variables.get(horovods) or "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def _bind_address(variables: Variables) -> str | None:
    """Read the address at which this process listens: one of its host, not all of them."""
    value = variables.get("HVDLITE_BIND_ADDRESS")
    if value is None:
        return None
    try:
        if not ipaddress.ip_address(value).is_unspecified:
            return value
        why = "it stands for all addresses, which strangers may reach"
    except ValueError:
        why = "it is not an IP address"
    raise BootstrapError(
        f"HVDLITE_BIND_ADDRESS={value} cannot be used: {why}; give an IP address of this host"
    )


def _start_timeout(variables: Variables) -> float:
    own, horovods = "HVDLITE_START_TIMEOUT", "HOROVOD_START_TIMEOUT"
    return variables.seconds(own if own in variables else horovods, 60.0)


def _epoch(variables: Variables, default: int = 0) -> int:
    """Read the number that cluster software gives to this start of the job."""
    epoch = variables.number("HVDLITE_EPOCH", default)
    if epoch not in EPOCHS:
        raise BootstrapError(
            f"HVDLITE_EPOCH={epoch} cannot be used: give a number from 0 to {EPOCHS[-1]}"
        )
    return epoch


def _from_launcher(variables: Variables, found: LauncherEnvironment) -> WorkerEnvironment:
    """Derive the address of the store and the token; other launchers provide neither."""
    # Within a host, both follow from the job's variables, and the kernel guarantees that the peers
    # are processes of this user. For several hosts, the user has to set the secret.
    if variables.flag("HVDLITE_ELASTIC"):
        raise BootstrapError(
            f"HVDLITE_ELASTIC is set, but {found.launcher} started this process; only hvdlite-run "
            "starts elastic jobs (--min-np, --max-np); clear HVDLITE_ELASTIC for an ordinary job"
        )
    worker = replace(
        _alone(variables, found),
        bind_address=_bind_address(variables),
        epoch=_epoch(variables, found.epoch),
        serves_store=found.rank == 0 and found.size > 1,
        start_timeout=_start_timeout(variables),
    )
    if found.size == 1:
        return worker
    worker = replace(worker, **service_numbers(variables, found.rank, found.size, found.servers))
    _refuse_second_run(found.rank)
    digest = hashlib.sha256(f"{found.launcher}|{found.job}|{os.getuid()}|{found.size}".encode())
    given = variables.address("HVDLITE_RENDEZVOUS")
    token = variables.get(_TOKEN) or _kept_token
    if found.on_one_host and given is None:
        return replace(
            worker,
            rendezvous=f"unix:hvdlite-{digest.hexdigest()[:32]}",
            token=hashlib.sha256(found.launcher.encode() + digest.digest()).digest(),
            job_id=digest.digest()[:JOB_ID_BYTES],
        )
    if token is None or (given is None and found.first_host is None):
        raise BootstrapError(_what_to_bring(found, token is None))
    secret = variables.secret(_TOKEN, token, TOKEN_BYTES)
    port = FIRST_PORT + int.from_bytes(digest.digest()[:4], "little") % PORTS
    return replace(
        worker,
        rendezvous=given or found.address or f"{found.first_host}:{port}",
        token=secret,
        job_id=hashlib.sha256(b"job" + secret).digest()[:JOB_ID_BYTES],
    )


def _what_to_bring(found: LauncherEnvironment, needs_token: bool) -> str:
    local = "" if found.local_size is None else f", {found.local_size} of them on this host"
    wanted = ["HVDLITE_TOKEN (64 random hexadecimal digits: openssl rand -hex 32)"]
    if not needs_token:
        wanted = []
    if found.first_host is None:
        wanted.append("HVDLITE_RENDEZVOUS (host:port, a free port on the host of rank 0)")
    return (
        f"{found.launcher} started {found.size} ranks{local}; to meet across hosts they need the "
        f"same {' and '.join(wanted)} in every rank's environment, or start them with hvdlite-run"
    )


def tell_scripts(**numbers: int) -> None:
    """Set this rank's numbers in the environment, which scripts and their children read."""
    for name, value in numbers.items():
        os.environ[f"HVDLITE_{name}"] = os.environ[f"HOROVOD_{name}"] = str(value)


def show_gpus(gpus: Sequence[str]) -> None:
    """Let CUDA see these GPUs alone; call it before the process uses CUDA."""
    # `gpus` has their numbers or names on this host, in the order of local ranks.
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


def imitate_horovod() -> None:
    """Note that the script imported `horovod`, under `hvdlite-run --compat`.

    In a few details hvdlite has a better behaviour than Horovod. A script that was written for
    Horovod may rely on Horovod's, so it gets that one.
    """
    global _imitates_horovod
    _imitates_horovod = True


def imitates_horovod() -> bool:
    return _imitates_horovod
