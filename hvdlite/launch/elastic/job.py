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
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hvdlite.compat import on_path
from hvdlite.launch.description import Description, Elastic, Outcome, threads_text
from hvdlite.launch.elastic.actions import Limits
from hvdlite.launch.elastic.agents import AgentHost, Agents, AgentWorker
from hvdlite.launch.elastic.discovery import Discovery, ScriptHosts, StaticHosts
from hvdlite.launch.elastic.first_meeting import keep_alive
from hvdlite.launch.elastic.fleet import Fleet, Start
from hvdlite.launch.elastic.registrar import Registrar
from hvdlite.launch.elastic.supervisor import ElasticSupervisor, Timing
from hvdlite.launch.hosts import Host, HostProvider, is_here, spread
from hvdlite.launch.output.console import Console
from hvdlite.launch.process.inbox import SignalInbox
from hvdlite.launch.process.local import (
    Worker,
    job_environment,
    output_files,
    start_worker,
    thread_caps,
)
from hvdlite.launch.process.placement import threads_per_rank
from hvdlite.launch.process.resources import available_cores
from hvdlite.launch.remote.meeting import meeting_address, route_to
from hvdlite.launch.remote.remote import ALIVE_SECONDS, LaunchError, more_sinks
from hvdlite.launch.strangers import status_of_strangers
from hvdlite.launch.supervisor import AnyRank
from hvdlite.launch.timeline_parts import TimelineParts
from hvdlite.launch.view import View
from hvdlite.rendezvous.address import interface_address
from hvdlite.rendezvous.deadline import is_never
from hvdlite.rendezvous.handshake import Job

_ANYWHERE = "192.0.2.1"  # an address that stands for any other network; nothing is sent to it
_START_TIMEOUT = 60.0  # seconds, as `hvd.init()` waits by default


class ElasticRun:
    """One run of a description of an elastic job; used once."""

    def __init__(
        self,
        what: Description,
        elastic: Elastic,
        console: Console,
        inbox: SignalInbox,
        view: View | None = None,
    ) -> None:
        """Check the description; `view` takes the workers' samples of themselves.

        Raises:
            ArgumentError: numbers contradict each other.
            HostsError: the hosts of -H have too few slots.
        """
        elastic.check(what.ranks)
        self._what = what
        self._elastic = elastic
        self._console = console
        self._inbox = inbox
        self._view = view
        self._job = what.job or Job(secrets.token_bytes(32), secrets.token_bytes(16), epoch=0)
        self._timeline = TimelineParts(self._job.job_id)
        self._provider = self._choose_provider()

    def _choose_provider(self) -> HostProvider:
        what, elastic = self._what, self._elastic
        if what.provider is not None:
            return what.provider
        if elastic.script is not None:
            return ScriptHosts(elastic.script, elastic.slots_per_host or 1)
        most = max(what.ranks, elastic.max_np or 0)
        hosts: Sequence[Host] = what.hosts or (Host("localhost", most),)
        spread(hosts, what.ranks)
        slots = sum(host.slots for host in hosts)
        if slots < (elastic.max_np or 0):
            self._console.say(
                f"--max-np {elastic.max_np} is more than the {slots} slots of the hosts, which "
                "limit the job"
            )
        return StaticHosts(hosts)

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
        agents = Agents(what.way, elastic.heartbeat, self._inbox.fd)
        asks = Discovery(
            self._provider,
            interrupt_fd=self._inbox.fd,
            is_here=self._is_here,
            start_timeout=self._start_timeout(),
        )
        with asks as discovery, agents:
            first = self._first_workers(fleet, discovery, agents)
            address = self._address(agents)
            registrar = Registrar.start(self._job, self._limits(len(first)), address)
            try:
                self._threads = self._choose_threads(discovery)
                agents.begin(partial(self._part, registrar.address, discovery), what.stdin)
                return self._supervise(fleet, discovery, agents, registrar, first)
            finally:
                registrar.close()

    @property
    def _by_hand(self) -> bool:
        """Whether the user has named the hosts: then each has to come at first."""
        return self._what.provider is None and self._elastic.script is None

    def _is_here(self, name: str) -> bool:
        return self._what.provider is None and is_here(name)

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

    def _first_workers(self, fleet: Fleet, discovery: Discovery, agents: Agents) -> list[Start]:
        """Wait until there are slots for the first workers, and all their hosts have answered."""
        self._offer(fleet, discovery, agents, discovery.first)
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
            left = ALIVE_SECONDS if wake_at is None else min(wake_at - now, ALIVE_SECONDS)
            keep_alive(agents.present)
            ready, _, _ = select.select([discovery.fd, self._inbox.fd], [], [], left)
            if self._inbox.fd in ready and self._inbox.take():
                raise KeyboardInterrupt
            for news in discovery.take():
                if news.warning:
                    self._console.say(f"{news.warning}; the hosts stay as they were")
                if news.hosts is not None:
                    self._offer(fleet, discovery, agents, news.hosts)
        return first

    def _offer(
        self, fleet: Fleet, discovery: Discovery, agents: Agents, hosts: Mapping[str, int]
    ) -> None:
        """Offer hosts to the fleet; those of whose agents nothing is heard are not needed now."""
        others = [name for name in hosts if not discovery.here(name) and name not in agents.hosts]

        def enough(names: Collection[str]) -> bool:
            if self._by_hand:
                return set(others) <= set(names)
            slots = sum(n for name, n in hosts.items() if discovery.here(name) or name in names)
            return slots >= fleet.fewest_first

        missed = agents.greet(others, enough)
        fleet.offer(hosts, time.monotonic())
        present = [host.name for host in agents.present]
        for name in hosts:
            if not discovery.here(name):
                fleet.reach(name, name in present)
        for name, why in missed.items():
            self._console.say(f"host {name} takes no part now: {why}")
        for name in agents.hosts:
            if name not in present:
                self._console.say(f"host {name} has not answered yet; the job starts without it")

    def _address(self, agents: Agents) -> str | None:
        """Choose where the registrar listens; None for a Unix socket, if no other host can come."""
        interfaces = self._what.interfaces
        if agents.present:
            return meeting_address(agents.present, interfaces)
        if self._by_hand:
            return None
        if interfaces:
            return f"{interface_address(interfaces)}:0"
        try:
            return f"{route_to(_ANYWHERE)}:0"
        except OSError:
            return None  # There is no network.

    def _part(self, address: str, discovery: Discovery, host: AgentHost) -> dict[str, Any]:
        """Build another host's part of the job.

        Raises:
            LaunchError: the host cannot reach the registrar, which listens on a Unix socket.
        """
        if address.startswith("unix:"):
            raise LaunchError(
                "the job began without a network; --network-interfaces names one for later hosts"
            )
        what = self._what
        threads = threads_per_rank(int(host.hello["cores"]), discovery.last.get(host.name, 1))
        part: dict[str, Any] = {
            "job_id": self._job.job_id.hex(),
            "compat": what.compat,
            "live": what.live,
            "heartbeat": self._elastic.heartbeat,
            "meeting": {"HVDLITE_RENDEZVOUS": address},
        }
        if what.way.carries_secrets:
            part["folder"] = str(Path.cwd())
            part["command"] = list(what.command)
            part["environment"] = what.shared_environment(threads)
            part["meeting"]["HVDLITE_TOKEN"] = self._job.token.hex()
        return part

    def _choose_threads(self, discovery: Discovery) -> int:
        """Choose the number of threads of each worker here: a share of the cores for each slot."""
        here = sum(slots for name, slots in discovery.last.items() if discovery.here(name))
        slots = max(1, min(here, self._elastic.max_np or here))
        threads = threads_per_rank(available_cores(), slots)
        if here and thread_caps(self._what.environment, 1):
            text = threads_text(threads, available_cores(), slots)
            self._console.note(f"{text}; set OMP_NUM_THREADS to choose")
        return threads

    def _supervise(
        self,
        fleet: Fleet,
        discovery: Discovery,
        agents: Agents,
        registrar: Registrar,
        first: Sequence[Start],
    ) -> Outcome:
        what, elastic = self._what, self._elastic
        supervisor = ElasticSupervisor(
            self._console,
            self._inbox,
            self._job.job_id,
            fleet,
            registrar,
            discovery,
            agents,
            Timing(elastic.heartbeat, elastic.drain_timeout, what.grace),
            elastic.least(what.ranks),
            timestamps=what.timestamps,
            reports=what.stdin is None,  # `hvdlite.run` raises instead.
            view=self._view,
        )
        agents.attach(supervisor)

        def start_one(start: Start) -> None:
            if discovery.here(start.host):
                worker: AnyRank = self._start_here(registrar.address, start)
            else:
                worker = self._start_there(registrar.address, agents.hosts[start.host], start)
            self._show(supervisor, worker, start)

        try:
            supervisor.run_workers(first, start_one)
        finally:
            self._timeline.merge(self._console)
        status = supervisor.conclude()
        if supervisor.strangers:
            status = status_of_strangers(what, False, self._console)
        return Outcome(status, supervisor.root, supervisor.results, supervisor.members)

    def _own(self, rendezvous: str, start: Start, host: str) -> dict[str, str]:
        return {
            **job_environment(start.placement, self._job, rendezvous),
            **elastic_environment(start, self._elastic.heartbeat, host),
        }

    def _start_here(self, rendezvous: str, start: Start) -> Worker:
        what = self._what
        environment = {
            **what.shared_environment(self._threads),
            **self._own(rendezvous, start, socket.gethostname()),
            **self._timeline.environment,
        }
        if what.compat:
            environment = on_path(environment)
        return start_worker(
            start.placement,
            what.command,
            environment,
            stdin=what.stdin,
            number=start.worker,
            live=what.live,
        )

    def _start_there(self, rendezvous: str, host: AgentHost, start: Start) -> AgentWorker:
        own = self._own(rendezvous, start, start.host)
        if not self._what.way.carries_secrets:
            del own["HVDLITE_TOKEN"]
        return host.launch(start, own, more_sinks(self._what.stdin is not None, self._what.live))

    def _show(self, supervisor: ElasticSupervisor, worker: AnyRank, start: Start) -> None:
        """Watch a worker and show its output."""
        what = self._what
        folder = what.output_folder
        supervisor.add(worker, None if folder is None else output_files(folder, start.worker))
        if what.verbose:
            joins = ", to join" if start.joiner else ""
            where = f"pid {worker.pid}" if worker.pid else f"on {worker.host}"
            self._console.say(f"worker {start.worker}: {where}{joins}: {shlex.join(what.command)}")


def elastic_environment(start: Start, heartbeat: float, host: str) -> dict[str, str]:
    """Build the variables that tell a worker that its job is elastic, and the name of its host."""
    environment = {
        "HVDLITE_ELASTIC": "1",
        "HOROVOD_ELASTIC": "1",
        "HVDLITE_WORKER": str(start.worker),
        "HVDLITE_ELASTIC_HEARTBEAT": f"{heartbeat:g}",
        "HVDLITE_HOSTNAME": host,
        "HOROVOD_HOSTNAME": host,
    }
    if start.joiner:
        environment["HVDLITE_JOINER"] = "1"
    return environment
