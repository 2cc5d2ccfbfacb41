"""Recognise other launchers (torchrun, mpirun, mpiexec, srun) by the variables that they set.

The last rule is that for TF_CONFIG, which cluster software sets for TensorFlow.

Rank and local rank are taken from the launcher's variables and never guessed, because the order of
ranks over hosts is the launcher's choice: Open MPI may put ranks 0 and 2 on one host, and ranks 1
and 3 on another.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.launchers.tf_config import ranks_of
from hvdlite.rendezvous.launchers.variables import Variables

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class LauncherEnvironment:
    """What a launcher tells one process by environment variables."""

    launcher: str  # the name of the launcher, for messages
    names: tuple[str, str]  # the names of the variables for rank and size, for messages
    rank: int
    size: int
    job: str  # a text that is equal on all ranks of this job, and different in other jobs
    # The number of the rank within its host; None if the launcher does not tell.
    local_rank: int | None = None
    # This says how many ranks this host has; None if the launcher does not tell.
    local_size: int | None = None
    # The launcher's number of this host; None if the launcher does not tell.
    node: int | None = None
    first_host: str | None = None  # the host of rank 0; None if the launcher does not tell
    # This says how often the launcher has started this job again, if it keeps the job's number.
    epoch: int = 0
    # "host:port", at which rank 0 is to serve the store if the ranks have several hosts; None if
    # the launcher does not tell.
    address: str | None = None
    servers: int = 0  # how many of the first ranks are parameter servers

    @property
    def on_one_host(self) -> bool:
        """Return whether all ranks of the job share this host."""
        if self.local_size is not None:
            return self.local_size == self.size
        return self.size == 1 or self.first_host is None or self.first_host in _LOOPBACK


def detect_launcher(variables: Variables, with_servers: bool = False) -> LauncherEnvironment | None:
    """Recognise the launcher that started this process; None if no launcher did."""
    # The order matters: srun may have started torchrun or mpirun. Then the variables of srun are
    # also set, but describe the process of torchrun or mpirun.
    # `with_servers` says whether the parameter servers of TF_CONFIG are ranks, too.
    for recognise in (_torchrun, _open_mpi, _hydra, _slurm, _pmi, _rank_and_world_size):
        found = recognise(variables)
        if found is not None:
            return checked(found)
    found = _tf_config(variables, with_servers)
    return None if found is None else checked(found)


def checked(found: LauncherEnvironment) -> LauncherEnvironment:
    """Check that rank < size, and return the argument."""
    # Raises BootstrapError if rank and size contradict each other.
    if found.size < 1 or found.rank >= found.size:
        rank, size = found.names
        raise BootstrapError(f"{rank}={found.rank} and {size}={found.size} contradict each other")
    return found


def _torchrun(variables: Variables) -> LauncherEnvironment | None:
    return _rank_and_world_size(variables) if "TORCHELASTIC_RUN_ID" in variables else None


def _rank_and_world_size(variables: Variables) -> LauncherEnvironment | None:
    """Read torchrun's variables, which others (Kubernetes operators, scripts) set as well."""
    if not variables.has("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        return None
    parts = [variables.text("MASTER_ADDR"), variables.text("MASTER_PORT")]
    parts += [variables.get("TORCHELASTIC_RUN_ID") or "", variables.text("WORLD_SIZE")]
    parts += [variables.get("TORCHELASTIC_RESTART_COUNT") or "0"]
    return LauncherEnvironment(
        launcher="torchrun",
        names=("RANK", "WORLD_SIZE"),
        rank=variables.number("RANK"),
        size=variables.number("WORLD_SIZE"),
        job="|".join(parts),
        local_rank=variables.optional_number("LOCAL_RANK"),
        local_size=variables.optional_number("LOCAL_WORLD_SIZE"),
        node=variables.optional_number("GROUP_RANK"),
        first_host=variables.get("MASTER_ADDR"),
    )


def _open_mpi(variables: Variables) -> LauncherEnvironment | None:
    if not variables.has("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        return None
    # Open MPI 4 sets the number of the job; version 5 sets a name with mpirun's host and pid.
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid")
    return LauncherEnvironment(
        launcher="Open MPI",
        names=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank=variables.number("OMPI_COMM_WORLD_RANK"),
        size=variables.number("OMPI_COMM_WORLD_SIZE"),
        job=job or _starter("OMPI_COMM_WORLD_RANK"),
        local_rank=variables.optional_number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=variables.optional_number("OMPI_COMM_WORLD_LOCAL_SIZE"),
    )


def _hydra(variables: Variables) -> LauncherEnvironment | None:
    """Recognise Hydra, the launcher of MPICH and Intel MPI."""
    return _pmi(variables) if "MPI_LOCALRANKID" in variables else None


def _pmi(variables: Variables) -> LauncherEnvironment | None:
    if not variables.has("PMI_RANK", "PMI_SIZE"):
        return None
    own = "MPI_LOCALRANKID" in variables
    local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS") if own else ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
    return LauncherEnvironment(
        launcher="MPICH",
        names=("PMI_RANK", "PMI_SIZE"),
        rank=variables.number("PMI_RANK"),
        size=variables.number("PMI_SIZE"),
        job=_starter("PMI_RANK"),
        local_rank=variables.optional_number(local[0]),
        local_size=variables.optional_number(local[1]),
    )


def _slurm(variables: Variables) -> LauncherEnvironment | None:
    # A batch script has SLURM_PROCID too, but is not a task of a step. SLURM_NTASKS counts the
    # tasks of the allocation, which may be more than those of an interactive step.
    if not variables.has("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        return None
    node = variables.number("SLURM_NODEID", 0)
    return LauncherEnvironment(
        launcher="Slurm",
        names=("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        rank=variables.number("SLURM_PROCID"),
        size=variables.number("SLURM_STEP_NUM_TASKS"),
        job=f"{variables.get('SLURM_JOB_ID')}.{variables.get('SLURM_STEP_ID')}",
        local_rank=variables.number("SLURM_LOCALID"),
        local_size=tasks_of_node(variables.text("SLURM_STEP_TASKS_PER_NODE"), node),
        node=node,
        first_host=first_of_node_list(variables.text("SLURM_STEP_NODELIST")),
        epoch=variables.number("SLURM_RESTART_COUNT", 0),
    )


def _tf_config(variables: Variables, with_servers: bool) -> LauncherEnvironment | None:
    text = variables.get("TF_CONFIG")
    found = None if text is None else ranks_of(text, with_servers)
    if found is None:
        return None
    hosts = found.hosts
    own = hosts[found.rank]
    return LauncherEnvironment(
        launcher="the software that set TF_CONFIG",
        names=("the index in TF_CONFIG", "its number of tasks"),
        rank=found.rank,
        size=len(hosts),
        job=",".join(found.addresses),
        local_rank=hosts[: found.rank].count(own),
        local_size=hosts.count(own),
        node=list(dict.fromkeys(hosts)).index(own),
        first_host=hosts[0],
        address=found.addresses[0],
        servers=found.servers,
    )


def tasks_of_node(text: str, node: int) -> int:
    """Return the number of tasks of one node, from Slurm's list of tasks per node.

    Example:
        >>> [tasks_of_node("2(x3),1", node) for node in range(4)]
        [2, 2, 2, 1]
    """
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            break
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    raise BootstrapError(f"SLURM_STEP_TASKS_PER_NODE={text} cannot be read")


def first_of_node_list(text: str) -> str:
    """Return the first host of Slurm's list of hosts.

    Example:
        >>> first_of_node_list("rack[2-3]n[07,09-12],login")
        'rack2n07'
    """
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", text)
    assert first is not None  # The pattern matches the empty text, too.
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _starter(variable: str) -> str:
    """Name the process that started this host's ranks, as a name of the job."""
    # MPICH does not name its jobs. But the ranks of one host have a common parent, which is the
    # nearest ancestor without the variable, and thus not a rank itself.
    wanted = variable.encode() + b"="
    pid = os.getpid()
    while pid > 1:
        pid = _parent(pid)
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            break  # The process belongs to another user, so it is not a rank of this job.
        if not any(entry.startswith(wanted) for entry in environ.split(b"\0")):
            break
    return f"pid {pid}"


def _parent(pid: int) -> int:
    """Read the parent of a process; the name that stands before it may have spaces and brackets."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
