"""Node mode: hvdlite-run is started once on each node, and node 0 is the launcher.

The other nodes connect to node 0 and are its agents. All nodes know the secret of the job; the
connections between them are authenticated, but not encrypted. So neither the environment nor the
secret travels: each node's ranks have the environment of that node.
"""

from __future__ import annotations

import secrets
import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdlite.errors import BootstrapError
from hvdlite.launch.agent import LauncherChannel, attend, tell_signals
from hvdlite.launch.description import Description, ThisNode
from hvdlite.launch.hosts import Host, threads_per_rank
from hvdlite.launch.loop import SignalInbox
from hvdlite.launch.resources import available_cores
from hvdlite.launch.run import run_job
from hvdlite.launch.sealed import NodeLauncher, SealedChannel, dial, introduction
from hvdlite.rendezvous.address import is_loopback, listen, split_host
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.environment import JOB_ID_BYTES
from hvdlite.rendezvous.handshake import Job, OtherEpochError
from hvdlite.rendezvous.serving import bound_to, listen_patiently

_REMEDY = "give all nodes the address and a free port of node 0's host with --meet"
_AGAIN_SECONDS = 0.5  # until a node of another epoch is tried again, which may be a leftover
_LOOK_SECONDS = 0.25  # between looks at signals
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")


def run_node(here: ThisNode, what: Description) -> int:
    """Run this node's part of a job; return the exit status of the job."""
    # Raises BootstrapError if the nodes do not meet; OSError if the job cannot run on a node.
    # Raises KeyboardInterrupt if a signal came before the ranks were started.
    if here.nodes == 1:
        return run_job(what).status
    return _launch(here, what) if here.node == 0 else _join(here, what)


def _launch(here: ThisNode, what: Description) -> int:
    """Wait for the other nodes, and launch the job on all of them."""
    deadline = Deadline(here.start_timeout)
    address = bound_to(here.bind_address, here.meet)
    listener = listen_patiently(lambda: listen(address), address, "node 0", _REMEDY, deadline)
    _refuse_loopback(listener, address)
    remote_launcher = NodeLauncher(listener, here.job, here.nodes, here.start_timeout, here.meet)
    status, why = 130, ""
    try:
        nodes = remote_launcher.gather(deadline)
        own = Host(f"{socket.gethostname()} [node 0]", what.ranks, here=True)
        hosts = [own, *(Host(node.name, node.ranks, here=False) for node in nodes)]
        whole = replace(
            what,
            ranks=sum(host.slots for host in hosts),
            hosts=hosts,
            remote_launcher=remote_launcher,
            job=Job(here.token, secrets.token_bytes(JOB_ID_BYTES), here.epoch),
        )
        status = run_job(whole).status
        return status
    except Exception as error:
        status, why = 1, str(error)
        raise
    finally:
        remote_launcher.conclude(status, why)


def _refuse_loopback(listener: socket.socket, address: str) -> None:
    """Refuse a name that /etc/hosts maps to this host alone; the user may insist on 127.0.0.1."""
    # Raises BootstrapError if the name is such a one.
    host = split_host(address)[0]
    bound = str(listener.getsockname()[0])
    if is_loopback(f"{bound}:0") and host != bound and host not in _LOOPBACK_NAMES:
        listener.close()
        raise BootstrapError(
            f"node 0 would wait at {address}, which is {bound} here, and no other host can reach "
            f"that; {_REMEDY}, or set HVDLITE_BIND_ADDRESS on node 0"
        )


def _join(here: ThisNode, what: Description) -> int:
    """Connect to node 0, and be its agent."""
    sealed = _connect(here, what.ranks)
    channel = LauncherChannel(sealed.read_fd, sealed.write_fd)
    me = f"node {here.node} of {here.nodes}"

    def environment(part: dict[str, Any]) -> dict[str, str]:
        ranks = part["ranks"]
        print(
            f"hvdlite-run: {me} runs ranks {', '.join(map(str, ranks))}; node 0 shows their output",
            file=sys.stderr,
        )
        part["folder"], part["command"] = str(Path.cwd()), list(what.command)
        part["compat"] = what.compat
        hostname = socket.gethostname()
        part["own"] = {
            "HVDLITE_TOKEN": here.token.hex(),
            "HVDLITE_HOSTNAME": hostname,
            "HOROVOD_HOSTNAME": hostname,
        }
        return what.shared_environment(threads_per_rank(available_cores(), what.ranks))

    try:
        attend(channel, environment, patient=True, afterwards=partial(_wait_for_outcome, channel))
    finally:
        sealed.hang_up()
        sealed.end()
    if channel.outcome is None:
        raise BootstrapError(
            f"{me} has lost node 0 at {here.meet}: {sealed.said() or 'it is silent'}; its ranks "
            "here have been ended"
        )
    status, why = channel.outcome
    if status != 0:
        why = why or "node 0 shows the reason"
        print(f"hvdlite-run: {me}: the job ended with status {status}: {why}", file=sys.stderr)
    return status


def _wait_for_outcome(channel: LauncherChannel, inbox: SignalInbox) -> None:
    """Wait for the ranks of other nodes, which may go on when those of this node have ended."""
    while channel.outcome is None and not channel.lost:
        tell_signals(channel, inbox)
        channel.wait(_LOOK_SECONDS)
        channel.receive()


def _connect(here: ThisNode, ranks: int) -> SealedChannel:
    """Connect to node 0, which may not listen yet, or whose name may not be known yet."""
    # Raises BootstrapError if node 0 cannot be reached in time, or refuses this node.
    deadline = Deadline(here.start_timeout)
    while True:
        try:
            said = introduction(here.nodes, ranks)
            return dial("node 0", here.meet, here.job, here.node, deadline, said)
        except OtherEpochError:  # After a restart, the earlier node 0 may be about to end.
            if deadline.seconds_left < _AGAIN_SECONDS:
                raise
            deadline.sleep(_AGAIN_SECONDS)
        except BootstrapError as error:
            raise BootstrapError(
                f"{error}; is node 0's address {here.meet}, and is HVDLITE_TOKEN the same there?"
            ) from error
