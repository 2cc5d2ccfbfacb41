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
from dataclasses import dataclass, field
from pathlib import Path

from hvdlite.errors import BootstrapError

_TOKEN = "HVDLITE_TOKEN"
_TOKEN_BYTES = 32
_JOB_ID_BYTES = 16

_kept_token: str | None = None


@dataclass(frozen=True)
class WorkerEnvironment:
    """This process's place in its job, as its launcher said.

    Attributes:
        rendezvous: address of the store, "unix:NAME" or "host:port"; None for a world of one.
        token: the job's secret; empty for a world of one.
        serves_store: this rank serves the store itself (torchrun's rank 0).
        host_id: overrides the identity of the host, so that one machine can play several.
        start_timeout: seconds that the ranks have to find each other.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    rendezvous: str | None = None
    token: bytes = field(default=b"", repr=False)
    job_id: bytes = bytes(_JOB_ID_BYTES)
    epoch: int = 0
    host_id: str | None = None
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
    """Recognise hvdlite-run, torchrun, or nobody (a world of one).

    Args:
        environment: read instead of this process's own.

    Raises:
        BootstrapError: a variable is missing or cannot be used; the message names it.
    """
    variables = _Variables(os.environ if environment is None else environment)
    if "HVDLITE_RANK" in variables or "HVDLITE_SIZE" in variables:
        return _from_hvdlite_run(variables)
    if "RANK" in variables and "WORLD_SIZE" in variables and "MASTER_ADDR" in variables:
        return _from_torchrun(variables)
    return WorkerEnvironment(host_id=variables.get("HVDLITE_HOST_ID"))


class _Variables:
    """A mapping of text with typed look-ups that name the variable when they fail."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def __contains__(self, name: str) -> bool:
        return bool(self._values.get(name))

    def get(self, name: str) -> str | None:
        return self._values.get(name) or None

    def text(self, name: str) -> str:
        value = self.get(name)
        if value is None:
            raise BootstrapError(
                f"{name} is not set, although other variables say that a launcher started this "
                "process; start it with hvdlite-run"
            )
        return value

    def number(self, name: str, default: int | None = None) -> int:
        if default is not None and name not in self:
            return default
        value = self.text(name)
        try:
            number = int(value)
        except ValueError:
            number = -1
        if number < 0:
            raise BootstrapError(f"{name}={value} is not a number from 0")
        return number

    def seconds(self, name: str, default: float) -> float:
        value = self.get(name)
        try:
            return default if value is None else float(value)
        except ValueError:
            raise BootstrapError(f"{name}={value} is not a number of seconds") from None

    def secret(self, name: str, value: str | None, length: int) -> bytes:
        try:
            secret = bytes.fromhex(value or "")
        except ValueError:
            secret = b""
        if len(secret) != length:
            raise BootstrapError(f"{name} is missing or is not {2 * length} hexadecimal digits")
        return secret


def _check(worker: WorkerEnvironment, names: tuple[str, str]) -> WorkerEnvironment:
    if worker.size < 1 or worker.rank >= worker.size:
        raise BootstrapError(
            f"{names[0]}={worker.rank} and {names[1]}={worker.size} contradict each other"
        )
    return worker


def _from_hvdlite_run(variables: _Variables) -> WorkerEnvironment:
    size = variables.number("HVDLITE_SIZE")
    worker = _check(
        WorkerEnvironment(
            rank=variables.number("HVDLITE_RANK"),
            size=size,
            local_rank=variables.number("HVDLITE_LOCAL_RANK", 0),
            local_size=variables.number("HVDLITE_LOCAL_SIZE", 1),
            cross_rank=variables.number("HVDLITE_CROSS_RANK", 0),
            cross_size=variables.number("HVDLITE_CROSS_SIZE", 1),
            host_id=variables.get("HVDLITE_HOST_ID"),
            launcher="hvdlite-run",
        ),
        ("HVDLITE_RANK", "HVDLITE_SIZE"),
    )
    if size == 1:
        return worker
    token = variables.get(_TOKEN) or _kept_token
    return WorkerEnvironment(
        **{
            **worker.__dict__,
            "rendezvous": variables.text("HVDLITE_RENDEZVOUS"),
            "token": variables.secret(_TOKEN, token, _TOKEN_BYTES),
            "job_id": variables.secret(
                "HVDLITE_JOB_ID", variables.get("HVDLITE_JOB_ID"), _JOB_ID_BYTES
            ),
            "epoch": variables.number("HVDLITE_EPOCH", 0),
            "start_timeout": variables.seconds("HVDLITE_START_TIMEOUT", 60.0),
        }
    )


def _from_torchrun(variables: _Variables) -> WorkerEnvironment:
    rank, size = variables.number("RANK"), variables.number("WORLD_SIZE")
    local_size = variables.number("LOCAL_WORLD_SIZE", size)
    if local_size != size:
        raise BootstrapError(
            f"torchrun started {size} ranks, {local_size} of them on this host; hvdlite joins a "
            "torchrun job on one host only: start jobs on several hosts with hvdlite-run"
        )
    # Nobody hands out a secret here: ranks meet at an address that only this user can answer at.
    parts = [variables.text("MASTER_ADDR"), variables.text("MASTER_PORT"), str(os.getuid())]
    parts += [variables.get("TORCHELASTIC_RUN_ID") or "", str(size)]
    parts += [variables.get("TORCHELASTIC_RESTART_COUNT") or "0"]
    digest = hashlib.sha256("|".join(parts).encode())
    return _check(
        WorkerEnvironment(
            rank=rank,
            size=size,
            local_rank=variables.number("LOCAL_RANK", rank),
            local_size=local_size,
            rendezvous=None if size == 1 else f"unix:hvdlite-{digest.hexdigest()[:32]}",
            token=hashlib.sha256(b"torchrun" + digest.digest()).digest(),
            job_id=digest.digest()[:_JOB_ID_BYTES],
            host_id=variables.get("HVDLITE_HOST_ID"),
            launcher="torchrun",
            serves_store=rank == 0 and size > 1,
        ),
        ("RANK", "WORLD_SIZE"),
    )
