"""ssh as a remote launcher: the command that starts an agent, and why it failed.

The remote command is one fixed program with fixed arguments, so that no shell has to interpret
anything of the user. The environment, the command and the secret of the job go through ssh's stdin.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hvdlite.launch.remote.channels import ProcessChannel, last_line
from hvdlite.rendezvous.deadline import is_never

SAFE_PATH = "PYTHONSAFEPATH"
_ALIVE_SECONDS, _ALIVE_COUNT = 3, 3  # ssh gives a silent host up after about ten seconds

# Words that a failing ssh, or the shell on the host, prints, and what the user can do about it.
_REMEDIES = (
    ("could not resolve hostname", "is the name right? `ssh {host}` has to work by itself"),
    ("connection refused", "does an ssh server run there, on this port? --ssh-port sets another"),
    ("connection timed out", "is the host up, and does a firewall let ssh through?"),
    ("no route to host", "is the host up, and on a network that this one reaches?"),
    ("permission denied", "log in must work without a password: see --ssh-identity-file"),
    ("host key verification failed", "run `ssh {host}` once and accept its key"),
    ("host identification has changed", "run `ssh {host}` and settle its key"),
    ("no module named", "install hvdlite there, into the same Python: {python}"),
    ("no such file", "hvdlite's Python is expected at {python} there; see --remote-python"),
    ("not found", "hvdlite's Python is expected at {python} there; see --remote-python"),
)


@dataclass(frozen=True)
class Ssh:
    """How ssh starts agents, with the user's choices; see `channels.RemoteLauncher`."""

    port: int | None = None  # the port of sshd on the other hosts; None leaves it to ssh
    identity_file: Path | None = None  # a private key
    config: Path | None = None  # the configuration file that ssh reads instead of the user's
    python: str = sys.executable  # the Python with hvdlite on the other hosts
    connect_seconds: float = 60.0  # how long a host may take to answer; see `deadline.is_never`
    carries_secrets: ClassVar[bool] = True

    def reachable(self, host: str) -> bool:
        """Return True: only an attempt tells."""
        return True

    def open(self, host: str) -> ProcessChannel:
        """Start ssh."""
        return ProcessChannel(ssh_command(host, self))

    def explain(self, host: str, said: str, status: int | None) -> str:
        """Describe why ssh ended, and what to do."""
        last = last_line(said) or f"ssh ended with status {status} and said nothing"
        for words, remedy in _REMEDIES:
            if words in said.lower():
                hint = remedy.format(host=host, python=self.python)
                return f"cannot start on host {host}: {last}; {hint}"
        return f"cannot start on host {host}: {last}"

    def host_address(self, host: str, hello: Mapping[str, Any]) -> str:
        """Return the host's address in its SSH_CONNECTION: our address, port, its, port."""
        fields = str(hello["ssh"]).split()
        return fields[2] if len(fields) == 4 else "127.0.0.1"


def ssh_command(host: str, options: Ssh) -> list[str]:
    """Build the command that starts the agent on a host; `hosts` has checked the name."""
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": _connect_timeout(options.connect_seconds),
        "ServerAliveInterval": str(_ALIVE_SECONDS),
        "ServerAliveCountMax": str(_ALIVE_COUNT),
        "ClearAllForwardings": "yes",
        "ControlMaster": "no",
        "ControlPath": "none",
    }
    command = ["ssh", "-T", "-x", "-a"]
    for name, value in settings.items():
        command += ["-o", f"{name}={value}"]
    if options.port is not None:
        command += ["-p", str(options.port)]
    if options.identity_file is not None:
        command += ["-i", str(options.identity_file)]
    if options.config is not None:
        command += ["-F", str(options.config)]
    # Without this variable, Python would import modules from the folder in which the login begins.
    # (The option -P does the same, but not in Python 3.10.) The agent removes the variable.
    safe = f"{SAFE_PATH}=1"
    python = shlex.quote(options.python)
    return [*command, "--", host, "exec", "env", safe, python, "-m", "hvdlite.launch.agent"]


def _connect_timeout(seconds: float) -> str:
    return "none" if is_never(seconds) else str(max(1, round(seconds)))
