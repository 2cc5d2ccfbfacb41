"""Run one job with parameter servers: its first ranks serve, and workers that die start again.

All processes meet in the launcher's store, where servers publish their addresses.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdlite.launch.console import Console
from hvdlite.launch.control import Policy
from hvdlite.launch.description import Description, Outcome, Servers
from hvdlite.launch.hosts import Start
from hvdlite.launch.loop import SignalInbox
from hvdlite.launch.policies.fixed_run import FixedRun
from hvdlite.launch.policies.restarting import RestartingWorkers
from hvdlite.launch.supervisor import Supervisor
from hvdlite.launch.view import View
from hvdlite.rendezvous.service import Service


class ServersRun(FixedRun):
    """One run of a description of a job with parameter servers; used once."""

    def __init__(
        self,
        what: Description,
        servers: Servers,
        console: Console,
        inbox: SignalInbox,
        view: View | None,
    ) -> None:
        """Check the description; `view` takes the processes' samples of themselves."""
        # Raises ArgumentError if numbers contradict each other.
        # Raises HostsError if the hosts have too few slots.
        servers.check(what.ranks)
        super().__init__(what, console, inbox, view)
        self._servers = servers

    def variables(self, start: Start) -> Mapping[str, str]:
        """Return the variables that tell a process about the servers."""
        variables = {
            "HVDLITE_SERVERS": str(self._servers.count),
            "HVDLITE_WORKER": str(start.worker),
        }
        if start.joiner:
            variables["HVDLITE_JOINER"] = "1"
        return variables

    def policy(self) -> Policy:
        """Return the policy."""
        servers = self._servers
        return RestartingWorkers(servers, self.starts[servers.count :], self.elsewhere)

    def outcome(self, supervisor: Supervisor, met: Service) -> Outcome:
        """Show how the job ended, and return it."""
        return Outcome(supervisor.conclude(), supervisor.root, supervisor.results)
