"""Run one elastic job: its hosts may change, and its workers come and go.

`ElasticRun` finds the hosts, waits for slots, and starts the registrar, which takes the place of
the store.
"""

from __future__ import annotations

import select
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvdlite.launch.agents import (
    ALIVE_SECONDS,
    Pulse,
    keep_alive,
    rendezvous_address,
    route_to,
)
from hvdlite.launch.channels import LaunchError
from hvdlite.launch.console import Console
from hvdlite.launch.control import Policy
from hvdlite.launch.description import Description, Elastic, Outcome, threads_text
from hvdlite.launch.elastic.actions import Limits
from hvdlite.launch.elastic.discovery import Discovery, ScriptHosts, StaticHosts
from hvdlite.launch.elastic.registrar import Registrar
from hvdlite.launch.hosts import Host, HostProvider, Start, is_here, spread, threads_per_rank
from hvdlite.launch.loop import SignalInbox
from hvdlite.launch.policies.elastic import ElasticMembership
from hvdlite.launch.policies.fleet import Fleet
from hvdlite.launch.remote_host import RemoteHost
from hvdlite.launch.resources import available_cores
from hvdlite.launch.run import Run
from hvdlite.launch.strangers import status_of_strangers
from hvdlite.launch.supervisor import Supervisor
from hvdlite.launch.view import View
from hvdlite.rendezvous.address import interface_address
from hvdlite.rendezvous.deadline import is_never
from hvdlite.rendezvous.registrar_client import PATIENCE
from hvdlite.rendezvous.service import Service

_ANYWHERE = "192.0.2.1"  # an address that stands for any other network; nothing is sent to it
_START_TIMEOUT = 60.0  # seconds, as `hvd.init()` waits by default


class ElasticRun(Run):
    """One run of a description of an elastic job; used once."""

    def __init__(
        self,
        what: Description,
        elastic: Elastic,
        console: Console,
        inbox: SignalInbox,
        view: View | None = None,
    ) -> None:
        """Check the description; `view` takes the workers' samples of themselves."""
        # Raises ArgumentError if numbers contradict each other.
        # Raises HostsError if the hosts of -H have too few slots.
        elastic.check(what.ranks)
        super().__init__(what, console, inbox, view)
        self.job = replace(self.job, epoch=0)  # The epochs of such a job are those of its worlds.
        self._elastic = elastic
        # The launcher has given silent workers up long before their agent kills them.
        heartbeat = elastic.heartbeat
        self.pulse = Pulse(heartbeat, PATIENCE * heartbeat, grace=0.0)
        self._provider = self._choose_provider()
        self._fleet = Fleet(
            what.ranks,
            elastic.least(what.ranks),
            elastic.max_np,
            elastic.timeout,
            elastic.cooldown,
        )
        self._discovery: Discovery
        self._registrar: Registrar
        self._policy: ElasticMembership
        self._threads = 1

    def _choose_provider(self) -> HostProvider:
        what, elastic = self.what, self._elastic
        if what.provider is not None:
            return what.provider
        if elastic.script is not None:
            return ScriptHosts(elastic.script, elastic.slots_per_host or 1)
        most = max(what.ranks, elastic.max_np or 0)
        hosts: Sequence[Host] = what.hosts or (Host("localhost", most),)
        spread(hosts, what.ranks)
        slots = sum(host.slots for host in hosts)
        if slots < (elastic.max_np or 0):
            self.console.say(
                f"--max-np {elastic.max_np} is more than the {slots} slots of the hosts, which "
                "limit the job"
            )
        return StaticHosts(hosts)

    def run(self) -> Outcome:
        """Run the job to its end."""
        # Raises DiscoveryError if the script for the hosts fails at its first run.
        # Raises LaunchError if a host cannot take part, or there are too few slots for too long.
        # Raises KeyboardInterrupt if a signal came before the workers were started.
        asks = Discovery(
            self._provider,
            interrupt_fd=self.inbox.fd,
            is_here=self._is_here,
            start_timeout=self._start_timeout(),
        )
        with asks as self._discovery:
            return super().run()

    @property
    def _by_hand(self) -> bool:
        """Whether the user has named the hosts: then each has to come at first."""
        return self.what.provider is None and self._elastic.script is None

    def _is_here(self, name: str) -> bool:
        known = {host.name: host.here for host in self.what.hosts}.get(name)
        return self.what.provider is None and (is_here(name) if known is None else known)

    def _limits(self, first: int) -> Limits:
        elastic = self._elastic
        return Limits(
            np=first,
            min_np=elastic.least(self.what.ranks),
            max_np=elastic.max_np,
            elastic_timeout=elastic.timeout,
            reset_limit=elastic.reset_limit,
            heartbeat=elastic.heartbeat,
            silence=PATIENCE * elastic.heartbeat,
            start_timeout=self._start_timeout(),
        )

    def _start_timeout(self) -> float:
        variables = self.what.environment
        given = variables.get("HVDLITE_START_TIMEOUT") or variables.get("HOROVOD_START_TIMEOUT")
        try:
            seconds = float(given or _START_TIMEOUT)
        except ValueError:
            return _START_TIMEOUT  # The workers refuse it, and name the variable.
        return 0.0 if is_never(seconds) else seconds

    def first(self) -> Sequence[Start]:
        """Wait until there are slots for the first workers, and all their hosts have answered."""
        fleet, discovery = self._fleet, self._discovery
        self._offer(discovery.first)
        waits = False
        while not (first := fleet.due(time.monotonic())):
            if not waits:
                self.console.say("waiting for slots: there are too few to start")
                waits = True
            now = time.monotonic()
            shortage = fleet.shortage(now)
            if shortage is not None:
                raise LaunchError(shortage)
            wake_at = fleet.wake_at(now)
            left = ALIVE_SECONDS if wake_at is None else min(wake_at - now, ALIVE_SECONDS)
            keep_alive(self.agents.present)
            ready, _, _ = select.select([discovery.fd, self.inbox.fd], [], [], left)
            if self.inbox.fd in ready and self.inbox.take():
                raise KeyboardInterrupt
            for news in discovery.take():
                if news.warning:
                    self.console.say(f"{news.warning}; the hosts stay as they were")
                if news.hosts is not None:
                    self._offer(news.hosts)
        return first

    def _offer(self, hosts: Mapping[str, int]) -> None:
        """Offer hosts to the fleet; those of whose agents nothing is heard are not needed now."""
        fleet, discovery, agents = self._fleet, self._discovery, self.agents
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
            self.console.say(f"host {name} takes no part now: {why}")
        for name in agents.hosts:
            if name not in present:
                self.console.say(
                    f"host {name} has not answered yet; the job starts without it, and its ranks "
                    "join when it does"
                )

    def rendezvous(self, first: Sequence[Start]) -> Registrar:
        """Start the registrar."""
        self._registrar = Registrar.start(self.job, self._limits(len(first)), self._address())
        return self._registrar

    def _address(self) -> str | None:
        """Choose where the registrar listens; None for a Unix socket, if no other host can come."""
        interfaces = self.what.interfaces
        if self.agents.present:
            return rendezvous_address(self.agents.present, interfaces)
        if self._by_hand:
            return None
        if interfaces:
            return f"{interface_address(interfaces)}:0"
        try:
            return f"{route_to(_ANYWHERE)}:0"
        except OSError:
            return None  # There is no network.

    def here(self, host: str) -> bool:
        """Return whether a host is this machine."""
        return self._discovery.here(host)

    def part(self, host: RemoteHost) -> dict[str, Any]:
        """Build another host's part of the job."""
        # Raises LaunchError if the host cannot reach the registrar, which listens on a Unix socket.
        if self.address.startswith("unix:"):
            raise LaunchError(
                "the job began without a network; --network-interfaces names one for later hosts"
            )
        return super().part(host)

    def threads(self, host: str) -> int:
        """Return the number of threads of each worker of a host: a share for each slot."""
        if self.here(host):
            return self._threads
        cores = int(self.agents.hosts[host].hello["cores"])
        return threads_per_rank(cores, self._discovery.last.get(host, 1))

    def choose_threads(self) -> None:
        """Choose the threads of each worker here: a share of the cores for each slot."""
        slots_of = self._discovery.last
        here = sum(slots for name, slots in slots_of.items() if self.here(name))
        slots = max(1, min(here, self._elastic.max_np or here))
        self._threads = threads_per_rank(available_cores(), slots)
        if here:
            self.say_threads(threads_text(self._threads, available_cores(), slots))

    def variables(self, start: Start) -> Mapping[str, str]:
        """Return the variables that tell a worker that its job is elastic."""
        return elastic_variables(start, self._elastic.heartbeat)

    def policy(self) -> Policy:
        """Return the policy."""
        least = self._elastic.least(self.what.ranks)
        self._policy = ElasticMembership(
            self._elastic, least, self._fleet, self._registrar, self._discovery
        )
        return self._policy

    def outcome(self, supervisor: Supervisor, met: Service) -> Outcome:
        """Show how the job ended, and return it."""
        policy = self._policy
        policy.take_events()
        joined = not policy.strangers
        status = supervisor.conclude() or status_of_strangers(self.what, joined, self.console)
        return Outcome(status, supervisor.root, supervisor.results, policy.members)


def elastic_variables(start: Start, heartbeat: float) -> dict[str, str]:
    """Build the variables that tell a worker that its job is elastic."""
    variables = {
        "HVDLITE_ELASTIC": "1",
        "HOROVOD_ELASTIC": "1",
        "HVDLITE_WORKER": str(start.worker),
        "HVDLITE_ELASTIC_HEARTBEAT": f"{heartbeat:g}",
    }
    if start.joiner:
        variables["HVDLITE_JOINER"] = "1"
    return variables
