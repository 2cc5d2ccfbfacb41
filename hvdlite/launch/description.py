"""What the user wants to run, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdlite.errors import ArgumentError
from hvdlite.launch.channels import RemoteLauncher, Ssh
from hvdlite.launch.hosts import Host, HostProvider
from hvdlite.launch.output import MakeViewer
from hvdlite.launch.process import kept_memory, thread_caps
from hvdlite.launch.report import Failure
from hvdlite.rendezvous.handshake import Job

DEFAULT_GRACE = 30.0  # seconds, as torchrun gives: enough for most checkpoints

INDEPENDENT = "HVDLITE_INDEPENDENT"  # set by --independent


@dataclass(frozen=True)
class Elastic:
    """How the number of ranks of an elastic job may change. Times are in seconds."""

    min_np: int | None = None  # the fewest ranks with which the job goes on; None: as many as `np`
    max_np: int | None = None  # the most ranks; None: one for each slot
    # A command that prints lines of `host[:slots]`, asked every second; None: hosts do not change.
    host_discovery_script: str | None = None
    slots_per_host: int | None = None  # the slots of a host for which the script prints none
    elastic_timeout: float = 600.0  # how long to wait with fewer than `min_np` ranks or slots
    reset_limit: int | None = None  # how often the ranks may be formed anew; None: without a limit
    # The shortest and longest time without new ranks for a host whose ranks die again and again.
    blacklist_cooldown_range: tuple[float, float] = (10.0, 600.0)
    # How long a host may be silent until it counts as dead; a rank may for 60 s.
    elastic_heartbeat: float = 3.0
    # How long ranks may take to leave a host that is taken away, or to end after an exception.
    drain_timeout: float = 30.0

    def least(self, ranks: int) -> int:
        return ranks if self.min_np is None else self.min_np

    def check(self, ranks: int) -> None:
        shortest, longest = self.blacklist_cooldown_range
        wrong = {
            f"min-np {self.min_np}: at least one rank is needed": self.least(ranks) < 1,
            f"min-np {self.min_np} is more than np {ranks}, with which the job starts": (
                self.least(ranks) > ranks
            ),
            f"max-np {self.max_np} is less than np {ranks}, with which the job starts": (
                self.max_np is not None and self.max_np < ranks
            ),
            f"slots-per-host {self.slots_per_host}: a host needs at least one slot": (
                self.slots_per_host is not None and self.slots_per_host < 1
            ),
            f"reset-limit {self.reset_limit}: give a number from 0": (
                self.reset_limit is not None and self.reset_limit < 0
            ),
            f"elastic-timeout {self.elastic_timeout:g}: give a number of seconds from 0": (
                not self.elastic_timeout >= 0
            ),
            f"drain-timeout {self.drain_timeout:g}: give a number of seconds from 0": (
                not self.drain_timeout >= 0
            ),
            f"elastic-heartbeat {self.elastic_heartbeat:g}: give at least 0.2 seconds": (
                not 0.2 <= self.elastic_heartbeat < float("inf")
            ),
            f"blacklist-cooldown-range {shortest:g} {longest:g}: give a shortest and a longest "
            "time, from 1 second": not 1 <= shortest <= longest < float("inf"),
        }
        _refuse(wrong)


def elastic_job(**settings: Any) -> Elastic | None:
    """Describe an elastic job by fields of `Elastic`, which are named as the flags are.

    Returns None unless `min_np`, `max_np` or the script makes the job elastic; the other settings
    alone change nothing.

    Example:
        >>> elastic_job(max_np=4).max_np
        4
    """
    elastic = Elastic(**settings)
    makers = (elastic.min_np, elastic.max_np, elastic.host_discovery_script)
    return None if makers == (None, None, None) else elastic


@dataclass(frozen=True)
class Servers:
    """The parameter servers of a job, and what happens when one of its workers dies."""

    count: int  # how many ranks serve: the first ones
    min_workers: int = 1  # with fewer live workers the job fails
    restarts: int = 3  # how many times in a row a worker that dies is started again

    def check(self, ranks: int) -> None:
        workers = ranks - self.count
        wrong = {
            f"servers {self.count}: at least one is needed": self.count < 1,
            f"servers {self.count} of np {ranks} ranks leave none to train; give -np the servers "
            "and the workers together": workers < 1,
            f"min-workers {self.min_workers}: at least one is needed": self.min_workers < 1,
            f"min-workers {self.min_workers} is more than the {workers} workers of np {ranks} and "
            f"servers {self.count}": self.min_workers > workers,
        }
        _refuse(wrong)


def _refuse(wrong: Mapping[str, bool]) -> None:
    for message, applies in wrong.items():
        if applies:
            raise ArgumentError(message)


@dataclass(frozen=True)
class Description:
    command: Sequence[str]  # the program of every rank, and its arguments
    ranks: int  # how many ranks the job has; an elastic job starts with so many
    # The variables of every rank: the user's, and those that flags set.
    environment: Mapping[str, str]
    hosts: Sequence[Host] = ()  # the hosts, which are filled in order; if empty, this machine alone
    remote_launcher: RemoteLauncher = field(default_factory=Ssh)
    # Names of the network interfaces by which the hosts reach each other; if empty, those of the
    # routes to them.
    interfaces: Sequence[str] = ()
    output_folder: str | Path | None = None  # a folder for copies of the ranks' output
    timestamps: bool = False  # whether the time stands before each line of output
    verbose: bool = False  # whether the launcher prints the process and command of each rank
    compat: bool = False  # whether `import horovod` finds hvdlite
    # What every rank reads from its stdin; each rank then also has a pipe for its result.
    stdin: bytes | None = field(default=None, repr=False)
    # Seconds that the ranks have after Ctrl-C or SIGTERM before they are killed.
    grace: float = DEFAULT_GRACE
    elastic: Elastic | None = None  # how the number of ranks may change; None if it is fixed
    servers: Servers | None = None  # the parameter servers; None in a job without
    job: Job | None = None  # secret, number and epoch of the job; None for fresh ones
    # What knows the hosts of an elastic job, which `remote_launcher` reaches all; None if
    # `hosts` or the script does.
    provider: HostProvider | None = None
    viewers: Sequence[MakeViewer] = ()  # what shows the running job to people besides its output

    @property
    def live(self) -> bool:
        return bool(self.viewers)

    @property
    def independent(self) -> bool:
        """Whether the ranks may be programs that know nothing of each other."""
        return self.environment.get(INDEPENDENT, "0") not in ("", "0")

    def shared_environment(self, threads: int) -> dict[str, str]:
        given = self.environment
        shared = {**given, **thread_caps(given, threads), **kept_memory(given)}
        # Horovod has a switch where hvdlite has a time. The core knows only one of Horovod's names
        # for each knob, so the launcher translates this one.
        if given.get("HOROVOD_STALL_CHECK_DISABLE", "0").lower() in ("1", "true"):
            shared.setdefault("HVDLITE_STALL_WARNING", "0")
        if self.interfaces:
            names = ",".join(self.interfaces)
            shared["HVDLITE_NETWORK_INTERFACES"] = names
            shared.setdefault("NCCL_SOCKET_IFNAME", names)
        return shared


@dataclass(frozen=True)
class Outcome:
    status: int  # the exit status for the launcher
    root: Failure | None  # the failure that the others followed from, if any rank failed
    # By rank, the bytes that it wrote as its result; in an elastic job by worker.
    results: Mapping[int, bytes]
    # The keys of `results` in rank order: those of the last epoch in an elastic job.
    order: tuple[int, ...] = ()


def threads_text(threads: int, cores: int, ranks: int) -> str:
    return (
        f"{counted(threads, 'thread')} per rank "
        f"({counted(cores, 'core')} / {counted(ranks, 'rank')})"
    )


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
