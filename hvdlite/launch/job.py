"""One job, from its description to its end: where its ranks run, what they get, where they meet."""

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
from hvdlite.launch.process.placement import Slot, place_as, threads_per_rank
from hvdlite.launch.process.resources import available_cores
from hvdlite.launch.remote.remote import LaunchError, RemoteHosts
from hvdlite.launch.remote.ssh import SshOptions
from hvdlite.launch.supervisor import Supervisor
from hvdlite.timeline import merge

DEFAULT_GRACE = 30.0  # seconds, as torchrun gives: enough for most checkpoints


@dataclass(frozen=True)
class Description:
    """What to run, and how.

    Attributes:
        environment: of every rank: the user's, with what flags set.
        hosts: filled in order; none means this machine alone.
        compat: whether `import horovod` finds hvdlite.
        interfaces: network interfaces by which the hosts reach each other; by route when empty.
        stdin: what every rank reads; then it also has a pipe for a result.
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
    """How a job ended: the launcher's exit status, the first failure, and results by rank."""

    status: int
    root: Failure | None
    results: Mapping[int, bytes]


class _Run:
    """One run of a description; used once."""

    def __init__(self, what: Description, console: Console, inbox: SignalInbox) -> None:
        hosts = what.hosts or (Host("localhost", what.ranks),)
        places = spread(hosts, what.ranks)
        self._what = what
        self._console = console
        self._slots = place_as(places)
        # Slots number hosts as they first appear; those that get no rank are left out.
        self._names = [hosts[index].name for index in dict.fromkeys(places)]
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
        """Say where this host's ranks leave the parts of their timelines; they make the folder.

        None where no temporary folder can be written: then parts lie beside the timeline, and what
        the ranks could not merge stays there.
        """
        try:
            folder = tempfile.gettempdir()
        except FileNotFoundError:
            return None
        return Path(folder) / f"hvdlite-timeline-{self._job.job_id.hex()}"

    def _merge_timelines(self) -> None:
        """Merge the parts that ranks could not merge: one was killed, for example."""
        if self._timeline_parts is None:
            return
        try:
            merge.merge_leftovers(self._timeline_parts)
        except (OSError, ArgumentError) as error:
            self._console.say(f"no timeline: {error}; its parts are in {self._timeline_parts}")

    def _slots_of(self, name: str) -> list[Slot]:
        return [slot for slot in self._slots if self._names[slot.host] == name]

    def _threads(self, remotes: RemoteHosts) -> list[int]:
        """Share out every host's cores; said once, for hosts that are alike."""
        cores = {remote.name: int(remote.hello["cores"]) for remote in remotes.hosts}
        said: dict[str, list[str]] = {}
        threads = []
        for name in self._names:
            ranks = len(self._slots_of(name))
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

    def _own(self, slot: Slot, rendezvous: str) -> dict[str, str]:
        """Build what is different for every rank."""
        name = self._names[slot.host]
        name = socket.gethostname() if self._here[slot.host] else name
        return {
            **job_environment(slot, self._job, rendezvous),
            "HVDLITE_HOSTNAME": name,
            "HOROVOD_HOSTNAME": name,
        }

    def _shared(self, threads: int) -> dict[str, str]:
        """Build what is the same for every rank of a host."""
        given = self._what.environment
        shared = {**given, **thread_caps(given, threads)}
        # Horovod's switch for what is a time here; the core knows one name of Horovod's per knob.
        if given.get("HOROVOD_STALL_CHECK_DISABLE", "0").lower() in ("1", "true"):
            shared.setdefault("HVDLITE_STALL_WARNING", "0")
        if self._what.interfaces:
            names = ",".join(self._what.interfaces)
            shared["HVDLITE_NETWORK_INTERFACES"] = names
            shared.setdefault("NCCL_SOCKET_IFNAME", names)
        return shared

    def _start_remote(self, remotes: RemoteHosts, rendezvous: str, threads: Sequence[int]) -> None:
        for remote in remotes.hosts:
            slots = self._slots_of(remote.name)
            part = {
                "job_id": self._job.job_id.hex(),
                "folder": str(Path.cwd()),
                "command": list(self._what.command),
                "environment": self._shared(threads[slots[0].host]),
                "compat": self._what.compat,
                "ranks": {slot.rank: self._own(slot, rendezvous) for slot in slots},
                "slots": {slot.rank: slot_numbers(slot) for slot in slots},
            }
            remote.start(part, slots, self._what.stdin)
        remotes.wait_until_started()

    def _starters(
        self, supervisor: Supervisor, remotes: RemoteHosts, rendezvous: str, threads: Sequence[int]
    ) -> list[Callable[[], None]]:
        workers = {rank: one for host in remotes.hosts for rank, one in host.workers.items()}

        def start(slot: Slot) -> None:
            what = self._what
            folder = what.output_folder
            files = None if folder is None else output_files(folder, slot.rank)
            remote = workers.get(slot.rank)
            if remote is None:
                environment = {**self._shared(threads[slot.host]), **self._own(slot, rendezvous)}
                if self._timeline_parts is not None:
                    environment["HVDLITE_TIMELINE_PARTS"] = str(self._timeline_parts)
                if what.compat:
                    environment = on_path(environment)
                worker = start_worker(slot, what.command, environment, stdin=what.stdin)
                supervisor.add(worker, files)
            else:
                supervisor.add(remote, files)
            if what.verbose:
                one = remote or worker
                where = f" on {one.host}" if remote else ""
                self._console.say(
                    f"rank {slot.rank}: pid {one.pid}{where}: {shlex.join(what.command)}"
                )

        return [partial(start, slot) for slot in self._slots]


def slot_numbers(slot: Slot) -> list[int]:
    """List a slot's fields but for its rank, in their order."""
    return [
        slot.size,
        slot.local_rank,
        slot.local_size,
        slot.cross_rank,
        slot.cross_size,
        slot.host,
    ]


def meeting_address(remotes: RemoteHosts, interfaces: Sequence[str]) -> str | None:
    """Choose where the store listens: at the address that routes to the other hosts.

    None, for a fresh Unix socket, when there is no other host.

    Raises:
        LaunchError: the hosts are reached from different addresses, and nobody said which to take.
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
    """Take the other host's own address from its SSH_CONNECTION: ours, port, its, port."""
    fields = connection.split()
    return fields[2] if len(fields) == 4 else "127.0.0.1"


def route_to(address: str) -> str:
    """Ask the kernel which of this host's addresses it would send from; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect((address, 9))
        return str(asked.getsockname()[0])


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def run_job(what: Description) -> Outcome:
    """Run a job to its end.

    Raises:
        HostsError: the hosts have too few slots.
        LaunchError: another host cannot take part.
        OSError: a rank could not be started here.
        KeyboardInterrupt: a signal came before the ranks were started.
    """
    with Console() as console, SignalInbox() as inbox:
        return _Run(what, console, inbox).run()
