"""Agent: starts and ends processes of a job on this host; the launcher starts it by ssh or srun.

The launcher runs `ssh host exec python -m hvdlite.launch.agent`. The agent reads commands from
stdin (`remote.messages`), and writes the output of the processes, and how each ended, to stdout. If
stdin ends, or brings nothing for long, the launcher or the connection to it is gone: the agent then
ends its processes and itself. ssh shows the launcher what the agent writes to stderr. In node mode
(`nodes`) the agent is an hvdlite-run that has connected to the launcher.

Other software may start the agent on its host, as Ray does: it calls `serve`, which connects to the
launcher, and starts the same program with that channel as stdin and stdout. Such an agent has
folder, command, environment and secret itself: they do not travel on the channel, which everybody
on the network can read.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import hvdlite
from hvdlite.compat import on_path
from hvdlite.errors import BootstrapError
from hvdlite.launch import shim
from hvdlite.launch.agent_loop import Agent, LauncherChannel
from hvdlite.launch.loop import SignalInbox
from hvdlite.launch.remote.messages import Kind, data_frame, frame
from hvdlite.launch.remote.ssh import SAFE_PATH
from hvdlite.launch.resources import available_cores
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.dial import reach
from hvdlite.rendezvous.handshake import Job, Role

_CHECK_SECONDS = 10.0  # how long the agent tries to reach the launcher's store
_DIAL_SECONDS = 10.0  # how long `serve` tries to reach the launcher
# The secret of an agent that `serve` has started: an import of hvdlite takes HVDLITE_TOKEN away.
_TOKEN = "HVDLITE_AGENT_TOKEN"
# Variables that belong to a host or a login, and not to the job.
_OWN_TO_HOST = frozenset(
    (
        "HOME",
        "HOSTNAME",
        "LOGNAME",
        "MAIL",
        "OLDPWD",
        "PWD",
        "SHELL",
        "SHLVL",
        "TMPDIR",
        "USER",
        "_",
    )
)
_OWN_TO_LOGIN = ("DBUS_", "DISPLAY", "SSH_", "XDG_")
# Slurm chooses other GPUs on each host; srun has passed the user's choice on, if there is one.
_OWN_TO_STEP = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def _refuse(channel: LauncherChannel, why: str) -> None:
    channel.send(frame(Kind.REFUSED, body=why.encode()))
    deadline = time.monotonic() + 2
    while channel.waiting and not channel.gone and time.monotonic() < deadline:
        channel.wait(0.1)


def environment_here(own: Mapping[str, str], sent: Mapping[str, str]) -> dict[str, str]:
    """Combine this login's environment with the user's, which the launcher sent."""
    # The user's variables win, except those that belong to a host, a login, or a step of Slurm.
    kept = [name for name in _OWN_TO_STEP if "SLURM_STEP_ID" in own and name in own]
    taken = {
        name: value
        for name, value in sent.items()
        if name not in _OWN_TO_HOST and name not in kept and not name.startswith(_OWN_TO_LOGIN)
    }
    return {**own, **taken}


def _check(part: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Check that the job can run here; without this check the ranks would fail less clearly."""
    # Raises OSError if the folder or the program is missing, or the launcher's store cannot be
    # reached.
    try:
        os.chdir(part["folder"])
    except OSError as error:
        raise OSError(f"the folder {part['folder']} is missing: {error.strerror}") from None
    program = part["command"][0]
    if shutil.which(program, path=environment.get("PATH", os.defpath)) is None:
        raise OSError(f"the program {program!r} is not found")
    own = {**part["rendezvous"], **part.get("own", {})}
    epoch = int(own["HVDLITE_EPOCH"])  # Cluster software may have started the job again.
    job = Job(bytes.fromhex(own["HVDLITE_TOKEN"]), bytes.fromhex(part["job_id"]), epoch)
    address = own["HVDLITE_RENDEZVOUS"]
    try:  # In an elastic job this reaches the registrar, to which a client of the store is nobody.
        reach("the launcher", address, job, 0, Role.STORE, Deadline(_CHECK_SECONDS))[0].close()
    except BootstrapError as error:
        raise OSError(
            f"it cannot reach the launcher at {address} ({error}); does a firewall forbid it, or "
            "do the hosts share another network interface? --network-interfaces names it"
        ) from None


def _receive_part(channel: LauncherChannel) -> dict[str, Any] | None:
    """Wait for this host's part of the job; return None if the launcher goes away instead."""
    stdin: bytes | None = None
    while True:
        for command in channel.receive():  # Also where it has ended: it may say why.
            if command.kind == Kind.STDIN:
                stdin = command.body
            elif command.kind == Kind.PART:
                return {**command.data(), "stdin": stdin}
        if channel.lost or channel.outcome is not None:
            return None
        channel.wait(1.0)


def _run(
    channel: LauncherChannel,
    part: Mapping[str, Any],
    environment: Mapping[str, str],
    inbox: SignalInbox,
) -> None:
    """Run this host's part of the job to its end. Raises OSError if the part cannot run here."""
    _check(part, environment)
    agent = Agent(channel, part, environment, inbox)
    channel.send(frame(Kind.READY))
    agent.run(())
    channel.send(frame(Kind.DONE))
    # The rest of the output may have to wait for a slow console, but not for a dead channel.
    while channel.waiting and not channel.lost:
        channel.wait(1.0)
        channel.receive()


def hello() -> bytes:
    """Describe this host to the launcher, in a message."""
    return data_frame(
        Kind.HELLO,
        0,
        {
            "version": hvdlite.__version__,
            "hostname": socket.gethostname(),
            "cores": available_cores(),
            "ssh": os.environ.get("SSH_CONNECTION", ""),
        },
    )


def attend(
    channel: LauncherChannel,
    environment: Callable[[dict[str, Any]], dict[str, str]],
    patient: bool = False,
    afterwards: Callable[[SignalInbox], None] = lambda inbox: None,
) -> bool:
    """Run this host's ranks, from the launcher's first message to the last one about them."""
    # `environment` builds the variables that all ranks here share from this host's part of the job,
    # which it may complete.
    # `patient` says whether the launcher may first wait for other hosts, without a word.
    # `afterwards` is called when the ranks here have ended. The inbox is the one that was open
    # while they ran, so that no signal is lost in between.
    # Returns whether the ranks ran to their end; otherwise the launcher is gone, or has learned why
    # not.
    channel.send(hello())
    while patient and not channel.hears_launcher(1.0):
        pass
    part = _receive_part(channel)
    if part is None:
        return False
    shared = environment(part)
    if part["compat"]:
        shared = on_path(shared)
    well = True
    with SignalInbox(passes_on=True) as inbox:
        try:
            _run(channel, part, shared, inbox)
        except OSError as error:
            _refuse(channel, str(error))
            well = False
        afterwards(inbox)
    return well


def serve(
    address: str,
    job: Job,
    number: int,
    variables: Mapping[str, str],
    without: Iterable[str],
    threads: int,
) -> int:
    """Connect to the launcher, run the agent of this host until it ends; return its status."""
    # The agent dies with the thread that calls this.
    # `threads` is the number of threads of each rank.
    # Raises BootstrapError if the launcher cannot be reached, or refuses.
    # Agents that ssh starts are there sooner without these imports.
    from hvdlite.launch.description import Description
    from hvdlite.launch.remote.dial_in import dial

    inner, outer = socket.socketpair()
    deadline = Deadline(_DIAL_SECONDS)
    channel = dial("the launcher", address, job, number, deadline, pair=(inner, outer))
    own = {name: value for name, value in os.environ.items() if name not in set(without)}
    shared = Description((), 1, {**own, **variables}).shared_environment(threads)
    agent = [sys.executable, "-m", "hvdlite.launch.agent"]
    with outer:
        process = subprocess.Popen(
            shim.tied(agent),
            stdin=outer.fileno(),
            stdout=outer.fileno(),
            start_new_session=True,
            env={**shared, _TOKEN: job.token.hex()},
        )
    try:
        return process.wait()
    finally:
        channel.end()


def _environment(part: dict[str, Any]) -> dict[str, str]:
    """Build the ranks' environment from that of this process, and from what the launcher sent."""
    if _TOKEN not in os.environ:
        os.environ.pop(SAFE_PATH, None)  # It was set for this process; ranks get the user's value.
        return environment_here(os.environ, part["environment"])
    part["folder"] = str(Path.cwd())
    part["command"] = [sys.executable, "-m", "hvdlite.launch.call"]
    part["own"] = {"HVDLITE_TOKEN": os.environ.pop(_TOKEN)}
    return dict(os.environ)


def main() -> int:
    """Run the agent; return its exit status."""
    return 0 if attend(LauncherChannel(), _environment) else 1


if __name__ == "__main__":
    sys.exit(main())
