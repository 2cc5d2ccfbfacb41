"""Run one job from its hosts to its end.

`Run` is what all jobs have in common: it reaches the other hosts, has the processes meet, starts
them here and there, and supervises them until nothing of the job is left.
"""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hvdlite.compat import on_path
from hvdlite.errors import ArgumentError
from hvdlite.launch.agents import Agents, Pulse
from hvdlite.launch.console import Console
from hvdlite.launch.control import AnyRank, Desk, Policy
from hvdlite.launch.description import Description, Outcome
from hvdlite.launch.hosts import Start
from hvdlite.launch.loop import GRACE, SignalInbox
from hvdlite.launch.process import job_environment, output_files, start_worker, thread_caps
from hvdlite.launch.remote_host import RemoteHost, more_sinks
from hvdlite.launch.supervisor import Supervisor
from hvdlite.launch.view import View
from hvdlite.rendezvous.descriptors import room_for_processes
from hvdlite.rendezvous.handshake import Job
from hvdlite.rendezvous.service import Service
from hvdlite.timeline.recorder import merge_leftovers

_SILENCE = 15.0  # seconds that a host may be silent until its processes count as dead
_PATIENCE = 30.0  # seconds that an agent may hear nothing before it ends its processes


class Run:
    """One run of a description; used once. A subclass says what is different in its kind of job."""

    def __init__(
        self, what: Description, console: Console, inbox: SignalInbox, view: View | None
    ) -> None:
        """Prepare a run; `view` takes the processes' samples of themselves."""
        self.what = what
        self.console = console
        self.inbox = inbox
        self.job = what.job or Job(secrets.token_bytes(32), secrets.token_bytes(16), epoch=0)
        self.pulse = Pulse(_SILENCE, _PATIENCE, GRACE)
        self.agents: Agents
        self.address = ""  # where the processes meet
        self._first: Sequence[Start] = ()
        self._view = view
        self._timeline = TimelineParts(self.job.job_id)

    # What is different in each kind of job.

    def first(self) -> Sequence[Start]:
        """Connect to the agents on other hosts, and return the first processes."""
        raise NotImplementedError

    def rendezvous(self, first: Sequence[Start]) -> Service:
        """Begin to serve the place where the processes meet."""
        raise NotImplementedError

    def here(self, host: str) -> bool:
        """Return whether a host is this machine, so that no agent is needed."""
        raise NotImplementedError

    def choose_threads(self) -> None:
        """Choose the threads of the processes, and say how many."""
        raise NotImplementedError

    def threads(self, host: str) -> int:
        """Return the number of threads of each process of a host."""
        raise NotImplementedError

    def variables(self, start: Start) -> Mapping[str, str]:
        """Return the variables of a process that only this kind of job has."""
        raise NotImplementedError

    def policy(self) -> Policy:
        """Return what this kind of job decides."""
        raise NotImplementedError

    def outcome(self, supervisor: Supervisor, met: Service) -> Outcome:
        """Show how the job ended, and return it."""
        raise NotImplementedError

    # What is the same.

    def run(self) -> Outcome:
        """Run the job to its end. Raises LaunchError if a host cannot take part."""
        # Raises OSError if a process could not be started here.
        # Raises KeyboardInterrupt if a signal came before the processes were started.
        what = self.what
        with Agents(what.remote_launcher, self.pulse, self.inbox.fd) as self.agents:
            self._first = self.first()
            with self.rendezvous(self._first) as rendezvous:
                self.address = rendezvous.address
                self.choose_threads()
                self.agents.begin(self.part, what.stdin)
                policy = self.policy()
                supervisor = Supervisor(self._desk(), policy)
                self.agents.attach(supervisor)
                try:
                    supervisor.run_first(self._first, partial(self._start, supervisor, policy))
                finally:
                    self._timeline.merge(self.console)
                outcome = self.outcome(supervisor, rendezvous)
                self.agents.conclude(outcome.status)
                return outcome

    def _desk(self) -> Desk:
        what = self.what
        return Desk(
            self.console,
            self.inbox,
            self.job.job_id,
            self.agents,
            timestamps=what.timestamps,
            reports=what.stdin is None,  # `hvdlite.run` raises instead.
            grace=what.grace,
            view=self._view,
        )

    def part(self, host: RemoteHost) -> dict[str, Any]:
        """Build another host's part of the job: what its processes have in common."""
        what = self.what
        part: dict[str, Any] = {
            "job_id": self.job.job_id.hex(),
            "compat": what.compat,
            "live": what.live,
            "ranks": [start.worker for start in self._first if start.host == host.name],
            "rendezvous": {
                "HVDLITE_RENDEZVOUS": self.address,
                "HVDLITE_EPOCH": str(self.job.epoch),
            },
        }
        if what.remote_launcher.carries_secrets:  # Otherwise the agent has all of this itself.
            part["folder"] = str(Path.cwd())
            part["command"] = list(what.command)
            part["environment"] = what.shared_environment(self.threads(host.name))
            part["rendezvous"]["HVDLITE_TOKEN"] = self.job.token.hex()
        return part

    def _start(self, supervisor: Supervisor, policy: Policy, start: Start) -> None:
        """Start a process, watch it and show its output."""
        what = self.what
        name = socket.gethostname() if self.here(start.host) else start.host
        own = {
            **job_environment(start.placement, self.job, self.address),
            **self.variables(start),
            "HVDLITE_HOSTNAME": name,
            "HOROVOD_HOSTNAME": name,
        }
        room_for_processes(max(what.ranks, len(supervisor.workers) + 1))
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
            who = f"{policy.noun_of(start.worker)} {start.worker}"
            said = f"{who}: {{}}{joins}: {shlex.join(what.command)}"
        supervisor.add(worker, files, said)

    def _start_anywhere(self, start: Start, own: dict[str, str]) -> AnyRank:
        what = self.what
        if self.here(start.host):
            return self._start_here(start, own)
        if not what.remote_launcher.carries_secrets:
            del own["HVDLITE_TOKEN"]
        sinks = more_sinks(what.stdin is not None, what.live)
        return self.agents.hosts[start.host].launch(start, own, sinks)

    def _start_here(self, start: Start, own: Mapping[str, str]) -> AnyRank:
        what = self.what
        shared = what.shared_environment(self.threads(start.host))
        environment = {**shared, **own, **self._timeline.environment}
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

    def say_threads(self, *texts: str) -> None:
        """Say how many threads the processes get, unless the user chose."""
        if thread_caps(self.what.environment, 1):
            for text in texts:
                self.console.say(f"{text}; set OMP_NUM_THREADS to choose")


class TimelineParts:
    """The parts of the timeline that the ranks of this host write."""

    def __init__(self, job_id: bytes) -> None:
        """Choose the folder; the ranks create it."""
        # There is none if no temporary folder can be written. The ranks then put the parts beside
        # the timeline, and the parts that they cannot merge stay there.
        self._folder: Path | None = None
        try:
            self._folder = Path(tempfile.gettempdir()) / f"hvdlite-timeline-{job_id.hex()}"
        except FileNotFoundError:
            pass

    @property
    def environment(self) -> dict[str, str]:
        """The variable that tells a rank the folder."""
        return {} if self._folder is None else {"HVDLITE_TIMELINE_PARTS": str(self._folder)}

    def merge(self, console: Console) -> None:
        """Merge the parts that the ranks could not merge, for example because one was killed."""
        if self._folder is None:
            return
        try:
            merge_leftovers(self._folder)
        except (OSError, ArgumentError) as error:
            console.say(f"no timeline: {error}; its parts are in {self._folder}")
