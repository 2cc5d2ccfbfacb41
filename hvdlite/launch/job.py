"""A job from its hosts to its end, here one of ranks that are known when it starts.

A `Job` reaches the other hosts, has the processes meet, starts them here and there, and has the
supervisor watch them until nothing of the job is left, for which it is the policy. Other kinds of
jobs (`servers`, `elastic.job`) are subclasses, which say what is different.
"""

from __future__ import annotations

import os
import shlex
import socket
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hvdlite.compat import on_path
from hvdlite.errors import ArgumentError
from hvdlite.launch.agents import Agents, Pulse, RemoteHost, rendezvous_address
from hvdlite.launch.console import Console
from hvdlite.launch.description import Description, Outcome, threads_text
from hvdlite.launch.hosts import Host, Start, is_here, place_as, spread, threads_per_rank
from hvdlite.launch.loop import GRACE, AnyRank, SignalInbox
from hvdlite.launch.output import View
from hvdlite.launch.process import (
    LIVE,
    RESULT,
    job_environment,
    output_files,
    start_worker,
    thread_caps,
    torch_master,
    torchrun_environment,
)
from hvdlite.launch.resources import available_cores
from hvdlite.launch.supervisor import Policy, Supervisor
from hvdlite.rendezvous import handshake
from hvdlite.rendezvous.address import split_host
from hvdlite.rendezvous.descriptors import room_for_processes
from hvdlite.rendezvous.service import Service
from hvdlite.rendezvous.store import Store
from hvdlite.timeline.recorder import merge_leftovers

_SILENCE = 15.0  # seconds that a host may be silent until its processes count as dead
_LAUNCHER_SILENCE = 30.0  # seconds that an agent may hear nothing before it ends its processes
_NEVER_MET = (
    "hvd.init() was never called: {0} independent copies of the program ran, and trained {0} times "
    "what they train; call hvd.init() or dist.init_process_group() in the script, or give "
    "--independent if the ranks need nothing of each other, or meet by a store= or init_method= of "
    "their own"
)


class Job(Policy):
    """One run of a description; used once."""

    def __init__(
        self, what: Description, console: Console, inbox: SignalInbox, view: View | None
    ) -> None:
        """Place the ranks, unless they change. Raises ArgumentError if there are too few slots."""
        self.what = what
        self.console = console
        self.inbox = inbox
        # The secret, number and epoch by which its processes know each other.
        self.identity = what.job or handshake.Job.drawn()
        self.pulse = Pulse(_SILENCE, _LAUNCHER_SILENCE, GRACE)
        self.agents: Agents
        self.address = ""  # where the processes meet
        self.starts: Sequence[Start] = () if what.elastic else first_processes(what)
        hosts = {host.name: host for host in what.hosts}
        self._names = list(dict.fromkeys(start.host for start in self.starts))
        self.elsewhere = [name for name in self._names if name in hosts and not _here(hosts[name])]
        self._threads: dict[str, int] = {}
        self._torch_master: Mapping[str, str] = {}
        self._store: Store
        self._view = view
        self._timeline = _timeline_folder(self.identity.job_id)

    def run(self) -> Outcome:
        """Run the job to its end; `run_job` lists the errors."""
        what = self.what
        with Agents(what.remote_launcher, self.pulse, self.inbox.fd) as self.agents:
            self.starts = self.first()
            with self.rendezvous() as rendezvous:
                self.address = rendezvous.address
                self.choose_threads()
                self.agents.begin(self.part, what.stdin)
                supervisor = Supervisor(
                    self.console,
                    self.inbox,
                    self.identity.job_id,
                    self,
                    self.agents,
                    timestamps=what.timestamps,
                    reports=what.stdin is None,  # `hvdlite.run` raises instead.
                    grace=what.grace,
                    view=self._view,
                )
                self.agents.attach(supervisor)
                try:
                    supervisor.run([partial(self.start, one) for one in self.starts])
                finally:
                    if self._timeline is not None:
                        _merge_timeline(self._timeline, self.console)
                outcome = self.outcome()
                self.agents.conclude(outcome.status)
                return outcome

    # What other kinds of jobs do in another way.

    def first(self) -> Sequence[Start]:
        """Connect to all other hosts, which have to answer, and return all ranks."""
        self.agents.greet(self.elsewhere, set(self.elsewhere).issubset)
        return self.starts

    def rendezvous(self) -> Service:
        address = rendezvous_address(self.agents.present, self.what.interfaces)
        self._store = Store.start(self.what.ranks, self.identity, address)
        return self._store

    def here(self, host: str) -> bool:
        """Return whether a host is this machine, so that no agent is needed."""
        return host not in self.elsewhere

    def choose_threads(self) -> None:
        cores = {host.name: int(host.hello["cores"]) for host in self.agents.present}
        said: dict[str, list[str]] = {}  # by text, the hosts of which it is true
        for name, ranks in Counter(start.host for start in self.starts).items():
            there = cores.get(name, available_cores())
            self._threads[name] = threads_per_rank(there, ranks)
            said.setdefault(threads_text(self._threads[name], there, ranks), []).append(name)
        for text, names in said.items():
            self.say_threads(text if len(said) == 1 else f"{text} on {', '.join(names)}")

    def threads(self, host: str) -> int:
        return self._threads[host]

    def variables(self, start: Start) -> Mapping[str, str]:
        """Return the variables that this kind of job has: torch's; none for scripts for Horovod."""
        # horovodrun sets no variables of torch. Trainers then leave the reduction to Horovod's
        # optimizer, and do not reduce a second time.
        if self.what.compat:
            return {}
        if not self._torch_master:
            name = self._names[0]
            if not self.elsewhere:
                host = "127.0.0.1"
            elif self.here(name):
                host = split_host(self.address)[0]
            else:
                host = self.agents.hosts[name].address()
            self._torch_master = torch_master(
                self.what.environment, host, self.here(name), self.identity.job_id
            )
        numbers = torchrun_environment(start.placement, self.identity.job_id)
        return {**numbers, **self._torch_master}

    def met(self) -> bool:
        """Return whether the processes of a job that ended well have met."""
        return self._store.met

    def order(self) -> tuple[int, ...]:
        """Return the numbers of the processes whose results count, in rank order."""
        return tuple(range(self.what.ranks))

    # What is the same.

    def outcome(self) -> Outcome:
        what, supervisor = self.what, self.supervisor
        status = supervisor.conclude()
        # `hvdlite.run` returns the results of a function, which may well train nothing.
        alone = what.ranks == 1 or what.independent or what.stdin is not None
        if status == 0 and not alone and not self.met():
            self.console.say(_NEVER_MET.format(what.ranks))
            status = 1
        return Outcome(status, supervisor.root, supervisor.streams.results, self.order())

    def part(self, host: RemoteHost) -> dict[str, Any]:
        """Build another host's part of the job: what its processes have in common."""
        what = self.what
        part: dict[str, Any] = {
            "job_id": self.identity.job_id.hex(),
            "compat": what.compat,
            "live": what.live,
            "ranks": [start.worker for start in self.starts if start.host == host.name],
            "rendezvous": {
                "HVDLITE_RENDEZVOUS": self.address,
                "HVDLITE_EPOCH": str(self.identity.epoch),
            },
        }
        if what.remote_launcher.carries_secrets:  # Otherwise the agent has all of this itself.
            part["folder"] = str(Path.cwd())
            part["command"] = list(what.command)
            part["environment"] = what.shared_environment(self.threads(host.name))
            part["rendezvous"]["HVDLITE_TOKEN"] = self.identity.token.hex()
        return part

    def start(self, start: Start) -> None:
        what = self.what
        name = socket.gethostname() if self.here(start.host) else start.host
        own = {
            **job_environment(start.placement, self.identity, self.address),
            **self.variables(start),
            "HVDLITE_HOSTNAME": name,
            "HOROVOD_HOSTNAME": name,
        }
        room_for_processes(max(what.ranks, len(self.supervisor.workers) + 1))
        files = None
        if what.output_folder is not None:
            files = output_files(what.output_folder, start.worker)
        try:
            worker = self._start_anywhere(start, own)
        except OSError:
            for file in files or ():
                os.close(file)
            raise
        said = None
        if what.verbose:
            joins = ", to join" if start.joiner else ""
            who = f"{self.noun_of(start.worker)} {start.worker}"
            said = f"{who}: {{}}{joins}: {shlex.join(what.command)}"
        self.supervisor.add(worker, files, said)

    def _start_anywhere(self, start: Start, own: dict[str, str]) -> AnyRank:
        what = self.what
        if not self.here(start.host):
            if not what.remote_launcher.carries_secrets:
                del own["HVDLITE_TOKEN"]
            sinks = [RESULT] * (what.stdin is not None) + [LIVE] * what.live
            return self.agents.hosts[start.host].launch(start, own, sinks)
        shared = what.shared_environment(self.threads(start.host))
        environment = {**shared, **own}
        if self._timeline is not None:
            environment["HVDLITE_TIMELINE_PARTS"] = str(self._timeline)
        return start_worker(
            start.worker,
            what.command,
            on_path(environment) if what.compat else environment,
            stdin=what.stdin,
            live=what.live,
        )

    def say_threads(self, text: str) -> None:
        """Say how many threads the processes get, unless the user chose."""
        if thread_caps(self.what.environment, 1):
            self.console.say(f"{text}; set OMP_NUM_THREADS to choose")


def _here(host: Host) -> bool:
    return is_here(host.name) if host.here is None else host.here


def first_processes(what: Description) -> list[Start]:
    """Return a process for each rank, whose number is the rank; ArgumentError without the slots."""
    hosts: Sequence[Host] = what.hosts or (Host("localhost", what.ranks),)
    host_of_rank = spread(hosts, what.ranks)
    names = [hosts[index].name for index in host_of_rank]
    places = place_as(host_of_rank)
    return [Start(one.rank, names[one.rank], one.local_rank, False, one) for one in places]


def _timeline_folder(job_id: bytes) -> Path | None:
    """Return a name of a folder for the ranks' parts of the timeline, which they create.

    None if no temporary folder can be written. The ranks then put the parts beside the timeline,
    and the parts that they cannot merge stay there.
    """
    try:
        return Path(tempfile.gettempdir()) / f"hvdlite-timeline-{job_id.hex()}"
    except FileNotFoundError:
        return None


def _merge_timeline(folder: Path, console: Console) -> None:
    """Merge the parts that the ranks could not merge, for example because one was killed."""
    try:
        merge_leftovers(folder)
    except (OSError, ArgumentError) as error:
        console.say(f"no timeline: {error}; its parts are in {folder}")
