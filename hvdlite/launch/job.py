"""Run one job from its description to its end.

`run_job` places the ranks on the hosts, builds their environments, serves the store where they
meet, starts them here and on other hosts, and supervises them until nothing of the job is left.
"""

from __future__ import annotations

import secrets
import shlex
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hvdlite.bootstrap.address import interface_address, interface_addresses
from hvdlite.bootstrap.handshake import Job
from hvdlite.bootstrap.store import Store
from hvdlite.compat import on_path
from hvdlite.errors import ArgumentError
from hvdlite.launch.hosts import Host, is_here, spread
from hvdlite.launch.output.console import Console
from hvdlite.launch.output.report import Failure
from hvdlite.launch.process.inbox import SignalInbox
from hvdlite.launch.process.local import job_environment, output_files, start_worker, thread_caps
from hvdlite.launch.process.placement import Placement, place_as, threads_per_rank
from hvdlite.launch.process.resources import available_cores
from hvdlite.launch.remote.remote import LaunchError, RemoteHosts
from hvdlite.launch.remote.ssh import SshOptions
from hvdlite.launch.supervisor import Supervisor
from hvdlite.timeline import merge

DEFAULT_GRACE = 30.0  # seconds, as torchrun gives: enough for most checkpoints


@dataclass(frozen=True)
class Description:
    """What the user wants to run.

    Attributes:
        command: the program of every rank, and its arguments.
        ranks: how many ranks the job has.
        environment: the variables of every rank: the user's, and those that flags set.
        hosts: the hosts, which are filled in order; if empty, this machine alone.
        interfaces: names of the network interfaces by which the hosts reach each other; if empty,
            those of the routes to them.
        output_folder: a folder for copies of the ranks' output.
        timestamps: whether the time stands before each line of output.
        verbose: whether the launcher prints the process and command of each rank.
        compat: whether `import horovod` finds hvdlite.
        stdin: what every rank reads from its stdin; each rank then also has a pipe for its result.
        grace: seconds that the ranks have after Ctrl-C or SIGTERM before they are killed.
    """

    command: Sequence[str]
    ranks: int
    environment: Mapping[str, str]
    hosts: Sequence[Host] = ()
    ssh: SshOptions = field(default_factory=SshOptions)
    interfaces: Sequence[str] = ()
    output_folder: Path | None = None
    timestamps: bool = False
    verbose: bool = False
    compat: bool = False
    stdin: bytes | None = field(default=None, repr=False)
    grace: float = DEFAULT_GRACE


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        status: the exit status for the launcher.
        root: the failure that the others followed from, if any rank failed.
        results: by rank, the bytes that it wrote as its result.
    """

    status: int
    root: Failure | None
    results: Mapping[int, bytes]


class _Run:
    """One run of a description; used once."""

    def __init__(self, what: Description, console: Console, inbox: SignalInbox) -> None:
        hosts = what.hosts or (Host("localhost", what.ranks),)
        host_of_rank = spread(hosts, what.ranks)
        self._what = what
        self._console = console
        self._placements = place_as(host_of_rank)
        # Placements number the hosts that get a rank, in order of first appearance.
        self._names = [hosts[index].name for index in dict.fromkeys(host_of_rank)]
        self._here = [not what.hosts or is_here(name) for name in self._names]
        self._job = Job(secrets.token_bytes(32), secrets.token_bytes(16), epoch=0)
        self._inbox = inbox
        self._timeline_parts = self._choose_timeline_parts()

    @property
    def _remote_names(self) -> list[str]:
        return [name for name, here in zip(self._names, self._here, strict=True) if not here]

    def run(self) -> Outcome:
        what = self._what
        with RemoteHosts(self._remote_names, what.ssh, self._inbox.fd) as remotes:
            remotes.greet()
            threads = self._threads(remotes)
            address = meeting_address(remotes, what.interfaces)
            with Store.start(what.ranks, self._job, address) as store:
                self._start_remote(remotes, store.address, threads)
                supervisor = Supervisor(
                    self._console,
                    self._inbox,
                    self._job.job_id,
                    timestamps=what.timestamps,
                    reports=what.stdin is None,  # `hvdlite.run` raises instead.
                    grace=what.grace,
                )
                try:
                    supervisor.run(self._starters(supervisor, remotes, store.address, threads))
                finally:
                    self._merge_timelines()
                status = supervisor.conclude()
                return Outcome(status, supervisor.root, supervisor.results)

    def _choose_timeline_parts(self) -> Path | None:
        """Choose the folder for the parts of timelines of this host's ranks, which create it.

        None if no temporary folder can be written. The ranks then put the parts beside the
        timeline, and the parts that they cannot merge stay there.
        """
        try:
            folder = tempfile.gettempdir()
        except FileNotFoundError:
            return None
        return Path(folder) / f"hvdlite-timeline-{self._job.job_id.hex()}"

    def _merge_timelines(self) -> None:
        """Merge the parts that the ranks could not merge, for example because one was killed."""
        if self._timeline_parts is None:
            return
        try:
            merge.merge_leftovers(self._timeline_parts)
        except (OSError, ArgumentError) as error:
            self._console.say(f"no timeline: {error}; its parts are in {self._timeline_parts}")

    def _placements_of(self, name: str) -> list[Placement]:
        return [placement for placement in self._placements if self._names[placement.host] == name]

    def _threads(self, remotes: RemoteHosts) -> list[int]:
        """Return, by host, the number of threads per rank; print it once for equal hosts."""
        cores = {remote.name: int(remote.hello["cores"]) for remote in remotes.hosts}
        said: dict[str, list[str]] = {}
        threads = []
        for name in self._names:
            ranks = len(self._placements_of(name))
            own = cores.get(name, available_cores())
            threads.append(threads_per_rank(own, ranks))
            text = (
                f"{_number(threads[-1], 'thread')} per rank "
                f"({_number(own, 'core')} / {_number(ranks, 'rank')})"
            )
            said.setdefault(text, []).append(name)
        if thread_caps(self._what.environment, 1):
            for text, names in said.items():
                where = f" on {', '.join(names)}" if len(said) > 1 else ""
                self._console.say(f"{text}{where}; set OMP_NUM_THREADS to choose")
        return threads

    def _own(self, placement: Placement, rendezvous: str) -> dict[str, str]:
        """Build the variables that are different for every rank."""
        name = self._names[placement.host]
        name = socket.gethostname() if self._here[placement.host] else name
        return {
            **job_environment(placement, self._job, rendezvous),
            "HVDLITE_HOSTNAME": name,
            "HOROVOD_HOSTNAME": name,
        }

    def _shared(self, threads: int) -> dict[str, str]:
        """Build the variables that are the same for every rank of a host."""
        given = self._what.environment
        shared = {**given, **thread_caps(given, threads)}
        # Horovod has a switch where hvdlite has a time. The core knows only one of Horovod's names
        # for each knob, so the launcher translates this one.
        if given.get("HOROVOD_STALL_CHECK_DISABLE", "0").lower() in ("1", "true"):
            shared.setdefault("HVDLITE_STALL_WARNING", "0")
        if self._what.interfaces:
            names = ",".join(self._what.interfaces)
            shared["HVDLITE_NETWORK_INTERFACES"] = names
            shared.setdefault("NCCL_SOCKET_IFNAME", names)
        return shared

    def _start_remote(self, remotes: RemoteHosts, rendezvous: str, threads: Sequence[int]) -> None:
        for remote in remotes.hosts:
            placements = self._placements_of(remote.name)
            part = {
                "job_id": self._job.job_id.hex(),
                "folder": str(Path.cwd()),
                "command": list(self._what.command),
                "environment": self._shared(threads[placements[0].host]),
                "compat": self._what.compat,
                "ranks": {
                    placement.rank: self._own(placement, rendezvous) for placement in placements
                },
                "slots": {placement.rank: placement_numbers(placement) for placement in placements},
            }
            remote.start(part, placements, self._what.stdin)
        remotes.wait_until_started()

    def _starters(
        self, supervisor: Supervisor, remotes: RemoteHosts, rendezvous: str, threads: Sequence[int]
    ) -> list[Callable[[], None]]:
        workers = {rank: one for host in remotes.hosts for rank, one in host.workers.items()}

        def start(placement: Placement) -> None:
            what = self._what
            folder = what.output_folder
            files = None if folder is None else output_files(folder, placement.rank)
            remote = workers.get(placement.rank)
            if remote is None:
                environment = {
                    **self._shared(threads[placement.host]),
                    **self._own(placement, rendezvous),
                }
                if self._timeline_parts is not None:
                    environment["HVDLITE_TIMELINE_PARTS"] = str(self._timeline_parts)
                if what.compat:
                    environment = on_path(environment)
                worker = start_worker(placement, what.command, environment, stdin=what.stdin)
                supervisor.add(worker, files)
            else:
                supervisor.add(remote, files)
            if what.verbose:
                one = remote or worker
                where = f" on {one.host}" if remote else ""
                self._console.say(
                    f"rank {placement.rank}: pid {one.pid}{where}: {shlex.join(what.command)}"
                )

        return [partial(start, placement) for placement in self._placements]


def placement_numbers(placement: Placement) -> list[int]:
    """List a placement's fields after its rank, in order, for a message to an agent."""
    return [
        placement.size,
        placement.local_rank,
        placement.local_size,
        placement.cross_rank,
        placement.cross_size,
        placement.host,
    ]


def meeting_address(remotes: RemoteHosts, interfaces: Sequence[str]) -> str | None:
    """Choose the address of the store: the one from which this host reaches the other hosts.

    Returns:
        "host:0", or None for a fresh Unix socket when there is no other host.

    Raises:
        LaunchError: this host reaches the others from different addresses, and `interfaces` is
            empty.
    """
    if not remotes.hosts:
        return None
    if interfaces:
        return f"{interface_address(interfaces)}:0"
    routes = {host.name: route_to(_ssh_end(host.hello["ssh"])) for host in remotes.hosts}
    addresses = set(routes.values())
    if len(addresses) > 1:
        names = {address: name for name, address in interface_addresses().items()}
        ways = ", ".join(
            f"{host} by {address} ({names.get(address, '?')})" for host, address in routes.items()
        )
        raise LaunchError(
            f"the hosts are reached by different network interfaces: {ways}; choose one that all "
            "hosts share with --network-interfaces"
        )
    return f"{addresses.pop()}:0"


def _ssh_end(connection: str) -> str:
    """Return the other host's address from its SSH_CONNECTION: our address, port, its, port."""
    fields = connection.split()
    return fields[2] if len(fields) == 4 else "127.0.0.1"


def route_to(address: str) -> str:
    """Return this host's address on the route to another one; connecting UDP sends no packet."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect((address, 9))
        return str(asked.getsockname()[0])


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def run_job(what: Description) -> Outcome:
    """Run a job to its end, and return how it ended.

    Raises:
        HostsError: the hosts have too few slots.
        LaunchError: another host cannot take part.
        OSError: a rank could not be started here.
        KeyboardInterrupt: a signal came before the ranks were started.
    """
    with Console() as console, SignalInbox() as inbox:
        return _Run(what, console, inbox).run()
