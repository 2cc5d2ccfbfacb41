"""Recognise other launchers (torchrun, mpirun, mpiexec, srun) by the variables that they set.

The last rule is that for TF_CONFIG, which cluster software sets for TensorFlow. Where no launcher
is recognised, `refuse_to_be_alone` refuses to train alone if a variable says that this process is
one of several.

Rank and local rank are taken from the launcher's variables and never guessed, because the order of
ranks over hosts is the launcher's choice: Open MPI may put ranks 0 and 2 on one host, and ranks 1
and 3 on another.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.address import UNIX, split_host


class Variables:
    """A mapping of variables, in which an empty value counts as not set."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def __contains__(self, name: str) -> bool:
        return bool(self._values.get(name))

    def has(self, *names: str) -> bool:
        return all(name in self for name in names)

    def get(self, name: str) -> str | None:
        return self._values.get(name) or None

    def text(self, name: str) -> str:
        """Return the value of a variable that must be set."""
        value = self.get(name)
        if value is None:
            raise BootstrapError(
                f"{name} is not set, although other variables say that a launcher started this "
                "process; start it with hvdlite-run, or clear all HVDLITE_ variables"
            )
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """Return a number of at least 0; without a default, the variable must be set."""
        if default is not None and name not in self:
            return default
        value = self.text(name)
        try:
            number = int(value)
        except ValueError:
            number = -1
        if number < 0:
            raise BootstrapError(f"{name}={value} is not a number from 0")
        return number

    def optional_number(self, name: str) -> int | None:
        """Return a number of at least 0; None if the variable is not set."""
        return self.number(name) if name in self else None

    def flag(self, name: str) -> bool:
        """Return whether a variable is 1; it may also be 0 or not be set."""
        value = self.get(name)
        if value not in (None, "0", "1"):
            raise BootstrapError(f"{name}={value} cannot be used: give 1 or 0")
        return value == "1"

    def seconds(self, name: str, default: float) -> float:
        """Return a time in seconds of at least 0; `deadline.Deadline` takes 0 for "no limit"."""
        value = self.get(name)
        if value is None:
            return default
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not seconds >= 0:
            raise BootstrapError(
                f"{name}={value} cannot be used: give a number of seconds, or 0 for no limit"
            )
        return seconds

    def address(self, name: str) -> str | None:
        """Return "unix:NAME" or "host:port"; None if the variable is not set."""
        value = self.get(name)
        if value is not None and not value.startswith(UNIX):
            try:
                split_host(value)
            except BootstrapError as error:
                raise BootstrapError(f"{name} cannot be used: {error}") from None
        return value

    def secret(self, name: str, value: str | None, length: int) -> bytes:
        """Decode `value`, the text of the variable `name`: `length` bytes as hexadecimal digits."""
        try:
            secret = bytes.fromhex(value or "")
        except ValueError:
            secret = b""
        if len(secret) != length:
            raise BootstrapError(f"{name} is missing or is not {2 * length} hexadecimal digits")
        return secret


_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class LauncherEnvironment:
    """What a launcher tells one process by variables; None for what it does not tell."""

    launcher: str  # the name of the launcher, for messages
    names: tuple[str, str]  # the names of the variables for rank and size, for messages
    rank: int
    size: int
    job: str  # a text that is equal on all ranks of this job, and different in other jobs
    # The numbers of the rank within its host, of the host's ranks, and of the host.
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    first_host: str | None = None  # the host of rank 0
    epoch: int = 0  # how often the launcher has started this job again under the same number
    address: str | None = None  # "host:port", where rank 0 is to serve the store of several hosts
    servers: int = 0  # how many of the first ranks are parameter servers

    def __post_init__(self) -> None:
        if self.size < 1 or self.rank >= self.size:
            rank, size = self.names
            raise BootstrapError(f"{rank}={self.rank} and {size}={self.size} contradict each other")

    @property
    def on_one_host(self) -> bool:
        if self.local_size is not None:
            return self.local_size == self.size
        return self.size == 1 or self.first_host is None or self.first_host in _LOOPBACK


def detect_launcher(variables: Variables, with_servers: bool = False) -> LauncherEnvironment | None:
    """Recognise the launcher that started this process; None if no launcher did."""
    # The order matters: srun may have started torchrun or mpirun. Then the variables of srun are
    # also set, but describe the process of torchrun or mpirun.
    # `with_servers` says whether the parameter servers of TF_CONFIG are ranks, too.
    recognise_by = (
        ("TORCHELASTIC_RUN_ID", _torchrun),
        ("OMPI_COMM_WORLD_RANK", _open_mpi),
        ("MPI_LOCALRANKID", _pmi),  # Hydra's, the launcher of MPICH and Intel MPI
        ("SLURM_STEP_ID", _slurm),
        ("PMI_RANK", _pmi),
        ("RANK", _torchrun),
    )
    for name, recognise in recognise_by:
        found = recognise(variables) if name in variables else None
        if found is not None:
            return found
    return _tf_config(variables, with_servers)


def _read_numbers(
    variables: Variables,
    launcher: str,
    names: tuple[str, str],
    local: tuple[str, str],
    job: str,
    **more: Any,
) -> LauncherEnvironment:
    """Read rank and size by the names of their variables, and the local ones if they are set."""
    return LauncherEnvironment(
        launcher=launcher,
        names=names,
        rank=variables.number(names[0]),
        size=variables.number(names[1]),
        job=job,
        local_rank=variables.optional_number(local[0]),
        local_size=variables.optional_number(local[1]),
        **more,
    )


def _torchrun(variables: Variables) -> LauncherEnvironment | None:
    """Read torchrun's variables, which others (Kubernetes operators, scripts) set as well."""
    if not variables.has("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        return None
    parts = [variables.text("MASTER_ADDR"), variables.text("MASTER_PORT")]
    parts += [variables.get("TORCHELASTIC_RUN_ID") or "", variables.text("WORLD_SIZE")]
    parts += [variables.get("TORCHELASTIC_RESTART_COUNT") or "0"]
    return _read_numbers(
        variables,
        "torchrun",
        ("RANK", "WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        "|".join(parts),
        node=variables.optional_number("GROUP_RANK"),
        first_host=variables.get("MASTER_ADDR"),
    )


def _open_mpi(variables: Variables) -> LauncherEnvironment | None:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if not variables.has(*names):
        return None
    # Open MPI 4 sets the number of the job; version 5 sets a name with mpirun's host and pid.
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid")
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return _read_numbers(variables, "Open MPI", names, local, job or _starter(names[0]))


def _pmi(variables: Variables) -> LauncherEnvironment | None:
    names = ("PMI_RANK", "PMI_SIZE")
    if not variables.has(*names):
        return None
    own = "MPI_LOCALRANKID" in variables
    local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS") if own else ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
    return _read_numbers(variables, "MPICH", names, local, _starter("PMI_RANK"))


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
    if text is None:
        return None
    try:
        found = _ranks_of(text, _SERVE if with_servers else ())
    except ValueError as error:
        shown = text if len(text) <= _TF_SHOWN else text[:_TF_SHOWN] + "..."
        raise BootstrapError(
            f"TF_CONFIG={shown} cannot be used: {error}; correct it, or clear it and start the "
            "script with hvdlite-run; HVDLITE_SIZE=1 insists on a world of one"
        ) from None
    if found is None:
        return None
    rank, addresses, servers = found
    hosts = [split_host(address)[0].lower() for address in addresses]
    own = hosts[rank]
    return LauncherEnvironment(
        launcher="the software that set TF_CONFIG",
        names=("the index in TF_CONFIG", "its number of tasks"),
        rank=rank,
        size=len(hosts),
        job=",".join(addresses),
        local_rank=hosts[:rank].count(own),
        local_size=hosts.count(own),
        node=list(dict.fromkeys(hosts)).index(own),
        first_host=hosts[0],
        address=addresses[0],
        servers=servers,
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
        # The name that stands before the parent's number may have spaces and brackets.
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            break  # The process belongs to another user, so it is not a rank of this job.
        if not any(entry.startswith(wanted) for entry in environ.split(b"\0")):
            break
    return f"pid {pid}"


# TF_CONFIG is JSON: the addresses of all tasks of a TensorFlow job by type, and which of them this
# process is. The chief and the workers become the ranks in this order, and rank 0 serves the store
# at its own address, which TensorFlow's server would use otherwise. In a job with parameter servers
# the tasks of the type `ps` come first.

_TRAIN = ("chief", "master", "worker")  # `master` is what TensorFlow 1 calls the chief.
_SERVE = ("ps",)
_DO_NOT_TRAIN = ("ps", "evaluator")
# What a task may call, without and with parameter servers.
_WHERE = (
    "hvd.init() in the chief and the workers alone",
    "hvd.parameter_server.connect() in the chief, the workers and the tasks of the type 'ps' alone",
)
_TF_SHOWN = 200  # characters of the variable that a message shows


def _ranks_of(text: str, serve: Sequence[str]) -> tuple[int, list[str], int] | None:
    """Return this rank, the address of each, and how many of the first are parameter servers."""
    # None if there is only one process that trains. `serve` has the types that are servers.
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError("it is not an object of JSON")
    cluster = config.get("cluster") or {}
    if not isinstance(cluster, dict):
        raise ValueError("its cluster is not an object of JSON")
    kinds = (*serve, *_TRAIN)
    lists = {kind: _addresses(kind, cluster[kind]) for kind in kinds if kind in cluster}
    addresses = [address for one in lists.values() for address in one]
    task = config.get("task") or {}
    kind = task.get("type") if isinstance(task, dict) else None
    if kind in _DO_NOT_TRAIN and kind not in serve:
        raise ValueError(
            f"this process is a task of the type {kind!r}, which is not a rank, because it does "
            f"not train; call {_WHERE[bool(serve)]}"
        )
    if len(addresses) < 2:
        return None
    for address in addresses:
        if addresses.count(address) > 1:
            raise ValueError(f"two tasks have the address {address}")
    if not isinstance(kind, str) or kind not in lists:
        raise ValueError(f"it does not say which task of {_listed(lists)} this process is")
    before = sum(len(lists[earlier]) for earlier in list(lists)[: list(lists).index(kind)])
    servers = sum(len(lists[one]) for one in serve if one in lists)
    return before + _task_index(kind, task.get("index"), len(lists[kind])), addresses, servers


def _addresses(kind: str, given: Any) -> list[str]:
    """Read the addresses of one type of task: a list, or an object whose names are the indexes."""
    if isinstance(given, dict):
        given = [given.get(str(index)) for index in range(len(given))]
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise ValueError(f"its {kind} is not a list of addresses")
    for address in given:
        try:
            split_host(address)
        except BootstrapError as error:
            raise ValueError(str(error)) from None
    return given


def _task_index(kind: str, given: Any, count: int) -> int:
    """Read the index of this task, which some software writes as a text."""
    index = int(given) if isinstance(given, str) and given.isdecimal() else given
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise ValueError(f"this process is {kind} {given!r}, and the cluster has {count} of them")
    return index


def _listed(lists: Mapping[str, Sequence[str]]) -> str:
    return " and ".join(f"{len(one)} {kind}" for kind, one in lists.items() if one)


# Cluster software describes its processes by variables, from which hvdlite does not always learn a
# rank. Each process would then make a world of one, and all of them would succeed: N models are
# trained where one was wanted. So `refuse_to_be_alone` reads the variables that only processes with
# others beside them have. HVDLITE_SIZE=1 insists on a world of one.

_AS_TORCHRUN = "give every process RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does"
_BY_HAND = "give every process HVDLITE_RANK, HVDLITE_SIZE, HVDLITE_RENDEZVOUS and HVDLITE_TOKEN"
# By variable, whose value is a number of processes or the number of one of them, from 0: how many
# processes there are beyond this number, and what to do, so that hvdlite learns the ranks. No other
# process has more than one: a batch script has SLURM_NTASKS=4 but SLURM_PROCID=0.
_SIGNS = {
    "HOROVOD_SIZE": (0, "start the script with hvdlite-run instead of horovodrun"),
    "WORLD_SIZE": (0, _AS_TORCHRUN),
    "OMPI_COMM_WORLD_SIZE": (0, _BY_HAND),
    "MV2_COMM_WORLD_SIZE": (0, _BY_HAND),
    "MVP_COMM_WORLD_SIZE": (0, _BY_HAND),
    "PMIX_RANK": (1, _BY_HAND),
    "SLURM_PROCID": (1, _BY_HAND),
    "VC_TASK_INDEX": (1, _BY_HAND),
    "PET_NNODES": (0, "start the script with `hvdlite-run --nodes auto`"),
    "JOB_COMPLETION_INDEX": (
        1,
        f"start the script with `hvdlite-run --nodes N --meet HOST:PORT`, or {_BY_HAND}",
    ),
}


def refuse_to_be_alone(variables: Variables) -> None:
    """Check that no variable says that this process, whose rank nobody has told, has others."""
    if "RANK" in variables and "WORLD_SIZE" not in variables:
        raise BootstrapError(
            f"RANK={variables.get('RANK')} is set, and WORLD_SIZE is not, so nobody knows how many "
            f"processes there are; {_AS_TORCHRUN}; if it is to train alone, set HVDLITE_SIZE=1"
        )
    for name, (more, remedy) in _SIGNS.items():
        value = variables.get(name) or ""
        most = value.rpartition(":")[2]  # PET_NNODES may be a range: 1:4
        count = int(most) + more if most.isdecimal() else 0
        if count > 1:
            raise BootstrapError(
                f"{name}={value} says that this is one of at least {count} processes, but no "
                "variable tells hvdlite its rank, so every process would train alone; "
                f"{remedy}; if it is to train alone, set HVDLITE_SIZE=1"
            )


# Parameter servers are the first ranks of a job. hvdlite-run sets HVDLITE_SERVERS, HVDLITE_WORKER
# and HVDLITE_JOINER. Under other launchers users set HVDLITE_SERVERS in every process, except under
# TF_CONFIG, which names its servers itself.


def service_numbers(variables: Variables, rank: int, size: int, named: int = 0) -> dict[str, Any]:
    """Return the fields of a `WorkerEnvironment` that concern parameter servers."""
    # `named` says how many servers the launcher itself names, if the variables do not.
    servers = variables.number("HVDLITE_SERVERS", named)
    if servers == 0:
        return {}
    if servers >= size:
        raise BootstrapError(
            f"HVDLITE_SERVERS={servers} leaves none of the {size} ranks to train; give fewer "
            "servers, or start more ranks"
        )
    return {
        "servers": servers,
        "process": variables.number("HVDLITE_WORKER", rank),
        "joiner": variables.flag("HVDLITE_JOINER"),
    }


def refuse_other_kind(servers: int, rank: int, with_servers: bool) -> None:
    """Refuse a script that asks for another kind of job than the launcher has started."""
    if servers and not with_servers:
        kind = "server" if rank < servers else "worker"
        raise BootstrapError(
            f"rank {rank} is a {kind} of a job with parameter servers, which has no world of "
            "ranks: call hvd.parameter_server.connect() instead of hvd.init(), or start the "
            "script without servers"
        )
    if with_servers and not servers:
        raise BootstrapError(
            "this job has no parameter servers; start it with hvdlite-run --servers N, or set "
            "HVDLITE_SERVERS=N in every process under another launcher"
        )
