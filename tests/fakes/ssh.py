"""An ssh that runs its command on this machine, for tests of agents with made-up hosts."""

from __future__ import annotations

import os
from pathlib import Path

from patience import wait_until

# It writes its process id, which is the agent's, to a file with the name of the host. A file
# `down.HOST` makes the host unreachable.
_SSH = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
if [ -e "{folder}/down.$2" ]; then echo "connection refused" >&2; exit 255; fi
echo $$ > "{folder}/agent.$2.new"
mv "{folder}/agent.$2.new" "{folder}/agent.$2"
shift 2
SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22" exec sh -c "$*"
"""


def fake_ssh(folder: Path) -> str:
    """Make the ssh in a folder below this one; return the PATH that finds it."""
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(_SSH.format(folder=folder))
    ssh.chmod(0o755)
    return f"{ssh.parent}{os.pathsep}{os.environ['PATH']}"


def agent_of(folder: Path, host: str) -> int:
    """Wait for the agent of a host, and return its process id."""
    file = folder / f"agent.{host}"
    wait_until(file.exists, f"the agent of {host}")
    return int(file.read_text())
