"""Run one job whose ranks, and their hosts, are known when it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdlite.launch.agents import rendezvous_address
from hvdlite.launch.console import Console
from hvdlite.launch.control import Policy
from hvdlite.launch.description import Description, Outcome, share_cores
from hvdlite.launch.hosts import Host, Placement, Start, is_here, place_as, spread
from hvdlite.launch.loop import SignalInbox
from hvdlite.launch.policies.fixed import FixedRanks
from hvdlite.launch.process import torch_master, torchrun_environment
from hvdlite.launch.resources import available_cores
from hvdlite.launch.run import Run
from hvdlite.launch.strangers import status_of_strangers
from hvdlite.launch.supervisor import Supervisor
from hvdlite.launch.view import View
from hvdlite.rendezvous.address import split_host
from hvdlite.rendezvous.service import Service
from hvdlite.rendezvous.store import Store


class FixedRun(Run):
    """One run of a job whose ranks, and their hosts, are known when it starts."""

    def __init__(
        self, what: Description, console: Console, inbox: SignalInbox, view: View | None
    ) -> None:
        """Place the ranks. Raises HostsError if the hosts have too few slots."""
        super().__init__(what, console, inbox, view)
        self.starts = first_processes(what)
        hosts = {host.name: host for host in what.hosts}
        self._names = list(dict.fromkeys(start.host for start in self.starts))
        self.elsewhere = [name for name in self._names if name in hosts and not _here(hosts[name])]
        self._threads: Mapping[str, int] = {}
        self._torch_master: Mapping[str, str] = {}

    def first(self) -> Sequence[Start]:
        """Connect to all other hosts, which have to answer, and return all ranks."""
        self.agents.greet(self.elsewhere, set(self.elsewhere).issubset)
        return self.starts

    def rendezvous(self, first: Sequence[Start]) -> Store:
        """Serve the store."""
        address = rendezvous_address(self.agents.present, self.what.interfaces)
        return Store.start(self.what.ranks, self.job, address)

    def here(self, host: str) -> bool:
        """Return whether a host is this machine."""
        return host not in self.elsewhere

    def choose_threads(self) -> None:
        """Share the cores of each host among its ranks."""
        cores = {host.name: int(host.hello["cores"]) for host in self.agents.present}
        hosts = [start.host for start in self.starts]
        self._threads, texts = share_cores(
            {name: hosts.count(name) for name in self._names},
            {name: cores.get(name, available_cores()) for name in self._names},
        )
        self.say_threads(*texts)

    def threads(self, host: str) -> int:
        """Return the number of threads of each rank of a host."""
        return self._threads[host]

    def variables(self, start: Start) -> Mapping[str, str]:
        """Return torch's own variables; none for scripts for Horovod."""
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
                self.what.environment, host, self.here(name), self.job.job_id
            )
        return torchrun_environment(start.placement, self._torch_master, self.job.job_id)

    def policy(self) -> Policy:
        """Return the policy."""
        return FixedRanks()

    def outcome(self, supervisor: Supervisor, met: Service) -> Outcome:
        """Show how the job ended, and return it."""
        assert isinstance(met, Store)
        status = supervisor.conclude() or status_of_strangers(self.what, met.met, self.console)
        order = tuple(range(self.what.ranks))
        return Outcome(status, supervisor.root, supervisor.results, order)


def _here(host: Host) -> bool:
    return is_here(host.name) if host.here is None else host.here


def first_processes(what: Description) -> list[Start]:
    """Return what a job starts with: a process for each rank, whose number is the rank."""
    # Raises HostsError if the hosts have too few slots.
    hosts: Sequence[Host] = what.hosts or (Host("localhost", what.ranks),)
    host_of_rank = spread(hosts, what.ranks)

    def start(one: Placement) -> Start:
        return Start(one.rank, hosts[host_of_rank[one.rank]].name, one.local_rank, False, one)

    return [start(one) for one in place_as(host_of_rank)]
