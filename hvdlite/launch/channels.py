"""How the launcher reaches the agents on other hosts.

A *remote launcher*, such as ssh, starts the agent on a host and opens a *channel* to it.
The launcher reads and writes the channel's two descriptors, and does not know what is between them
and the agent. `ProcessChannel` is the channel of a command that runs here, such as ssh's, whose
stdin and stdout are those of the agent.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hvdlite.errors import ArgumentError
from hvdlite.launch import shim
from hvdlite.launch.hosts import Host
from hvdlite.launch.process import nameless_file, signal_group
from hvdlite.rendezvous.deadline import is_never
from hvdlite.rendezvous.launchers import tasks_of_node

_LONGEST_END = 5.0  # seconds that a command may take to end when its channel has been closed
_MOST_SAID = 1 << 16  # bytes of its stderr that are read
SAFE_PATH = "PYTHONSAFEPATH"
_ALIVE_SECONDS, _ALIVE_COUNT = 3, 3  # ssh gives a silent host up after about ten seconds
_LONGEST_QUESTION = 30.0  # seconds that Slurm's controller may take to answer


class LaunchError(OSError):
    """The job cannot run on a host; the message says which host, why, and what to do."""


class AbsentError(LaunchError):
    """A host cannot be reached, or has not answered in time."""


class Channel(Protocol):
    """The connection to the agent on one host; it may still be in the making.

    After `end` only `cut`, `end` and `said` are called.
    """

    @property
    def read_fd(self) -> int:
        """The descriptor of what the agent sends; at its end when the channel is broken."""

    @property
    def write_fd(self) -> int:
        """The descriptor of what is sent to the agent; it may be the same one."""

    def said(self) -> str:
        """Return what the channel has told about itself, as a failing ssh does on its stderr."""

    def cut(self) -> None:
        """Break the channel at once; who reads then finds the end."""

    def end(self) -> int | None:
        """Close the two descriptors, and wait until what is behind them has ended.

        Returns the status of the channel's process, None without one.
        """


class RemoteLauncher(Protocol):
    @property
    def carries_secrets(self) -> bool:
        """Whether environment and secret of the job may travel; otherwise agents have their own."""

    @property
    def connect_seconds(self) -> float:
        """How long a host may take to answer; see `deadline.is_never`."""

    def reachable(self, host: str) -> bool:
        """Return whether it makes sense to connect to a host that was lost, or is new, now."""

    def open(self, host: str) -> Channel:
        """Begin to connect to the agent on a host; this does not wait for the host."""

    def explain(self, host: str, said: str, status: int | None) -> str:
        """Describe why a channel ended before its agent answered, and what to do."""

    def host_address(self, host: str, hello: Mapping[str, Any]) -> str:
        """Return the IP address by which this host reaches another one whose agent has answered."""


def last_line(said: str) -> str:
    """Return the last line that a channel has told about itself; "" if it has told nothing."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else ""


class ProcessChannel:
    """The channel of a command that runs here; the command ends with the thread that made this."""

    def __init__(self, command: Sequence[str], *, death: signal.Signals = signal.SIGKILL) -> None:
        """Start the command in a session of its own. Raises OSError if it cannot be started."""
        # `death` is the signal that the command gets when this thread ends.
        self._stderr = nameless_file("hvdlite-channel-stderr")
        self._said: str | None = None
        try:
            self._process = subprocess.Popen(
                shim.tied(command, death),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            os.close(self._stderr)
            raise
        assert self._process.stdin is not None and self._process.stdout is not None
        self.read_fd = self._process.stdout.fileno()
        self.write_fd = self._process.stdin.fileno()

    def said(self) -> str:
        return self._read_stderr() if self._said is None else self._said

    def _read_stderr(self) -> str:
        return os.pread(self._stderr, _MOST_SAID, 0).decode(errors="replace")

    def cut(self) -> None:
        if self._process.returncode is None:  # Nobody else has its number then.
            signal_group(self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            status = self._process.wait(_LONGEST_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if self._said is None:
            self._said = self._read_stderr()
            os.close(self._stderr)
        return status


@dataclass(frozen=True)
class _CommandLauncher:
    """What ssh and srun have in common: a command that runs here is the channel to an agent."""

    carries_secrets: ClassVar[bool] = True
    program: ClassVar[str]
    # Words that a failing command, or the agent, prints, and what the user can do about it.
    remedies: ClassVar[Sequence[tuple[str, str]]]
    python: str = sys.executable  # the Python with hvdlite on the other hosts
    connect_seconds: float = 60.0  # how long a host may take to answer; see `deadline.is_never`

    def reachable(self, host: str) -> bool:
        return True  # Only an attempt tells.

    def explain(self, host: str, said: str, status: int | None) -> str:
        last = last_line(said) or f"{self.program} ended with status {status} and said nothing"
        for words, remedy in self.remedies:
            if words in said.lower():
                hint = remedy.format(host=host, python=self.python)
                return f"cannot start on host {host}: {last}; {hint}"
        return f"cannot start on host {host}: {last}"


@dataclass(frozen=True)
class Ssh(_CommandLauncher):
    """How ssh starts agents, with the user's choices.

    The remote command is one fixed program with fixed arguments, so that no shell has to interpret
    anything of the user. Environment, command and secret of the job go through ssh's stdin.
    """

    program = "ssh"
    remedies = (
        ("could not resolve hostname", "is the name right? `ssh {host}` has to work by itself"),
        (
            "connection refused",
            "does an ssh server run there, on this port? --ssh-port sets another",
        ),
        ("connection timed out", "is the host up, and does a firewall let ssh through?"),
        ("no route to host", "is the host up, and on a network that this one reaches?"),
        ("permission denied", "log in must work without a password: see --ssh-identity-file"),
        ("host key verification failed", "run `ssh {host}` once and accept its key"),
        ("host identification has changed", "run `ssh {host}` and settle its key"),
        ("no module named", "install hvdlite there, into the same Python: {python}"),
        ("no such file", "hvdlite's Python is expected at {python} there; see --remote-python"),
        ("not found", "hvdlite's Python is expected at {python} there; see --remote-python"),
    )
    port: int | None = None  # the port of sshd on the other hosts; None leaves it to ssh
    identity_file: str | Path | None = None  # a private key
    config: str | Path | None = None  # the configuration file that ssh reads instead of the user's

    def open(self, host: str) -> ProcessChannel:
        return ProcessChannel(ssh_command(host, self))

    def host_address(self, host: str, hello: Mapping[str, Any]) -> str:
        """Return the host's address in its SSH_CONNECTION: our address, port, its, port."""
        fields = str(hello["ssh"]).split()
        return fields[2] if len(fields) == 4 else "127.0.0.1"


def ssh_command(host: str, options: Ssh) -> list[str]:
    seconds = options.connect_seconds
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": "none" if is_never(seconds) else str(max(1, round(seconds))),
        "ServerAliveInterval": str(_ALIVE_SECONDS),
        "ServerAliveCountMax": str(_ALIVE_COUNT),
        "ClearAllForwardings": "yes",
        "ControlMaster": "no",
        "ControlPath": "none",
    }
    command = ["ssh", "-T", "-x", "-a"]
    for name, value in settings.items():
        command += ["-o", f"{name}={value}"]
    chosen = {"-p": options.port, "-i": options.identity_file, "-F": options.config}
    for flag, choice in chosen.items():
        command += [] if choice is None else [flag, str(choice)]
    # Without this variable, Python would import modules from the folder in which the login begins.
    # (The option -P does the same, but not in Python 3.10.) The agent removes the variable.
    safe = f"{SAFE_PATH}=1"
    python = shlex.quote(options.python)
    return [*command, "--", host, "exec", "env", safe, python, "-m", "hvdlite.launch.agent"]


@dataclass(frozen=True)
class Srun(_CommandLauncher):
    """How srun starts agents: a step with one task, the agent, on each host of the allocation.

    Slurm authenticates both sides. It encrypts nothing, neither here nor where srun itself passes
    the environment on, so the job's secret is as safe as Slurm's network.
    """

    program = "srun"
    remedies = (
        ("no module named", "install hvdlite there, into the same Python: {python}"),
        ("no such file", "hvdlite's Python is expected at {python} there; see --remote-python"),
        ("invalid job id", "has the allocation ended? see squeue"),
        ("not in this job's", "-H names a host that the allocation does not have"),
        ("requested node configuration", "does the allocation have this host? see -H"),
    )

    def open(self, host: str) -> ProcessChannel:
        # The step shares the host's processors with other steps of the job and may use all of them:
        # the agent's ranks need them. Options of the allocation, which srun reads from its
        # environment, such as the number of tasks of a node, do not hold for the agent.
        step = ["--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={host}"]
        own = ["--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0"]
        streams = ["--input=all", "--output=all"]
        agent = ["env", f"{SAFE_PATH}=1", self.python, "-m", "hvdlite.launch.agent"]
        # When the launcher dies, SIGTERM has srun end its step at once. A killed srun cannot, and
        # the agent's stdin then ends up to 8 seconds later.
        return ProcessChannel(["srun", *step, *own, *streams, *agent], death=signal.SIGTERM)

    def host_address(self, host: str, hello: Mapping[str, Any]) -> str:
        """Return the address of the node that Slurm knows, or else that of its name."""
        node = _ask("scontrol", "show", "node", host, "--oneliner")
        fields = dict(field.partition("=")[::2] for field in node.split())
        name = fields.get("NodeAddr", host)
        return str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0])


def allocated_hosts(environment: Mapping[str, str]) -> list[Host]:
    """Return the hosts of this allocation, with as many slots as Slurm gave it tasks on each."""
    nodes = environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ArgumentError(
            "--via srun: SLURM_JOB_NODELIST is not set; run hvdlite-run in an allocation of Slurm, "
            "with salloc or in a script for sbatch"
        )
    names = _ask("scontrol", "show", "hostnames", nodes).split()
    tasks = environment.get("SLURM_TASKS_PER_NODE") or f"1(x{len(names)})"
    return [Host(name, tasks_of_node(tasks, node)) for node, name in enumerate(names)]


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LONGEST_QUESTION, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"`{' '.join(command)}` took more than {_LONGEST_QUESTION:g} s") from None
    if done.returncode != 0:
        raise OSError(f"`{' '.join(command)}` failed: {last_line(done.stderr)}")
    return done.stdout
