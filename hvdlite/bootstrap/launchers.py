"""The seat that somebody else's launcher gave this process: torchrun, mpirun, mpiexec, srun.

Rank and local rank are what the launcher's variables say, never computed: Open MPI, for one, may
put ranks 0 and 2 on one host and 1 and 3 on another.

Example:
    >>> from hvdlite.bootstrap.variables import Variables
    >>> find_seat(Variables({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})).rank
    1
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvdlite.bootstrap.variables import Variables
from hvdlite.errors import BootstrapError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Seat:
    """What a launcher said to one rank.

    Attributes:
        names: the variables of rank and size, for messages.
        job: text that the ranks of this job have in common, and no other job has.
        local_rank: None when the launcher says nothing about hosts; then neither is local_size.
        node: the launcher's own number of the host, if it has one.
        first_host: where rank 0 runs, if the launcher says so.
    """

    launcher: str
    names: tuple[str, str]
    rank: int
    size: int
    job: str
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    first_host: str | None = None

    @property
    def on_one_host(self) -> bool:
        """Say whether all ranks of the job share this host."""
        if self.local_size is not None:
            return self.local_size == self.size
        return self.size == 1 or self.first_host is None or self.first_host in _LOOPBACK


def find_seat(variables: Variables) -> Seat | None:
    """Recognise the launcher that is nearest to this process; None when there is none.

    The order matters: torchrun and mpirun may themselves have been started by srun, and then its
    variables, which describe them, are still there.
    """
    for recognise in (_torchrun, _open_mpi, _hydra, _slurm, _pmi, _rank_and_world_size):
        seat = recognise(variables)
        if seat is not None:
            return checked(seat)
    return None


def checked(seat: Seat) -> Seat:
    """Return a seat that can be.

    Raises:
        BootstrapError: rank and size contradict each other.
    """
    if seat.size < 1 or seat.rank >= seat.size:
        rank, size = seat.names
        raise BootstrapError(f"{rank}={seat.rank} and {size}={seat.size} contradict each other")
    return seat


_Recogniser = Callable[[Variables], "Seat | None"]


def _torchrun(variables: Variables) -> Seat | None:
    return _rank_and_world_size(variables) if "TORCHELASTIC_RUN_ID" in variables else None


def _rank_and_world_size(variables: Variables) -> Seat | None:
    """Torchrun's variables, which others (Kubernetes operators, scripts) set by hand, too."""
    if not variables.has("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        return None
    parts = [variables.text("MASTER_ADDR"), variables.text("MASTER_PORT")]
    parts += [variables.get("TORCHELASTIC_RUN_ID") or "", variables.text("WORLD_SIZE")]
    parts += [variables.get("TORCHELASTIC_RESTART_COUNT") or "0"]
    return Seat(
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


def _open_mpi(variables: Variables) -> Seat | None:
    if not variables.has("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        return None
    # Version 4 has a number, version 5 a name with the launcher's host and process id.
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid")
    return Seat(
        launcher="Open MPI",
        names=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank=variables.number("OMPI_COMM_WORLD_RANK"),
        size=variables.number("OMPI_COMM_WORLD_SIZE"),
        job=job or _starter("OMPI_COMM_WORLD_RANK"),
        local_rank=variables.optional_number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=variables.optional_number("OMPI_COMM_WORLD_LOCAL_SIZE"),
    )


def _hydra(variables: Variables) -> Seat | None:
    """Start of MPICH and Intel MPI, whose launcher is called Hydra."""
    return _pmi(variables) if "MPI_LOCALRANKID" in variables else None


def _pmi(variables: Variables) -> Seat | None:
    if not variables.has("PMI_RANK", "PMI_SIZE"):
        return None
    own = "MPI_LOCALRANKID" in variables
    local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS") if own else ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
    return Seat(
        launcher="MPICH",
        names=("PMI_RANK", "PMI_SIZE"),
        rank=variables.number("PMI_RANK"),
        size=variables.number("PMI_SIZE"),
        job=_starter("PMI_RANK"),
        local_rank=variables.optional_number(local[0]),
        local_size=variables.optional_number(local[1]),
    )


def _slurm(variables: Variables) -> Seat | None:
    # A batch script has SLURM_PROCID, but is no task of a step. An interactive step's own number
    # of tasks is 1, while SLURM_NTASKS is its allocation's.
    if not variables.has("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        return None
    node = variables.number("SLURM_NODEID", 0)
    return Seat(
        launcher="Slurm",
        names=("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        rank=variables.number("SLURM_PROCID"),
        size=variables.number("SLURM_STEP_NUM_TASKS"),
        job=f"{variables.get('SLURM_JOB_ID')}.{variables.get('SLURM_STEP_ID')}",
        local_rank=variables.number("SLURM_LOCALID"),
        local_size=tasks_of_node(variables.text("SLURM_STEP_TASKS_PER_NODE"), node),
        node=node,
        first_host=first_of_node_list(variables.text("SLURM_STEP_NODELIST")),
    )


def tasks_of_node(text: str, node: int) -> int:
    """Read Slurm's list of tasks per node.

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
    """Give the first name of Slurm's list of hosts.

    Example:
        >>> first_of_node_list("rack[2-3]n[07,09-12],login")
        'rack2n07'
    """
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", text)
    assert first is not None  # The pattern matches the empty text, too.
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _starter(variable: str) -> str:
    """Name the process that started this host's ranks: the nearest parent that is no rank itself.

    MPICH gives its jobs no name; ranks of one host have this process in common.
    """
    wanted = variable.encode() + b"="
    pid = os.getpid()
    while pid > 1:
        pid = _parent(pid)
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            break  # Another user's: it started ours.
        if not any(entry.startswith(wanted) for entry in environ.split(b"\0")):
            break
    return f"pid {pid}"


def _parent(pid: int) -> int:
    """Read a process's parent; the name before it may hold spaces and brackets."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
