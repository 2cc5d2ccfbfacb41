"""Run one job from its description to its end.

`run_job` places the ranks on the hosts, builds their environments, serves the store where they
meet, starts them here and on other hosts, and supervises them until nothing of the job is left.
"""

from __future__ import annotations

import secrets
import shlex
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hvdlite.compat import on_path
from hvdlite.launch.description import Description, Outcome, share_cores
from hvdlite.launch.elastic.job import ElasticRun
from hvdlite.launch.hosts import Host, is_here, spread
from hvdlite.launch.output.console import Console
from hvdlite.launch.process.inbox import SignalInbox
from hvdlite.launch.process.local import job_environment, output_files, start_worker, thread_caps
from hvdlite.launch.process.placement import Placement, place_as
from hvdlite.launch.process.resources import available_cores
from hvdlite.launch.process.torchrun import torch_master, torchrun_environment
from hvdlite.launch.remote.meeting import meeting_address, placement_numbers
from hvdlite.launch.remote.remote import RemoteHosts
from hvdlite.launch.servers.job import ServersRun
from hvdlite.launch.servers.supervisor import kind_of
from hvdlite.launch.strangers import status_of_strangers
from hvdlite.launch.supervisor import Supervisor
from hvdlite.launch.timeline_parts import TimelineParts
from hvdlite.launch.view import View
from hvdlite.live.viewer import About, End
from hvdlite.rendezvous.address import split_host
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.store import Store


class _Run:
    """One run of a description; used once."""

    def __init__(
        self, what: Description, console: Console, inbox: SignalInbox, view: View | None
    ) -> None:
        hosts = what.hosts or (Host("localhost", what.ranks),)
        host_of_rank = spread(hosts, what.ranks)
        self._what = what
        self._console = console
        self._placements = place_as(host_of_rank)
        # Placements number the hosts that get a rank, in order of first appearance.
        self._names = [hosts[index].name for index in dict.fromkeys(host_of_rank)]
        here = {host.name: host.here for host in hosts}
        self._here = [not what.hosts or _is_here(name, here[name]) for name in self._names]
        self._job = what.job or Job(secrets.token_bytes(32), secrets.token_bytes(16), epoch=0)
        self._inbox = inbox
        self._view = view
        self._timeline = TimelineParts(self._job.job_id)
        self._torch_master: dict[str, str] = {}

    @property
    def _remote_names(self) -> list[str]:
        return [name for name, here in zip(self._names, self._here, strict=True) if not here]

    def run(self) -> Outcome:
        what = self._what
        with RemoteHosts(self._remote_names, what.way, self._inbox) as remotes:
            remotes.greet()
            threads = self._threads(remotes)
            address = meeting_address(remotes.hosts, what.interfaces)
            with Store.start(what.ranks, self._job, address) as store:
                self._torch_master = self._choose_torch_master(remotes, store.address)
                self._start_remote(remotes, store.address, threads)
                supervisor = Supervisor(
                    self._console,
                    self._inbox,
                    self._job.job_id,
                    timestamps=what.timestamps,
                    reports=what.stdin is None,  # `hvdlite.run` raises instead.
                    grace=what.grace,
                    view=self._view,
                )
                try:
                    supervisor.run(self._starters(supervisor, remotes, store.address, threads))
                finally:
                    self._timeline.merge(self._console)
                status = supervisor.conclude() or status_of_strangers(
                    what, store.met, self._console
                )
                remotes.conclude(status)
                order = tuple(range(what.ranks))
                return Outcome(status, supervisor.root, supervisor.results, order)

    def _choose_torch_master(self, remotes: RemoteHosts, rendezvous: str) -> dict[str, str]:
        """Return torch's own variables for all ranks; none for scripts for Horovod.

        horovodrun sets no variables of torch. Trainers then leave the reduction to Horovod's
        optimizer, and do not reduce a second time.
        """
        if self._what.compat:
            return {}
        here = self._here[0]
        if not remotes.hosts:
            host = "127.0.0.1"
        elif here:
            host = split_host(rendezvous)[0]
        else:
            host = next(one for one in remotes.hosts if one.name == self._names[0]).address()
        return torch_master(self._what.environment, host, here, self._job.job_id)

    def _torchs_variables(self, placement: Placement) -> dict[str, str]:
        master = self._torch_master
        return torchrun_environment(placement, master, self._job.job_id) if master else {}

    def _placements_of(self, name: str) -> list[Placement]:
        return [placement for placement in self._placements if self._names[placement.host] == name]

    def _threads(self, remotes: RemoteHosts) -> list[int]:
        """Return, by host, the number of threads per rank; print it once for equal hosts."""
        cores = {remote.name: int(remote.hello["cores"]) for remote in remotes.hosts}
        threads, texts = share_cores(
            {name: len(self._placements_of(name)) for name in self._names},
            {name: cores.get(name, available_cores()) for name in self._names},
        )
        if thread_caps(self._what.environment, 1):
            for text in texts:
                self._console.note(f"{text}; set OMP_NUM_THREADS to choose")
        return [threads[name] for name in self._names]

    def _own(self, placement: Placement, rendezvous: str) -> dict[str, str]:
        """Build the variables that are different for every rank."""
        name = self._names[placement.host]
        name = socket.gethostname() if self._here[placement.host] else name
        return {
            **job_environment(placement, self._job, rendezvous),
            **self._torchs_variables(placement),
            "HVDLITE_HOSTNAME": name,
            "HOROVOD_HOSTNAME": name,
        }

    def _start_remote(self, remotes: RemoteHosts, rendezvous: str, threads: Sequence[int]) -> None:
        what = self._what
        for remote in remotes.hosts:
            placements = self._placements_of(remote.name)
            ranks = {placement.rank: self._own(placement, rendezvous) for placement in placements}
            part = {
                "job_id": self._job.job_id.hex(),
                "compat": what.compat,
                "live": what.live,
                "ranks": ranks,
                "slots": {placement.rank: placement_numbers(placement) for placement in placements},
            }
            if what.way.carries_secrets:
                part["folder"] = str(Path.cwd())
                part["command"] = list(what.command)
                part["environment"] = what.shared_environment(threads[placements[0].host])
            else:  # The agent has folder, command, environment and secret itself.
                for own in ranks.values():
                    del own["HVDLITE_TOKEN"]
            remote.start(part, placements, what.stdin)
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
                    **what.shared_environment(threads[placement.host]),
                    **self._own(placement, rendezvous),
                }
                environment |= self._timeline.environment
                if what.compat:
                    environment = on_path(environment)
                worker = start_worker(
                    placement, what.command, environment, stdin=what.stdin, live=what.live
                )
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


def _is_here(name: str, known: bool | None) -> bool:
    return is_here(name) if known is None else known


def run_job(what: Description) -> Outcome:
    """Run a job to its end, and return how it ended.

    Raises:
        ArgumentError: the numbers of an elastic job contradict each other.
        HostsError: the hosts have too few slots.
        LaunchError: another host cannot take part.
        OSError: a rank could not be started here.
        KeyboardInterrupt: a signal came before the ranks were started.
    """
    with Console() as console, SignalInbox(passes_on=True) as inbox:
        if not what.live:
            return _run(what, console, inbox, None)
        view = View(what.viewers, console)
        view.start(_about(what))
        end = End(1, "the launcher failed")
        try:
            outcome = _run(what, console, inbox, view)
            end = End(outcome.status, _why(what, outcome))
            return outcome
        except KeyboardInterrupt:
            end = End(130, "interrupted before the ranks ran")
            raise
        except Exception as error:
            end = End(1, str(error))
            raise
        finally:
            view.stop(end)


def _run(what: Description, console: Console, inbox: SignalInbox, view: View | None) -> Outcome:
    if what.elastic is not None:
        return ElasticRun(what, what.elastic, console, inbox, view).run()
    if what.servers is not None:
        return ServersRun(what, what.servers, console, inbox, view).run()
    return _Run(what, console, inbox, view).run()


def _about(what: Description) -> About:
    names = [socket.gethostname() if host.here else host.name for host in what.hosts]
    hosts = tuple(dict.fromkeys(names)) or (socket.gethostname(),)
    return About(tuple(what.command), what.ranks, hosts, time.time())


def _why(what: Description, outcome: Outcome) -> str:
    root = outcome.root
    if root is None:
        return ""
    noun = "rank" if what.elastic is None else "worker"
    if what.servers is not None:
        noun = kind_of(root.rank, what.servers.count)
    return f"{noun} {root.rank} (host {root.host}) failed first: {root.ending}"
