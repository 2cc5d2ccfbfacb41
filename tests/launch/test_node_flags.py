"""The flags of node mode, and what they read from the variables of cluster software."""

from __future__ import annotations

import pytest

from hvdlite.errors import ArgumentError, BootstrapError
from hvdlite.launch.flags import build_parser
from hvdlite.launch.node import ThisNode, this_node
from hvdlite.launch.resources import available_cores
from hvdlite.rendezvous import environment as own_environment

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "rack[4-6]",
}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "train-node-0-0.train",
}


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDLITE_TOKEN", "ab" * 32)
    for name in ("HVDLITE_START_TIMEOUT", "HVDLITE_BIND_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def flags(*arguments: str, **variables: str) -> tuple[ThisNode | None, int | None]:
    options = build_parser().parse_args([*arguments, "true"])
    found = this_node(options, variables)
    return found, options.num_proc


def test_without_the_flag_there_is_no_node_mode() -> None:
    assert flags("-np", "2", **KUBEFLOW) == (None, 2)


def test_flags_say_everything() -> None:
    found, ranks = flags(
        *("--nodes", "3", "--node-rank", "2", "--meet", "[fe80::1]:5", "-np", "4"),
        *("--start-timeout", "9"),
        HVDLITE_EPOCH="3",
    )
    assert found == ThisNode(3, 2, "[fe80::1]:5", b"\xab" * 32, epoch=3, start_timeout=9)
    assert ranks == 4


def test_variables_of_kubeflow() -> None:
    found, ranks = flags("--nodes", "auto", **KUBEFLOW)
    assert found is not None
    assert (found.nodes, found.node, found.meet) == (2, 1, "train-node-0-0.train:29500")
    assert ranks == 4
    found, ranks = flags("--nodes", "auto", "-np", "3", **{**KUBEFLOW, "PET_MASTER_PORT": "77"})
    assert found is not None and found.meet.endswith(":77")
    assert ranks == 3


@pytest.mark.parametrize(
    ("word", "visible", "ranks"),
    [
        ("gpu", "0,2,5", 3),
        ("auto", "0,1", 2),
        ("cpu", "0,1", available_cores()),
        ("auto", " , ", available_cores()),
    ],
)
def test_words_for_the_number_of_ranks(word: str, visible: str, ranks: int) -> None:
    more = {"PET_NPROC_PER_NODE": word, "CUDA_VISIBLE_DEVICES": visible}
    assert flags("--nodes", "auto", **{**KUBEFLOW, **more})[1] == ranks


def test_one_node_needs_neither_token_nor_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVDLITE_TOKEN")
    monkeypatch.setattr(own_environment, "_kept_token", None)
    assert flags("--nodes", "auto", PET_NNODES="1", PET_NPROC_PER_NODE="2")[1] == 2
    assert flags("--nodes", "1", "-np", "2")[0] == ThisNode(1, 0, "")


def test_one_task_of_slurm_on_each_node() -> None:
    found, _ = flags("--nodes", "auto", "-np", "2", **STEP, SLURM_RESTART_COUNT="4")
    assert found is not None
    assert (found.nodes, found.node, found.epoch) == (3, 2, 4)
    host, _, port = found.meet.partition(":")
    assert host == "rack4" and 20000 <= int(port) < 30000
    other, _ = flags("--nodes", "auto", "-np", "2", **{**STEP, "SLURM_STEP_ID": "2"})
    assert other is not None and other.meet != found.meet


def test_index_of_a_pod_is_the_node_rank() -> None:
    found, _ = flags("--nodes", "4", "--meet", "train-0:5", JOB_COMPLETION_INDEX="3")
    assert found is not None and found.node == 3


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ("--node-rank 1", {}, "belong to --nodes, which is not given"),
        ("--meet a:1", {}, "belong to --nodes, which is not given"),
        ("--nodes 2 -H a,b", {}, "--nodes and -H: a job has one of them"),
        ("--nodes 2 --host-discovery-script x", {}, "--nodes and --host-discovery-script: "),
        ("--nodes 2 --via srun", {}, "--nodes and --via: "),
        ("--nodes two", {}, "--nodes two: give a number from 1, or auto"),
        ("--nodes 0", {}, "--nodes 0: give a number from 1, or auto"),
        ("--nodes 2 --meet a:1", {}, "say which one this is with --node-rank, from 0"),
        ("--nodes 2 --node-rank 2 --meet a:1", {}, "give a number from 0 to 1"),
        ("--nodes 2 --node-rank 1", {}, "say where they meet with --meet HOST:PORT of node 0"),
        ("--nodes 2 --node-rank 1 --meet a:0", {}, "give a port that is free on node 0's host"),
        ("--nodes auto", {}, "neither PET_NNODES is set, nor has srun started one task on each"),
        ("--nodes auto", {"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX=1 says which node"),
    ],
)
def test_flags_that_do_not_suffice(arguments: str, variables: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        flags(*arguments.split(), **variables)


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ("--nodes auto", {**KUBEFLOW, "PET_NNODES": "1:4"}, "PET_NNODES=1:4 is not a number"),
        ("--nodes auto", {**KUBEFLOW, "PET_NPROC_PER_NODE": "x"}, "PET_NPROC_PER_NODE=x cannot"),
        (
            "--nodes auto",
            {**STEP, "SLURM_STEP_NUM_TASKS": "6"},
            "srun started 6 tasks on 3 nodes, .* give srun --ntasks-per-node=1",
        ),
        ("--nodes 2 --node-rank 1 --meet nowhere", {}, "'nowhere' is not an address"),
    ],
)
def test_variables_that_cannot_be_used(
    arguments: str, variables: dict[str, str], message: str
) -> None:
    with pytest.raises(BootstrapError, match=message):
        flags(*arguments.split(), **variables)


def test_missing_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVDLITE_TOKEN")
    monkeypatch.setattr(own_environment, "_kept_token", None)
    with pytest.raises(BootstrapError, match="HVDLITE_TOKEN is missing, by which the nodes"):
        flags("--nodes", "2", "--node-rank", "1", "--meet", "a:1")
