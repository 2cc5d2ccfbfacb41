"""The variables of every launcher are recognised, and wrong ones are named."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.connection import LauncherNumbers, find_topology
from hvdlite.rendezvous.environment import detect

OWN = {
    "HVDLITE_RANK": "1",
    "HVDLITE_SIZE": "4",
    "HVDLITE_LOCAL_RANK": "1",
    "HVDLITE_LOCAL_SIZE": "4",
    "HVDLITE_RENDEZVOUS": "unix:name",
    "HVDLITE_TOKEN": "ab" * 32,
    "HVDLITE_JOB_ID": "cd" * 16,
    "HVDLITE_EPOCH": "2",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
}

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node1-77@1",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_JOB_ID": "9",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2),2",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
}
SECRET = {"HVDLITE_TOKEN": "ab" * 32}


def test_no_launcher_makes_a_world_of_one() -> None:
    worker = detect({"PATH": "/bin"})
    assert (worker.rank, worker.size, worker.rendezvous, worker.launcher) == (0, 1, None, "none")


def test_hvdlite_run_is_recognised_first() -> None:
    worker = detect({**TORCHRUN, **OWN})
    assert (worker.rank, worker.size, worker.epoch) == (1, 4, 2)
    assert worker.rendezvous == "unix:name"
    assert worker.token == bytes.fromhex("ab" * 32)
    assert worker.token.hex() not in repr(worker)


def test_torchrun_ranks_agree_on_everything_but_who_serves() -> None:
    first, second = detect({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}), detect(TORCHRUN)
    assert (first.rendezvous, first.token, first.job_id) == (
        second.rendezvous,
        second.token,
        second.job_id,
    )
    assert first.serves_store and not second.serves_store


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"HVDLITE_RANK": "x"}, "HVDLITE_RANK=x"),
        ({"HVDLITE_RANK": "4"}, "HVDLITE_RANK=4 and HVDLITE_SIZE=4"),
        ({"HVDLITE_SIZE": ""}, "HVDLITE_SIZE is not set"),
        ({"HVDLITE_TOKEN": "ab"}, "HVDLITE_TOKEN is missing or is not 64 hexadecimal digits"),
        ({"HVDLITE_TOKEN": ""}, "is missing: this process is a child of rank 1, and"),
        ({"HVDLITE_JOB_ID": "zz"}, "HVDLITE_JOB_ID"),
        ({"HVDLITE_RENDEZVOUS": ""}, "HVDLITE_RENDEZVOUS"),
    ],
)
def test_bad_variable_is_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(BootstrapError, match=message):
        detect({**OWN, **change})


@pytest.mark.parametrize(
    ("variables", "launcher", "place"),
    [
        ({**OPEN_MPI, **SLURM, "HVDLITE_RENDEZVOUS": "node1:5"}, "Open MPI", (2, 4, 1, 2, None)),
        ({**HYDRA, **SLURM}, "MPICH", (2, 4, 1, 4, None)),
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, "Slurm", (3, 4, 0, 2, 2)),
        ({**TORCHRUN, **SLURM}, "torchrun", (1, 2, 1, 2, None)),
        ({**TORCHRUN, **OPEN_MPI, **OWN}, "hvdlite-run", (1, 4, 1, 4, None)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MPICH", (1, 2, None, None, None)),
    ],
)
def test_nearest_launcher_is_recognised(
    variables: dict[str, str], launcher: str, place: tuple[int | None, ...]
) -> None:
    worker = detect({**SECRET, **variables})
    assert worker.launcher == launcher
    found = (worker.rank, worker.size, worker.local_rank, worker.local_size, worker.node)
    assert found == place


def test_ranks_started_by_hand_meet_where_they_are_told() -> None:
    by_hand = {"HVDLITE_RANK": "0", "HVDLITE_SIZE": "2", "HVDLITE_RENDEZVOUS": "node1:5", **SECRET}
    first, second = detect(by_hand), detect({**by_hand, "HVDLITE_RANK": "1"})
    assert first.serves_store and not second.serves_store
    assert first.rendezvous == second.rendezvous == "node1:5"
    assert first.job_id == second.job_id and first.token == bytes.fromhex("ab" * 32)
    with pytest.raises(BootstrapError, match="HVDLITE_TOKEN"):
        detect({**by_hand, "HVDLITE_TOKEN": ""})
    with pytest.raises(BootstrapError, match="HVDLITE_RANK=2 and HVDLITE_SIZE=2"):
        detect({**by_hand, "HVDLITE_RANK": "2"})


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"])
def test_batch_script_is_not_a_task_of_slurm(missing: str) -> None:
    variables = {name: value for name, value in SLURM.items() if name != missing}
    assert detect({**variables, "SLURM_PROCID": "0"}).launcher == "none"


def test_ranks_on_several_hosts_meet_at_the_first_with_the_users_secret() -> None:
    worker = detect({**SLURM, **SECRET})
    assert worker.rendezvous is not None and worker.rendezvous.startswith("gpu07:2")
    assert worker.token == bytes.fromhex("ab" * 32)
    assert not worker.serves_store
    assert detect({**SLURM, **SECRET, "SLURM_PROCID": "0"}).serves_store


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        (SLURM, ["HVDLITE_TOKEN ("]),
        (OPEN_MPI, ["HVDLITE_TOKEN (", "HVDLITE_RENDEZVOUS ("]),
        ({**OPEN_MPI, **SECRET}, ["HVDLITE_RENDEZVOUS ("]),
        ({**TORCHRUN, "WORLD_SIZE": "4"}, ["HVDLITE_TOKEN ("]),
    ],
)
def test_what_is_missing_between_hosts_is_said(
    variables: dict[str, str], wanted: list[str]
) -> None:
    with pytest.raises(BootstrapError, match="to meet across hosts") as raised:
        detect(variables)
    said = str(raised.value)
    assert [word for word in ("HVDLITE_TOKEN (", "HVDLITE_RENDEZVOUS (") if word in said] == wanted
    assert SECRET["HVDLITE_TOKEN"] not in said


@pytest.mark.parametrize("variables", [OWN, TORCHRUN, {**SLURM, **SECRET}])
def test_epoch_is_read_under_every_launcher(variables: dict[str, str]) -> None:
    first, second = (detect({**variables, "HVDLITE_EPOCH": str(epoch)}) for epoch in (0, 7))
    assert (first.epoch, second.epoch) == (0, 7)
    assert (first.rendezvous, first.job_id) == (second.rendezvous, second.job_id)
    for wrong in ("-1", "x", str(1 << 32)):
        with pytest.raises(BootstrapError, match=f"HVDLITE_EPOCH={wrong}"):
            detect({**variables, "HVDLITE_EPOCH": wrong})


def test_job_that_slurm_has_requeued_has_another_epoch() -> None:
    requeued = {**SLURM, **SECRET, "SLURM_RESTART_COUNT": "2"}
    assert detect(requeued).epoch == 2
    assert detect({**requeued, "HVDLITE_EPOCH": "5"}).epoch == 5


def test_address_to_listen_at_is_one_of_this_host() -> None:
    by_hand = {"HVDLITE_RANK": "0", "HVDLITE_SIZE": "2", "HVDLITE_RENDEZVOUS": "node1:5", **SECRET}
    assert detect(by_hand).bind_address is None
    for address in ("10.0.0.7", "fd00::7"):
        assert detect({**by_hand, "HVDLITE_BIND_ADDRESS": address}).bind_address == address
    for address, why in (("0.0.0.0", "all addresses"), ("::", "all addresses"), ("node1", "an IP")):
        with pytest.raises(BootstrapError, match=f"HVDLITE_BIND_ADDRESS={address} .*{why}"):
            detect({**by_hand, "HVDLITE_BIND_ADDRESS": address})


def test_local_ranks_of_the_launcher_win() -> None:
    """Open MPI may number ranks across hosts; the identities still decide who shares memory."""
    said = [
        LauncherNumbers(1, 2),
        LauncherNumbers(0, 2),
        LauncherNumbers(0, 2),
        LauncherNumbers(1, 2),
    ]
    topologies = [find_topology(["a", "b", "a", "b"], rank, said) for rank in range(4)]
    assert {topology.host_of for topology in topologies} == {(0, 1, 0, 1)}
    assert [topology.local_rank for topology in topologies] == [1, 0, 0, 1]
    assert [(topology.cross_rank, topology.cross_size) for topology in topologies] == [
        (0, 2),
        (1, 2),
        (0, 2),
        (1, 2),
    ]


def test_contradictory_local_ranks_of_the_launcher_are_not_used() -> None:
    topologies = [
        find_topology(["a", "a"], rank, [LauncherNumbers(0, 1), LauncherNumbers(0, 1)])
        for rank in range(2)
    ]
    assert [topology.local_rank for topology in topologies] == [0, 1]


def test_import_takes_the_secret_out_of_the_environment() -> None:
    code = "import hvdlite, os; print('HVDLITE_TOKEN' in os.environ)"
    environment = {**os.environ, "HVDLITE_TOKEN": "ab" * 32}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert done.stdout.strip() == "False"


def test_topology_follows_from_the_hosts() -> None:
    hosts = ["b", "a", "b", "b", "a"]
    topologies = [find_topology(hosts, rank) for rank in range(5)]
    assert {topology.host_of for topology in topologies} == {(0, 1, 0, 0, 1)}
    assert [topology.local_rank for topology in topologies] == [0, 0, 1, 2, 1]
    assert [topology.local_size for topology in topologies] == [3, 2, 3, 3, 2]
    assert [topology.cross_rank for topology in topologies] == [0, 1, 0, 0, 1]
    assert [topology.cross_size for topology in topologies] == [2, 2, 2, 1, 2]


ELASTIC = {**OWN, "HVDLITE_ELASTIC": "1", "HVDLITE_WORKER": "9", "HVDLITE_NODE": "0"}


def test_worker_of_an_elastic_job_knows_its_number() -> None:
    worker = detect({**ELASTIC, "HVDLITE_ELASTIC_HEARTBEAT": "1.5"})
    assert (worker.elastic, worker.elastic_worker, worker.joiner) == (True, 9, False)
    assert (worker.rank, worker.size, worker.heartbeat) == (1, 4, 1.5)
    assert detect({**ELASTIC, "HVDLITE_JOINER": "1"}).joiner
    assert not detect(OWN).elastic
    assert not detect({**ELASTIC, "HVDLITE_ELASTIC": "0"}).elastic


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"HVDLITE_WORKER": ""}, "HVDLITE_WORKER is not set"),
        ({"HVDLITE_WORKER": "-1"}, "HVDLITE_WORKER=-1 is not a number from 0"),
        ({"HVDLITE_ELASTIC": "yes"}, "HVDLITE_ELASTIC=yes cannot be used: give 1 or 0"),
        ({"HVDLITE_JOINER": "2"}, "HVDLITE_JOINER=2 cannot be used: give 1 or 0"),
        ({"HVDLITE_ELASTIC_HEARTBEAT": "x"}, "HVDLITE_ELASTIC_HEARTBEAT=x cannot be used"),
        ({"HVDLITE_RENDEZVOUS": ""}, "HVDLITE_RENDEZVOUS is not set"),
        ({"HVDLITE_TOKEN": ""}, "HVDLITE_TOKEN is missing"),
        ({"HVDLITE_JOB_ID": ""}, "HVDLITE_ELASTIC is set, but a script of your own started this"),
    ],
)
def test_wrong_variables_of_an_elastic_job_are_named(
    changed: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdlite.rendezvous.environment._kept_token", None)
    for alone in ({}, {"HVDLITE_RANK": "0", "HVDLITE_SIZE": "1"}):
        if alone and "HVDLITE_JOB_ID" in changed:
            continue  # A single rank that was started by hand needs no launcher.
        with pytest.raises(BootstrapError, match=message):
            detect({**ELASTIC, **alone, **changed})


def test_other_launchers_cannot_start_elastic_jobs() -> None:
    with pytest.raises(BootstrapError, match="HVDLITE_ELASTIC is set, but torchrun started this"):
        detect({**TORCHRUN, "HVDLITE_ELASTIC": "1"})
