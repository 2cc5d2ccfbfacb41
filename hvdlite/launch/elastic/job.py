"""Run one elastic job from its description to its end.

`ElasticRun` finds the hosts, waits for slots, starts the registrar, which takes the place of the
store, and supervises workers that come and go until nothing of the job is left.
"""

from __future__ import annotations

import secrets
import select
import shlex
import socket
import time
from collections.abc import Sequence

from hvdlite.bootstrap.deadline import is_never
from hvdlite.bootstrap.handshake import Job
from hvdlite.compat import on_path
from hvdlite.launch.description import Description, Elastic, Outcome, threads_text
from hvdlite.launch.elastic.actions import Limits
from hvdlite.launch.elastic.discovery import Discovery, HostProvider, ScriptHosts, StaticHosts
from hvdlite.launch.elastic.fleet import Fleet, Start
from hvdlite.launch.elastic.registrar import Registrar
from hvdlite.launch.elastic.supervisor import ElasticSupervisor, Timing
from hvdlite.launch.hosts import Host, is_here, spread
from hvdlite.launch.output.console import Console
from hvdlite.launch.process.inbox import SignalInbox
from hvdlite.launch.process.local import job_environment, output_files, start_worker, thread_caps
from hvdlite.launch.process.placement import threads_per_rank
from hvdlite.launch.process.resources import available_cores
from hvdlite.launch.remote.remote import LaunchError
from hvdlite.launch.timeline_parts import TimelineParts

_START_TIMEOUT = 60.0  # seconds, as `hvd.init()` waits by default


class ElasticRun:
    """One run of a description of an elastic job; used once."""

    def __init__(
        self, what: Description, elastic: Elastic, console: Console, inbox: SignalInbox
    ) -> None:
        """Check the description.

        Raises:
            ArgumentError: numbers contradict each other.
            HostsError: the hosts of -H have too few slots.
        """
        elastic.check(what.ranks)
        self._what = what
        self._elastic = elastic
        self._console = console
        self._inbox = inbox
        self._job = Job(secrets.token_bytes(32), secrets.token_bytes(16), epoch=0)
        self._timeline = TimelineParts(self._job.job_id)
        self._provider = self._choose_provider()

    def _choose_provider(self) -> HostProvider:
        what, elastic = self._what, self._elastic
        if elastic.script is not None:
            return ScriptHosts(elastic.script, elastic.slots_per_host or 1, what.ssh)
        most = max(what.ranks, elastic.max_np or 0)
        hosts: Sequence[Host] = what.hosts or (Host("localhost", most),)
        spread(hosts, what.ranks)
        return StaticHosts(hosts, what.ssh)

    def run(self) -> Outcome:
        """Run the job to its end.

        Raises:
            DiscoveryError: the script for the hosts fails at its first run.
            LaunchError: a host cannot take part, or there are too few slots for too long.
            KeyboardInterrupt: a signal came before the workers were started.
        """
        what, elastic = self._what, self._elastic
        fleet = Fleet(
            what.ranks,
            elastic.least(what.ranks),
            elastic.max_np,
            elastic.timeout,
            elastic.cooldown,
        )
        with Discovery(OwnHost(self._provider)) as discovery:
            first = self._first_workers(fleet, discovery)
            self._threads = self._choose_threads(discovery.first, len(first))
            registrar = Registrar.start(self._job, self._limits(len(first)))
            try:
                return self._supervise(fleet, discovery, registrar, first)
            finally:
                registrar.close()

    def _limits(self, first: int) -> Limits:
        elastic = self._elastic
        return Limits(
            np=first,
            min_np=elastic.least(self._what.ranks),
            max_np=elastic.max_np,
            elastic_timeout=elastic.timeout,
            reset_limit=elastic.reset_limit,
            heartbeat=elastic.heartbeat,
            start_timeout=self._start_timeout(),
        )

    def _start_timeout(self) -> float:
        variables = self._what.environment
        given = variables.get("HVDLITE_START_TIMEOUT") or variables.get("HOROVOD_START_TIMEOUT")
        try:
            seconds = float(given or _START_TIMEOUT)
        except ValueError:
            return _START_TIMEOUT  # The workers refuse it, and name the variable.
        return 0.0 if is_never(seconds) else seconds

    def _first_workers(self, fleet: Fleet, discovery: Discovery) -> list[Start]:
        """Wait until there are slots for the first workers."""
        fleet.offer(discovery.first, time.monotonic())
        waits = False
        while not (first := fleet.due(time.monotonic())):
            if not waits:
                self._console.say("waiting for slots: there are too few to start")
                waits = True
            now = time.monotonic()
            shortage = fleet.shortage(now)
            if shortage is not None:
                raise LaunchError(shortage)
            wake_at = fleet.wake_at(now)
            left = None if wake_at is None else wake_at - now
            ready, _, _ = select.select([discovery.fd, self._inbox.fd], [], [], left)
            if self._inbox.fd in ready and self._inbox.take():
                raise KeyboardInterrupt
            for news in discovery.take():
                if news.warning:
                    self._console.say(f"{news.warning}; the hosts stay as they were")
                if news.hosts is not None:
                    fleet.offer(news.hosts, time.monotonic())
        return first

    def _choose_threads(self, hosts: dict[str, int], first: int) -> int:
        """Choose the number of threads of each worker: a share of the cores for each slot."""
        most = self._elastic.max_np or sum(hosts.values())
        slots = max(first, min(sum(hosts.values()), most))
        threads = threads_per_rank(available_cores(), slots)
        if thread_caps(self._what.environment, 1):
            text = threads_text(threads, available_cores(), slots)
            self._console.say(f"{text}; set OMP_NUM_THREADS to choose")
        return threads

    def _supervise(
        self, fleet: Fleet, discovery: Discovery, registrar: Registrar, first: Sequence[Start]
    ) -> Outcome:
        what, elastic = self._what, self._elastic
        supervisor = ElasticSupervisor(
            self._console,
            self._inbox,
            self._job.job_id,
            fleet,
            registrar,
            discovery,
            Timing(elastic.heartbeat, elastic.drain_timeout, what.grace),
            elastic.least(what.ranks),
            timestamps=what.timestamps,
            reports=what.stdin is None,  # `hvdlite.run` raises instead.
        )
        try:
            supervisor.run_workers(
                first, lambda start: self._start(supervisor, registrar.address, start)
            )
        finally:
            self._timeline.merge(self._console)
        status = supervisor.conclude()
        return Outcome(status, supervisor.root, supervisor.results, supervisor.members)

    def _start(self, supervisor: ElasticSupervisor, rendezvous: str, start: Start) -> None:
        """Start one worker on this host."""
        what = self._what
        files = None
        if what.output_folder is not None:
            files = output_files(what.output_folder, start.worker)
        environment = {
            **what.shared_environment(self._threads),
            **job_environment(start.placement, self._job, rendezvous),
            **elastic_environment(start, self._elastic.heartbeat),
            **self._timeline.environment,
        }
        if what.compat:
            environment = on_path(environment)
        worker = start_worker(
            start.placement, what.command, environment, stdin=what.stdin, number=start.worker
        )
        supervisor.add(worker, files)
        if what.verbose:
            joins = ", to join" if start.joiner else ""
            self._console.say(
                f"worker {start.worker}: pid {worker.pid}{joins}: {shlex.join(what.command)}"
            )


def elastic_environment(start: Start, heartbeat: float) -> dict[str, str]:
    """Build the variables that tell a worker of this host that its job is elastic."""
    name = socket.gethostname()
    environment = {
        "HVDLITE_ELASTIC": "1",
        "HOROVOD_ELASTIC": "1",
        "HVDLITE_WORKER": str(start.worker),
        "HVDLITE_ELASTIC_HEARTBEAT": f"{heartbeat:g}",
        "HVDLITE_HOSTNAME": name,
        "HOROVOD_HOSTNAME": name,
    }
    if start.joiner:
        environment["HVDLITE_JOINER"] = "1"
    return environment


class OwnHost:
    """A provider that passes on the hosts of another one, as long as they are this machine."""

    def __init__(self, provider: HostProvider) -> None:
        """Wrap a provider."""
        self._provider = provider
        self._here: set[str] = set()

    def hosts(self) -> dict[str, int]:
        """Return the slots of this machine.

        Raises:
            DiscoveryError: the hosts are not known now.
            LaunchError: another host is among them.
        """
        hosts = dict(self._provider.hosts())
        for name in hosts:
            if name not in self._here and not is_here(name):
                raise LaunchError(
                    f"elastic jobs run on this host alone so far, and {name} is another one"
                )
            self._here.add(name)
        return hosts

    def agent_command(self, host: str) -> list[str]:
        """Return the command of the provider."""
        return self._provider.agent_command(host)
