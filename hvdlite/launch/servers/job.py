"""Run one job with parameter servers from its description to its end.

Processes on other hosts are started one by one by the agents of elastic jobs, because workers that
die are started again. All processes meet in the launcher's store, where servers publish their
addresses.
"""

from __future__ import annotations

import secrets
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hvdlite.compat import on_path
from hvdlite.launch.description import Description, Outcome, Servers, share_cores
from hvdlite.launch.elastic.agents import AgentHost, Agents
from hvdlite.launch.elastic.fleet import Start
from hvdlite.launch.hosts import Host, is_here, spread
from hvdlite.launch.output.console import Console
from hvdlite.launch.process.inbox import SignalInbox
from hvdlite.launch.process.local import job_environment, output_files, start_worker, thread_caps
from hvdlite.launch.process.placement import place_as
from hvdlite.launch.process.resources import available_cores
from hvdlite.launch.remote.meeting import meeting_address
from hvdlite.launch.remote.remote import more_sinks
from hvdlite.launch.servers.supervisor import ServersSupervisor, kind_of
from hvdlite.launch.servers.worker_ranks import WorkerRanks
from hvdlite.launch.supervisor import AnyRank
from hvdlite.launch.view import View
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.store import Store

_SILENCE = 15.0  # seconds that a host may be silent until its processes count as dead


class ServersRun:
    """One run of a description of a job with parameter servers; used once."""

    def __init__(
        self,
        what: Description,
        servers: Servers,
        console: Console,
        inbox: SignalInbox,
        view: View | None,
    ) -> None:
        """Check the description; `view` takes the processes' samples of themselves.

        Raises:
            ArgumentError: numbers contradict each other.
            HostsError: the hosts have too few slots.
        """
        servers.check(what.ranks)
        self._what = what
        self._servers = servers
        self._console = console
        self._inbox = inbox
        self._view = view
        self._job = what.job or Job(secrets.token_bytes(32), secrets.token_bytes(16), epoch=0)
        self._first = first_processes(what)
        names = list(dict.fromkeys(start.host for start in self._first))
        self._elsewhere = [name for name in names if what.hosts and not is_here(name)]

    def run(self) -> Outcome:
        """Run the job to its end.

        Raises:
            LaunchError: a host cannot take part.
            KeyboardInterrupt: a signal came before the processes were started.
        """
        what, elsewhere = self._what, set(self._elsewhere)
        with Agents(what.way, _SILENCE, self._inbox.fd) as agents:
            agents.greet(self._elsewhere, enough=lambda names: elsewhere <= set(names))
            address = meeting_address(agents.present, what.interfaces)
            self._threads = self._share_cores(agents)
            with Store.start(what.ranks, self._job, address) as store:
                agents.begin(partial(self._part, store.address), what.stdin)
                return self._supervise(agents, store.address)

    def _share_cores(self, agents: Agents) -> Mapping[str, int]:
        """Return, by host, the number of threads per process, and say it."""
        names = [start.host for start in self._first]
        cores = {host.name: int(host.hello["cores"]) for host in agents.present}
        threads, texts = share_cores(
            {name: names.count(name) for name in dict.fromkeys(names)},
            {name: cores.get(name, available_cores()) for name in names},
        )
        if thread_caps(self._what.environment, 1):
            for text in texts:
                self._console.note(f"{text}; set OMP_NUM_THREADS to choose")
        return threads

    def _part(self, address: str, host: AgentHost) -> dict[str, Any]:
        """Build another host's part of the job."""
        what = self._what
        return {
            "job_id": self._job.job_id.hex(),
            "compat": what.compat,
            "live": what.live,
            "heartbeat": _SILENCE,
            "meeting": {
                "HVDLITE_RENDEZVOUS": address,
                "HVDLITE_TOKEN": self._job.token.hex(),
                "HVDLITE_EPOCH": str(self._job.epoch),
            },
            "folder": str(Path.cwd()),
            "command": list(what.command),
            "environment": what.shared_environment(self._threads[host.name]),
        }

    def _supervise(self, agents: Agents, rendezvous: str) -> Outcome:
        what, servers = self._what, self._servers
        ranks = WorkerRanks(
            self._first[servers.count :], servers.min_workers, servers.restarts, time.monotonic()
        )
        supervisor = ServersSupervisor(
            self._console,
            self._inbox,
            self._job.job_id,
            servers.count,
            ranks,
            agents,
            self._elsewhere,
            timestamps=what.timestamps,
            grace=what.grace,
            view=self._view,
        )
        agents.attach(supervisor)

        def start_one(start: Start) -> None:
            if start.host in self._elsewhere:
                own = self._own(rendezvous, start, start.host)
                host = agents.hosts[start.host]
                worker: AnyRank = host.launch(start, own, more_sinks(False, what.live))
            else:
                worker = self._start_here(rendezvous, start)
            self._show(supervisor, worker, start)

        supervisor.run_processes(self._first, start_one)
        return Outcome(supervisor.conclude(), supervisor.root, supervisor.results)

    def _own(self, rendezvous: str, start: Start, host: str) -> dict[str, str]:
        return {
            **job_environment(start.placement, self._job, rendezvous),
            **servers_environment(start, self._servers.count, host),
        }

    def _start_here(self, rendezvous: str, start: Start) -> AnyRank:
        what = self._what
        environment = {
            **what.shared_environment(self._threads[start.host]),
            **self._own(rendezvous, start, socket.gethostname()),
        }
        if what.compat:
            environment = on_path(environment)
        return start_worker(
            start.placement, what.command, environment, number=start.worker, live=what.live
        )

    def _show(self, supervisor: ServersSupervisor, worker: AnyRank, start: Start) -> None:
        """Watch a process and show its output."""
        what = self._what
        folder = what.output_folder
        supervisor.add(worker, None if folder is None else output_files(folder, start.worker))
        if what.verbose:
            kind = kind_of(start.worker, self._servers.count)
            where = f"pid {worker.pid}" if worker.pid else f"on {worker.host}"
            self._console.say(f"{kind} {start.worker}: {where}: {shlex.join(what.command)}")


def first_processes(what: Description) -> list[Start]:
    """Return what a job starts with: a process for each rank, whose number is the rank.

    Raises:
        HostsError: the hosts have too few slots.
    """
    hosts: Sequence[Host] = what.hosts or (Host("localhost", what.ranks),)
    host_of_rank = spread(hosts, what.ranks)
    return [
        Start(one.rank, hosts[host_of_rank[one.rank]].name, one.local_rank, False, one)
        for one in place_as(host_of_rank)
    ]


def servers_environment(start: Start, servers: int, host: str) -> dict[str, str]:
    """Build the variables that tell a process about the servers, and the name of its host."""
    environment = {
        "HVDLITE_SERVERS": str(servers),
        "HVDLITE_WORKER": str(start.worker),
        "HVDLITE_HOSTNAME": host,
        "HOROVOD_HOSTNAME": host,
    }
    if start.joiner:
        environment["HVDLITE_JOINER"] = "1"
    return environment
