"""An agent that other software has started on its host, as Ray does.

`serve` runs in a process of that software. It connects to the launcher, proves that it knows the
secret of the job, and starts the agent (`main`) with the channel as stdin and stdout. The agent has
folder, command, environment and secret itself: they do not travel on the channel, which everybody
on the network can read.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvdlite.launch.agent import attend
from hvdlite.launch.agent_loop import LauncherChannel
from hvdlite.launch.description import Description
from hvdlite.launch.process import shim
from hvdlite.launch.remote.dial_in import dial
from hvdlite.rendezvous.deadline import Deadline
from hvdlite.rendezvous.handshake import Job

_DIAL_SECONDS = 10.0
_AGENTS_TOKEN = "HVDLITE_AGENT_TOKEN"  # an import of hvdlite takes HVDLITE_TOKEN away


def serve(
    address: str,
    job: Job,
    number: int,
    variables: Mapping[str, str],
    without: Iterable[str],
    threads: int,
) -> int:
    """Run the agent of this host until it ends; return its exit status."""
    # The agent dies with the thread that calls this.
    # `threads` is the number of threads of each rank.
    # Raises BootstrapError if the launcher cannot be reached, or refuses.
    inner, outer = socket.socketpair()
    deadline = Deadline(_DIAL_SECONDS)
    channel = dial("the launcher", address, job, number, deadline, pair=(inner, outer))
    own = {name: value for name, value in os.environ.items() if name not in set(without)}
    shared = Description((), 1, {**own, **variables}).shared_environment(threads)
    agent = [sys.executable, "-m", "hvdlite.launch.dialling"]
    with outer:
        process = subprocess.Popen(
            shim.tied(agent),
            stdin=outer.fileno(),
            stdout=outer.fileno(),
            start_new_session=True,
            env={**shared, _AGENTS_TOKEN: job.token.hex()},
        )
    try:
        return process.wait()
    finally:
        channel.end()


def _complete(part: dict[str, Any]) -> dict[str, str]:
    """Add to the part of the job what this host has itself; return the ranks' environment."""
    part["folder"] = str(Path.cwd())
    part["command"] = [sys.executable, "-m", "hvdlite.launch.call"]
    part["own"] = {"HVDLITE_TOKEN": os.environ.pop(_AGENTS_TOKEN)}
    return dict(os.environ)


def main() -> int:
    """Run the agent; return its exit status."""
    return 0 if attend(LauncherChannel(), _complete) else 1


if __name__ == "__main__":
    sys.exit(main())
