"""How ssh is called, and what its failures mean.

No shell is asked to interpret anything: the remote command is one fixed program with fixed words.
Environment, command and secret go through ssh's stdin.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from hvdlite.bootstrap.deadline import is_never

SAFE_PATH = "PYTHONSAFEPATH"
_ALIVE_SECONDS, _ALIVE_COUNT = 3, 3  # ssh gives a silent host up after about ten seconds

# What a failing ssh, or the shell behind it, says, and what the user can do about it.
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
class SshOptions:
    """What the user chose about ssh."""

    port: int | None = None
    identity_file: Path | None = None
    config: Path | None = None
    python: str = sys.executable
    connect_seconds: float = 60.0  # see `deadline.is_never`


def ssh_command(host: str, options: SshOptions) -> list[str]:
    """Build the command that starts the agent on a host, whose name has been checked."""
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
    # Or Python would import modules from the folder that the login begins in. (-P says the same,
    # but Python 3.10 does not know it.) The agent takes the variable out again.
    safe = f"{SAFE_PATH}=1"
    python = shlex.quote(options.python)
    return [*command, "--", host, "exec", "env", safe, python, "-m", "hvdlite.launch.agent"]


def _connect_timeout(seconds: float) -> str:
    return "none" if is_never(seconds) else str(max(1, round(seconds)))


def last_line(stderr: str) -> str:
    """Pick what a failing ssh said last."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def explain(host: str, stderr: str, status: int | None, options: SshOptions) -> str:
    """Say why a host could not be reached, and what to do."""
    said = last_line(stderr) or f"ssh ended with status {status} and said nothing"
    for words, remedy in _REMEDIES:
        if words in stderr.lower():
            hint = remedy.format(host=host, python=options.python)
            return f"cannot start on host {host}: {said}; {hint}"
    return f"cannot start on host {host}: {said}"
