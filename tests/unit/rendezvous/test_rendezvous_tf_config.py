"""TF_CONFIG makes ranks of the chief and the workers, and what it cannot mean is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.environment import detect

SECRET = {"HVDLITE_TOKEN": "ab" * 32}


def tf_config(kind: Any = "worker", index: Any = 0, **cluster: Any) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(
    ("kind", "index", "rank"),
    [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2), ("worker", "1", 2)],
)
def test_chief_and_then_the_workers_are_the_ranks(kind: str, index: Any, rank: int) -> None:
    cluster = {"worker": ["b:1", "c:1"], "ps": ["d:1"], "chief": ["a:1"], "evaluator": ["e:1"]}
    found = detect({"TF_CONFIG": tf_config(kind, index, **cluster), **SECRET})
    assert (found.rank, found.size, found.rendezvous) == (rank, 3, "a:1")


def test_sparse_cluster_and_the_old_name_of_the_chief() -> None:
    cluster = {"worker": {"1": "c:1", "0": "b:1"}, "master": ["a:1"]}
    found = detect({"TF_CONFIG": tf_config("worker", 1, **cluster), **SECRET})
    assert (found.rank, found.size, found.rendezvous) == (2, 3, "a:1")


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"cluster": {}, "task": {}}',
        '{"cluster": null}',
        tf_config(worker=["a:1"]),
        tf_config("chief", chief=["a:1"], evaluator=["b:1"], ps=["c:1"]),
        tf_config("chief", chief=["a:1"], worker=[]),
    ],
)
def test_single_process_that_trains_is_a_world_of_one(text: str) -> None:
    assert detect({"TF_CONFIG": text}).size == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not JSON", r"TF_CONFIG=not JSON cannot be used: it is not JSON \(Expecting"),
        ("[]", "it is not an object of JSON"),
        ('{"cluster": ["a"]}', "its cluster is not an object of JSON"),
        (tf_config(worker="a:1"), "its worker is not a list of addresses"),
        (tf_config(worker={"0": "a:1", "2": "b:1"}), "its worker is not a list of addresses"),
        (tf_config(worker=["a", "b"]), "'a' is not an address: give a host and a port"),
        (tf_config(index=2, worker=["a:1", "b:1"]), "is worker 2, and the cluster has 2 of them"),
        (tf_config(index=-1, worker=["a:1", "b:1"]), "is worker -1, and"),
        (tf_config(index=None, worker=["a:1", "b:1"]), "is worker None, and"),
        (tf_config(index=True, worker=["a:1", "b:1"]), "is worker True, and"),
        (tf_config("chief", worker=["a:1", "b:1"]), "which task of 2 worker this process is"),
        (tf_config(["x"], worker=["a:1", "b:1"]), "which task of 2 worker this process is"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}}', "does not say which task of 2 worker"),
        (tf_config(worker=["a:1", "b:1", "a:1"]), "two tasks have the address a:1"),
        (tf_config("ps", ps=["a:1"], worker=["b:1"]), "'ps', which is not a rank, because it does"),
        (tf_config("evaluator", evaluator=["a:1"], chief=["b:1"]), "'evaluator', which is not a"),
    ],
)
def test_what_cannot_be_used_is_quoted(text: str, message: str) -> None:
    with pytest.raises(BootstrapError, match=message) as raised:
        detect({"TF_CONFIG": text})
    assert f"TF_CONFIG={text}" in str(raised.value)
    assert "start the script with hvdlite-run" in str(raised.value)
    assert detect({"TF_CONFIG": text, "HVDLITE_SIZE": "1"}).size == 1


def test_long_values_are_cut() -> None:
    with pytest.raises(BootstrapError) as raised:
        detect({"TF_CONFIG": tf_config(worker=["worker:1"] * 500)})
    assert len(str(raised.value)) < 500


def test_tasks_of_one_host_need_no_token() -> None:
    cluster = {"chief": ["node1:1"], "worker": ["Node1:2", "node1:3"]}
    chief = detect({"TF_CONFIG": tf_config("chief", 0, **cluster)})
    worker = detect({"TF_CONFIG": tf_config("worker", 1, **cluster)})
    assert chief.rendezvous == worker.rendezvous and chief.token == worker.token
    assert (chief.rendezvous or "").startswith("unix:")
    assert chief.serves_store and not worker.serves_store
    assert (worker.rank, worker.size, worker.local_rank, worker.local_size) == (2, 3, 2, 3)
    assert worker.launcher == "the software that set TF_CONFIG"


def test_tasks_of_several_hosts_meet_at_the_address_of_rank_0() -> None:
    text = tf_config("worker", 1, chief=["a:2222"], worker=["b:2222", "b:2223"])
    worker = detect({"TF_CONFIG": text, **SECRET})
    assert worker.rendezvous == "a:2222"
    assert worker.token == bytes.fromhex(SECRET["HVDLITE_TOKEN"])
    assert (worker.rank, worker.size, worker.local_rank, worker.local_size) == (2, 3, 1, 2)
    assert worker.node == 1
    elsewhere = detect({"TF_CONFIG": text, **SECRET, "HVDLITE_RENDEZVOUS": "a:5"})
    assert elsewhere.rendezvous == "a:5"
    with pytest.raises(BootstrapError, match=r"the software that set TF_CONFIG started 3 ranks, 2"):
        detect({"TF_CONFIG": text})


def test_every_launcher_comes_before_tf_config() -> None:
    text = tf_config("worker", 1, worker=["a:1", "b:1"])
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5"}
    assert detect({"TF_CONFIG": text, **torchrun}).rank == 0
    assert detect({"TF_CONFIG": "not JSON", **torchrun}).size == 2


@pytest.mark.parametrize(
    ("kind", "index", "rank"), [("ps", 0, 0), ("ps", 1, 1), ("chief", 0, 2), ("worker", 1, 4)]
)
def test_tasks_that_serve_come_before_those_that_train(kind: str, index: int, rank: int) -> None:
    cluster = {"worker": ["b:1", "c:1"], "ps": ["d:1", "e:1"], "chief": ["a:1"]}
    text = tf_config(kind, index, **cluster)
    found = detect({"TF_CONFIG": text, **SECRET}, with_servers=True)
    assert (found.rank, found.size, found.servers, found.process) == (rank, 5, 2, rank)
    assert found.rendezvous == "d:1" and found.serves_store == (rank == 0)


def test_what_has_no_servers_or_no_workers_is_refused() -> None:
    synchronous = tf_config("worker", 0, worker=["a:1", "b:1"])
    with pytest.raises(BootstrapError, match=r"has no parameter servers; start it with hvdlite-"):
        detect({"TF_CONFIG": synchronous, **SECRET}, with_servers=True)
    with pytest.raises(BootstrapError, match=r"HVDLITE_SERVERS=2 leaves none of the 2 ranks to"):
        detect({"TF_CONFIG": tf_config("ps", 0, ps=["a:1", "b:1"]), **SECRET}, with_servers=True)
    outside = tf_config("evaluator", 0, evaluator=["e:1"], ps=["a:1"], worker=["b:1"])
    with pytest.raises(BootstrapError, match=r"'evaluator', which is not a rank.*of the type 'ps'"):
        detect({"TF_CONFIG": outside, **SECRET}, with_servers=True)
