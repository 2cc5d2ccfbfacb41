"""N worlds of one in silence: a process that has others beside it refuses to train alone."""

from __future__ import annotations

import pytest

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.environment import detect

SEVERAL = [
    ({"PET_NNODES": "2"}, "PET_NNODES=2 says that this is one of at least 2 .* --nodes auto"),
    ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4 .* at least 4"),
    ({"VC_TASK_INDEX": "3"}, "VC_TASK_INDEX=3 .* at least 4"),
    ({"PMIX_RANK": "2"}, "PMIX_RANK=2 .* at least 3"),
    ({"MV2_COMM_WORLD_SIZE": "4"}, "MV2_COMM_WORLD_SIZE=4"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2 .* at least 2"),
    ({"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX=1 .* HVDLITE_RENDEZVOUS"),
    ({"SLURM_PROCID": "1", "SLURM_JOB_ID": "9"}, "SLURM_PROCID=1"),
    ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}, "HOROVOD_SIZE=2 .* with hvdlite-run instead"),
    ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2 .* MASTER_ADDR and MASTER_PORT"),
    ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "WORLD_SIZE=2"),
    ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 .* give every process RANK, WORLD_SIZE, MASTER_ADDR"),
    ({"RANK": "0"}, "RANK=0 is set, and WORLD_SIZE is not"),
    ({"RANK": "1", "MASTER_ADDR": "a"}, "RANK=1 is set, and WORLD_SIZE is not"),
]
ALONE = [
    {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "0"},
    {"PET_NNODES": "1:1"},
    {"PET_NNODES": "auto"},
    {"PMIX_RANK": "0"},
    {"JOB_COMPLETION_INDEX": "0"},
    {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script
    {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
    {"HOROVOD_SIZE": "1", "HOROVOD_RANK": "0"},
]


@pytest.mark.parametrize(("variables", "message"), SEVERAL)
def test_n_worlds_of_one_in_silence_are_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(BootstrapError, match=message) as raised:
        detect(variables)
    assert "if it is to train alone, set HVDLITE_SIZE=1" in str(raised.value)
    worker = detect({**variables, "HVDLITE_SIZE": "1"})
    assert (worker.rank, worker.size, worker.rendezvous) == (0, 1, None)


def test_size_of_one_insists_under_a_launcher() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    assert detect({**torchrun, "HVDLITE_SIZE": "1"}).size == 1
    with pytest.raises(BootstrapError, match="HVDLITE_RANK=1 and HVDLITE_SIZE=1 contradict"):
        detect({"HVDLITE_SIZE": "1", "HVDLITE_RANK": "1"})


@pytest.mark.parametrize("variables", ALONE)
def test_single_processes_of_clusters_are_worlds_of_one(variables: dict[str, str]) -> None:
    worker = detect(variables)
    assert (worker.size, worker.launcher) == (1, "none")


def test_launcher_that_tells_the_rank_wins() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5"}
    for variables, _ in SEVERAL:
        assert detect({**variables, **torchrun}).size == 2
