"""srun as a remote launcher: a step with one task, the agent, on each host of the allocation.

Slurm authenticates both sides. It encrypts nothing, neither here nor where srun itself passes the
environment on, so the job's secret is as safe as Slurm's network.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hvdlite.errors import ArgumentError
from hvdlite.launch.hosts import Host
from hvdlite.launch.remote.channels import ProcessChannel, last_line
from hvdlite.launch.remote.ssh import SAFE_PATH
from hvdlite.rendezvous.launchers.known import tasks_of_node

_LONGEST_QUESTION = 30.0  # seconds that Slurm's controller may take to answer

# Words that a failing srun, or the agent, prints, and what the user can do about it.
_REMEDIES = (
    ("no module named", "install hvdlite there, into the same Python: {python}"),
    ("no such file", "hvdlite's Python is expected at {python} there; see --remote-python"),
    ("invalid job id", "has the allocation ended? see squeue"),
    ("not in this job's", "-H names a host that the allocation does not have"),
    ("requested node configuration", "does the allocation have this host? see -H"),
)


@dataclass(frozen=True)
class Srun:
    """How srun starts agents; see `channels.RemoteLauncher`."""

    python: str = sys.executable  # the Python with hvdlite on the hosts
    connect_seconds: float = 60.0  # how long a host may take to answer; see `deadline.is_never`
    carries_secrets: ClassVar[bool] = True

    def reachable(self, host: str) -> bool:
        """Return True: only an attempt tells."""
        return True

    def open(self, host: str) -> ProcessChannel:
        """Start srun."""
        # When the launcher dies, SIGTERM has srun end its step at once. A killed srun cannot, and
        # the agent's stdin then ends up to 8 seconds later.
        return ProcessChannel(srun_command(host, self.python), death=signal.SIGTERM)

    def explain(self, host: str, said: str, status: int | None) -> str:
        """Describe why srun ended, and what to do."""
        last = last_line(said) or f"srun ended with status {status} and said nothing"
        for words, remedy in _REMEDIES:
            if words in said.lower():
                return f"cannot start on host {host}: {last}; {remedy.format(python=self.python)}"
        return f"cannot start on host {host}: {last}"

    def host_address(self, host: str, hello: Mapping[str, Any]) -> str:
        """Return the address of the node that Slurm knows, or else that of its name."""
        node = _ask("scontrol", "show", "node", host, "--oneliner")
        fields = dict(field.partition("=")[::2] for field in node.split())
        name = fields.get("NodeAddr", host)
        return str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0])


def srun_command(host: str, python: str) -> list[str]:
    """Build the command that starts the agent on a host."""
    # The step shares the host's processors with other steps of the job and may use all of them: the
    # agent's ranks need them. Options of the allocation, which srun reads from its environment,
    # such as the number of tasks of a node, do not hold for the agent.
    step = ["--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={host}"]
    own = ["--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", "--input=all", "--output=all"]
    agent = ["env", f"{SAFE_PATH}=1", python, "-m", "hvdlite.launch.agent"]
    return ["srun", *step, *own, *agent]


def allocated_hosts(environment: Mapping[str, str]) -> list[Host]:
    """Return the hosts of this allocation, with as many slots as Slurm gave it tasks on each."""
    # Raises ArgumentError if this process is not in an allocation.
    # Raises OSError if scontrol cannot be run, or fails.
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
    """Return what a command of Slurm prints."""
    # Raises OSError if the command cannot be run, or fails.
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LONGEST_QUESTION, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"`{' '.join(command)}` took more than {_LONGEST_QUESTION:g} s") from None
    if done.returncode != 0:
        raise OSError(f"`{' '.join(command)}` failed: {last_line(done.stderr)}")
    return done.stdout
