"""Build the ssh command that starts an agent, and explain why ssh failed.

The remote command is one fixed program with fixed arguments, so that no shell has to interpret
anything of the user. The environment, the command and the secret of the job go through ssh's stdin.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from hvdlite.bootstrap.deadline import is_never

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
class SshOptions:
    """The user's choices for ssh.

    Attributes:
        port: the port of sshd on the other hosts; None leaves it to ssh.
        identity_file: a private key.
        config: the configuration file that ssh reads instead of the user's.
        python: the Python with hvdlite on the other hosts.
        connect_seconds: how long a host may take to answer; see `deadline.is_never`.
    """

    port: int | None = None
    identity_file: Path | None = None
    config: Path | None = None
    python: str = sys.executable
    connect_seconds: float = 60.0


def ssh_command(host: str, options: SshOptions) -> list[str]:
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


def last_line(stderr: str) -> str:
    """Return the last line that a failing ssh printed; "" if it printed nothing."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def explain(host: str, stderr: str, status: int | None, options: SshOptions) -> str:
    """Describe why a host could not be reached, and what to do."""
    said = last_line(stderr) or f"ssh ended with status {status} and said nothing"
    for words, remedy in _REMEDIES:
        if words in stderr.lower():
            hint = remedy.format(host=host, python=options.python)
            return f"cannot start on host {host}: {said}; {hint}"
    return f"cannot start on host {host}: {said}"
