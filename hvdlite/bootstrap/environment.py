"""Who am I: what a launcher wrote into this process's environment.

The only place of the worker's Python code that reads the environment.

Example:
    >>> from hvdlite.bootstrap.environment import detect
    >>> detect({}).size
    1
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing import current_process
from pathlib import Path

from hvdlite.bootstrap.launchers import Seat, checked, find_seat
from hvdlite.bootstrap.variables import Variables
from hvdlite.errors import BootstrapError

_TOKEN = "HVDLITE_TOKEN"
_TOKEN_BYTES = 32
_JOB_ID_BYTES = 16
_FIRST_PORT, _PORTS = 20000, 10000

_GUARD = (
    'In the script, put all that is not a definition under `if __name__ == "__main__":`, so that '
    "it does not run in the worker processes of a DataLoader"
)

_kept_token: str | None = None


@dataclass(frozen=True)
class WorkerEnvironment:
    """This process's place in its job, as its launcher said.

    Attributes:
        local_rank: as the launcher said; None when it says nothing about hosts. So is local_size.
        node: the launcher's own number of this host, if it has one.
        rendezvous: address of the store, "unix:NAME" or "host:port"; None for a world of one.
        token: the job's secret; empty for a world of one.
        serves_store: this rank serves the store itself (rank 0 of somebody else's launcher).
        host_id: overrides the identity of the host, so that one machine can play several.
        interfaces: network interfaces to be reached at; by the route to the store when empty.
        start_timeout: seconds that the ranks have to find each other; 0 means no end.
    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    rendezvous: str | None = None
    token: bytes = field(default=b"", repr=False)
    job_id: bytes = bytes(_JOB_ID_BYTES)
    epoch: int = 0
    host_id: str | None = None
    interfaces: tuple[str, ...] = ()
    launcher: str = "none"
    serves_store: bool = False
    start_timeout: float = 60.0


def take_token() -> None:
    """Remember the job's secret and remove it from the environment that children inherit."""
    global _kept_token
    _kept_token = os.environ.pop(_TOKEN, None) or _kept_token


def allow_pickle() -> bool:
    """Say whether object collectives may pickle: yes, unless HVDLITE_ALLOW_PICKLE is 0."""
    return os.environ.get("HVDLITE_ALLOW_PICKLE", "1") != "0"


def timeline_parts() -> Path | None:
    """Give the folder for parts of timelines that hvdlite-run merges; None without a launcher."""
    folder = os.environ.get("HVDLITE_TIMELINE_PARTS")
    return Path(folder) if folder else None


def detect(environment: Mapping[str, str] | None = None) -> WorkerEnvironment:
    """Recognise hvdlite-run, somebody else's launcher, or nobody (a world of one).

    Args:
        environment: read instead of this process's own.

    Raises:
        BootstrapError: a variable is missing or cannot be used; the message names it.
    """
    variables = Variables(os.environ if environment is None else environment)
    if "HVDLITE_RANK" in variables or "HVDLITE_SIZE" in variables:
        by_hand = "HVDLITE_JOB_ID" not in variables and variables.number("HVDLITE_SIZE") > 1
        return (
            _from_seat(variables, _by_hand(variables)) if by_hand else _from_hvdlite_run(variables)
        )
    seat = find_seat(variables)
    if seat is not None:
        return _from_seat(variables, seat)
    return WorkerEnvironment(host_id=variables.get("HVDLITE_HOST_ID"))


def _from_hvdlite_run(variables: Variables) -> WorkerEnvironment:
    rank, size = variables.number("HVDLITE_RANK"), variables.number("HVDLITE_SIZE")
    if size < 1 or rank >= size:
        raise BootstrapError(f"HVDLITE_RANK={rank} and HVDLITE_SIZE={size} contradict each other")
    worker = WorkerEnvironment(
        rank=rank,
        size=size,
        local_rank=variables.optional_number("HVDLITE_LOCAL_RANK"),
        local_size=variables.optional_number("HVDLITE_LOCAL_SIZE"),
        node=variables.optional_number("HVDLITE_NODE"),
        host_id=variables.get("HVDLITE_HOST_ID"),
        interfaces=_interfaces(variables),
        launcher="hvdlite-run",
    )
    if size == 1:
        return worker
    _refuse_second_run(rank)
    token = variables.get(_TOKEN) or _kept_token
    variables.text("HVDLITE_RENDEZVOUS")
    if token is None:
        raise BootstrapError(
            f"{_TOKEN} is missing: this process is a child of rank {rank}, and the children of a "
            f"rank do not get the secret of its job; call hvd.init() in the rank alone. {_GUARD}"
        )
    return replace(
        worker,
        rendezvous=variables.address("HVDLITE_RENDEZVOUS"),
        token=variables.secret(_TOKEN, token, _TOKEN_BYTES),
        job_id=variables.secret("HVDLITE_JOB_ID", variables.get("HVDLITE_JOB_ID"), _JOB_ID_BYTES),
        epoch=variables.number("HVDLITE_EPOCH", 0),
        start_timeout=_start_timeout(variables),
    )


def _refuse_second_run(rank: int) -> None:
    """Raise in a child that imports the script of its parent; multiprocessing marks it then."""
    if getattr(current_process(), "_inheriting", False):
        raise BootstrapError(
            f"this process is a child of rank {rank} that runs the script again "
            f"(multiprocessing does, and a DataLoader with workers). {_GUARD}"
        )


def _by_hand(variables: Variables) -> Seat:
    """Take what somebody's own script set; rank 0 then serves the store that hvdlite-run would."""
    variables.text("HVDLITE_RENDEZVOUS")
    seat = Seat(
        launcher="a script of your own",
        names=("HVDLITE_RANK", "HVDLITE_SIZE"),
        rank=variables.number("HVDLITE_RANK"),
        size=variables.number("HVDLITE_SIZE"),
        job="",
        local_rank=variables.optional_number("HVDLITE_LOCAL_RANK"),
        local_size=variables.optional_number("HVDLITE_LOCAL_SIZE"),
        node=variables.optional_number("HVDLITE_NODE"),
    )
    return checked(seat)


def _interfaces(variables: Variables) -> tuple[str, ...]:
    own, horovods = "HVDLITE_NETWORK_INTERFACES", "HOROVOD_GLOO_IFACE"
    names = (variables.get(own) or variables.get(horovods) or "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def _start_timeout(variables: Variables) -> float:
    own, horovods = "HVDLITE_START_TIMEOUT", "HOROVOD_START_TIMEOUT"
    return variables.seconds(own if own in variables else horovods, 60.0)


def _from_seat(variables: Variables, seat: Seat) -> WorkerEnvironment:
    """Find a place to meet and a secret, neither of which other launchers hand out.

    Within a host the address follows from the job's variables, and the kernel answers for the
    user behind it. Between hosts the user has to bring the secret.
    """
    worker = WorkerEnvironment(
        rank=seat.rank,
        size=seat.size,
        local_rank=seat.local_rank,
        local_size=seat.local_size,
        node=seat.node,
        host_id=variables.get("HVDLITE_HOST_ID"),
        interfaces=_interfaces(variables),
        launcher=seat.launcher,
        serves_store=seat.rank == 0 and seat.size > 1,
        start_timeout=_start_timeout(variables),
    )
    if seat.size == 1:
        return worker
    _refuse_second_run(seat.rank)
    digest = hashlib.sha256(f"{seat.launcher}|{seat.job}|{os.getuid()}|{seat.size}".encode())
    given = variables.address("HVDLITE_RENDEZVOUS")
    token = variables.get(_TOKEN) or _kept_token
    if seat.on_one_host and given is None:
        return replace(
            worker,
            rendezvous=f"unix:hvdlite-{digest.hexdigest()[:32]}",
            token=hashlib.sha256(seat.launcher.encode() + digest.digest()).digest(),
            job_id=digest.digest()[:_JOB_ID_BYTES],
        )
    if token is None or (given is None and seat.first_host is None):
        raise BootstrapError(_what_to_bring(seat, token is None))
    secret = variables.secret(_TOKEN, token, _TOKEN_BYTES)
    return replace(
        worker,
        rendezvous=given or f"{seat.first_host}:{_port(digest.digest())}",
        token=secret,
        job_id=hashlib.sha256(b"job" + secret).digest()[:_JOB_ID_BYTES],
    )


def _port(digest: bytes) -> int:
    """Choose a port below those that the kernel gives out itself."""
    return _FIRST_PORT + int.from_bytes(digest[:4], "little") % _PORTS


def _what_to_bring(seat: Seat, needs_token: bool) -> str:
    local = "" if seat.local_size is None else f", {seat.local_size} of them on this host"
    wanted = ["HVDLITE_TOKEN (64 random hexadecimal digits: openssl rand -hex 32)"]
    if not needs_token:
        wanted = []
    if seat.first_host is None:
        wanted.append("HVDLITE_RENDEZVOUS (host:port, a free port on the host of rank 0)")
    return (
        f"{seat.launcher} started {seat.size} ranks{local}; to meet across hosts they need the "
        f"same {' and '.join(wanted)} in every rank's environment, or start them with hvdlite-run"
    )
