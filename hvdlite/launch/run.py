"""Run one job, of whatever kind, with what shows it to people."""

from __future__ import annotations

import socket
import time

from hvdlite.launch.console import Console
from hvdlite.launch.description import Description, Outcome
from hvdlite.launch.elastic.job import ElasticJob
from hvdlite.launch.job import Job
from hvdlite.launch.loop import SignalInbox
from hvdlite.launch.output import View
from hvdlite.launch.report import verdict
from hvdlite.launch.servers import ServersJob
from hvdlite.live.run import About, End


def run_job(what: Description) -> Outcome:
    """Run a job to its end, and return how it ended.

    Raises:
        ArgumentError: the numbers of an elastic job contradict each other, or the hosts have too
            few slots.
        DiscoveryError: the script for the hosts of an elastic job fails at its first run.
        LaunchError: another host cannot take part, or there are too few slots for too long.
        OSError: a rank could not be started here.
        KeyboardInterrupt: a signal came before the ranks were started.
    """
    kind = ElasticJob if what.elastic else ServersJob if what.servers else Job
    with Console() as console, SignalInbox(passes_on=True) as inbox:
        if not what.live:
            return kind(what, console, inbox, None).run()
        view = View(what.viewers, console)
        view.start(_about(what))
        end = End(1, "the launcher failed")
        try:
            job = kind(what, console, inbox, view)
            outcome = job.run()
            end = End(outcome.status, _why(job, outcome))
            return outcome
        except KeyboardInterrupt:
            end = End(130, "interrupted before the ranks ran")
            raise
        except Exception as error:
            end = End(1, str(error))
            raise
        finally:
            view.stop(end)


def _about(what: Description) -> About:
    names = [socket.gethostname() if host.here else host.name for host in what.hosts]
    hosts = tuple(dict.fromkeys(names)) or (socket.gethostname(),)
    return About(tuple(what.command), what.ranks, hosts, time.time())


def _why(job: Job, outcome: Outcome) -> str:
    root = outcome.root
    if root is None:
        return ""
    return f"{job.noun_of(root.rank)} {root.rank} (host {root.host}) {verdict(root)}"
