"""Run one job, of whatever kind, with what shows it to people."""

from __future__ import annotations

import socket
import time

from hvdlite.launch.console import Console
from hvdlite.launch.description import Description, Outcome
from hvdlite.launch.elastic.job import ElasticRun
from hvdlite.launch.job import FixedRun
from hvdlite.launch.loop import SignalInbox
from hvdlite.launch.output import View
from hvdlite.launch.report import verdict
from hvdlite.launch.servers import ServersRun, kind_of
from hvdlite.live.run import About, End


def run_job(what: Description) -> Outcome:
    """Run a job to its end, and return how it ended."""
    # Raises ArgumentError if the numbers of an elastic job contradict each other.
    # Raises HostsError if the hosts have too few slots.
    # Raises LaunchError if another host cannot take part.
    # Raises OSError if a rank could not be started here.
    # Raises KeyboardInterrupt if a signal came before the ranks were started.
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
    return FixedRun(what, console, inbox, view).run()


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
    return f"{noun} {root.rank} (host {root.host}) {verdict(root)}"
